"""Targets in the image features: depth and class where the lidar hits, box centres, map elements.

They need no view transform, which makes them the cheapest teachers: the first part of a training runs on them alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.config import ModelConfig
from pipeline.models.anchors import resample
from pipeline.models.point_maps import depth_to_bin
from pipeline.taxonomy import DETECTION_CLASSES, MAP_CLASSES
from pipeline.training.labels import UNSEEN, BoxLabels, Labels, MapLines

Floats = NDArray[np.float32]
NEAREST_M = 1.0


@dataclass(frozen=True)
class ImageTargets:
    """Targets of one sample; None where there is no label. Lines have the stride of the lifted feature (Hf, Wf), the others that of depth (Hd, Wd).

    depth_bin: (6, Hd, Wd) depth in (fractional) bins of the lidar point nearest to the cell's centre, -1 without one.
    surface: (6, Hd, Wd) Occ3D class of that point, UNSEEN where unknown.
    heat: (6, 10, Hd, Wd) bells at the box centres, in [0, 1]; half precision, because these targets are kept.
    lines: (6, 3, Hf, Wf) map elements, one cell wide, 0 or 1, UNSEEN for a class that the map does not know; bytes.
    """

    depth_bin: Tensor | None
    surface: Tensor | None
    heat: Tensor
    lines: Tensor | None

    def mirrored(self) -> ImageTargets:
        """The targets of the mirrored images. Turning the ego frame needs no such step: it changes no pixel."""
        flipped = [None if target is None else target.flip(-1) for target in (self.depth_bin, self.surface, self.heat, self.lines)]
        assert flipped[2] is not None
        return ImageTargets(flipped[0], flipped[1], flipped[2], flipped[3])


def make_image_targets(labels: Labels, ego2img: Floats, config: ModelConfig) -> ImageTargets:
    """Targets for labels and projections (6, 4, 4) that are in the same frame."""
    depth_bin = surface = lines = None
    if labels.lidar_m is not None and labels.lidar_class is not None:
        bins, classes = lidar_targets(labels.lidar_m, labels.lidar_class, ego2img, config)
        depth_bin, surface = torch.from_numpy(bins), torch.from_numpy(classes)
    if labels.map is not None:
        lines = torch.from_numpy(image_lines(labels.map, ego2img, config))
    return ImageTargets(depth_bin, surface, torch.from_numpy(image_heat(labels.boxes, ego2img, config)).half(), lines)


def feature_shape(config: ModelConfig, stride: int) -> tuple[int, int]:
    """Rows and columns of the image feature of a stride."""
    return config.image_size[0] // stride, config.image_size[1] // stride


def lidar_targets(lidar_m: Floats, lidar_class: NDArray[np.uint8], ego2img: Floats, config: ModelConfig) -> tuple[Floats, NDArray[np.uint8]]:
    """Depth bins and classes (6, Hd, Wd) of the point (M, 3) that is nearest to each feature cell's centre, which is where the lift samples the cell.

    Cells without a point have -1 and UNSEEN.
    """
    rows, columns = feature_shape(config, config.view.depth_stride)
    depth = np.full((len(ego2img), rows * columns), np.inf, dtype=np.float32)
    surface = np.full(depth.shape, UNSEEN, dtype=np.uint8)
    for camera, projection in enumerate(ego2img):
        image = lidar_m @ projection[:3, :3].T + projection[:3, 3]
        ahead = image[:, 2] > NEAREST_M
        image, classes = image[ahead], lidar_class[ahead]
        pixel = (image[:, :2] / image[:, 2:] + 0.5) / config.view.depth_stride
        inside = ((pixel >= 0) & (pixel < (columns, rows))).all(axis=1)
        cell, near, classes = pixel[inside].astype(np.int64), image[inside, 2], classes[inside]
        off_center = np.abs(pixel[inside] - cell - 0.5).max(axis=1)
        order = np.argsort(-off_center, kind="stable")  # the most central point is written last
        place = cell[order, 1] * columns + cell[order, 0]
        depth[camera, place], surface[camera, place] = near[order], classes[order]
    bins = depth_to_bin(np.where(np.isfinite(depth), depth, 1e6), config.view)
    bins[(bins < 0) | (bins > config.view.depth_bins - 1)] = -1
    shape = (len(ego2img), rows, columns)
    return bins.astype(np.float32).reshape(shape), surface.reshape(shape)


def image_heat(boxes: BoxLabels, ego2img: Floats, config: ModelConfig) -> Floats:
    """(6, 10, Hd, Wd): a bell around each box centre in the image features, as wide as the box looks."""
    stride = config.view.depth_stride
    rows, columns = feature_shape(config, config.view.depth_stride)
    heat = np.zeros((len(ego2img), len(DETECTION_CLASSES), rows, columns), dtype=np.float32)
    for camera, projection in enumerate(ego2img):
        image = boxes.centers_m @ projection[:3, :3].T + projection[:3, 3]
        for number in np.flatnonzero(image[:, 2] > NEAREST_M):
            depth_m = image[number, 2]
            center = (image[number, :2] / depth_m + 0.5) / stride - 0.5
            width_m, length_m, height_m = boxes.size_wlh_m[number]
            # Vertical focal length over depth turns metres into pixels; the width seen is between width and length of the box.
            pixels_per_m = float(np.linalg.norm(projection[1, :3])) / depth_m / stride
            sigma = np.maximum(0.25 * pixels_per_m * np.array([0.5 * (width_m + length_m), height_m]), 0.6)
            add_bell(heat[camera, boxes.class_id[number]], center, sigma)
    return heat


def add_bell(heat: Floats, center: NDArray[np.floating], sigma: NDArray[np.floating]) -> None:
    """Raise `heat` (rows, columns) to a bell around `center` (column, row); its top is the cell nearest to the centre."""
    top = np.round(center).astype(int)
    low = np.maximum(top - np.ceil(3 * sigma).astype(int), 0)
    high = np.minimum(top + np.ceil(3 * sigma).astype(int) + 1, heat.shape[::-1])
    if (low >= high).any() or (top < 0).any() or (top >= heat.shape[::-1]).any():
        return
    x = np.exp(-0.5 * ((np.arange(low[0], high[0]) - top[0]) / sigma[0]) ** 2)
    y = np.exp(-0.5 * ((np.arange(low[1], high[1]) - top[1]) / sigma[1]) ** 2)
    window = heat[low[1] : high[1], low[0] : high[0]]
    np.maximum(window, np.outer(y, x), out=window)


def image_lines(lines: MapLines, ego2img: Floats, config: ModelConfig) -> NDArray[np.uint8]:
    """(6, 3, Hf, Wf): map elements on the ground as the cameras see them; pieces behind a camera are left out."""
    rows, columns = feature_shape(config, config.view.feature_stride)
    canvas = np.zeros((len(ego2img), len(MAP_CLASSES), rows, columns), dtype=np.uint8)
    canvas[:, ~lines.labelled] = UNSEEN
    for line_m, class_id in zip(lines.points_m, lines.class_id, strict=True):
        ground = resample(line_m, max(2, round(float(np.linalg.norm(np.diff(line_m, axis=0), axis=1).sum()))))  # a point a metre
        for camera, projection in enumerate(ego2img):
            image = ground @ projection[:3, :2].T + projection[:3, 3]
            ahead = image[:, 2] > NEAREST_M
            pixel = (image[:, :2] / np.maximum(image[:, 2:], NEAREST_M) + 0.5) / config.view.feature_stride - 0.5
            # Fixed-point coordinates with 4 fractional bits, far outside at most.
            fixed = np.round(pixel.clip(-1e3, 1e3) * 16).astype(np.int32)
            pieces = [fixed[index : index + 2, None] for index in np.flatnonzero(ahead[:-1] & ahead[1:])]
            cv2.polylines(canvas[camera, class_id], pieces, isClosed=False, color=(1,), thickness=1, shift=4)
    return canvas
