"""From the labels of one sample to the tensors the losses compare with."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.config import ModelConfig
from pipeline.dataset.occupancy import ORIGIN_M, SHAPE, VOXEL_M
from pipeline.models.anchors import resample
from pipeline.models.heads.detection import BOX_STATE
from pipeline.models.point_maps import depth_to_bin
from pipeline.taxonomy import DETECTION_CLASSES, MAP_CLASSES, OCCUPANCY_FREE
from pipeline.training.augmentation import Augmentation, occupancy_on_grid
from pipeline.training.labels import UNSEEN, BoxLabels, Labels, MapLines

Floats = NDArray[np.float32]
# Points of a map element that the loss compares.
LINE_POINTS = 20
# Most voxels are free. The loss looks at one of so many of them, chosen anew each time.
FREE_THINNING = 4
OCC3D_RANGE_M = tuple((low, low + VOXEL_M * count) for low, count in zip(ORIGIN_M, SHAPE, strict=True))


@dataclass(frozen=True)
class Targets:
    """Targets of one sample; None where there is no label.

    boxes: (M, 11) box states with NaN velocities where unknown, and box_class (M,).
    lines: (L, V, 20, 2) the same element in its V equivalent point orders (the order does not matter, so the loss takes the nearest), metres; line_class (L,), line_closed (L,).
    occupancy: (V,) classes in the order of the head, UNSEEN where no camera looks.
    depth_bin: (6, Hf, Wf) bin of the nearest lidar point, -1 without one.
    image_heat: (6, 10, Hf, Wf), bev_heat: (10, Y, X), bev_lines: (3, Y, X), all in [0, 1].
    """

    boxes: Tensor
    box_class: Tensor
    lines: Tensor | None
    line_class: Tensor | None
    line_closed: Tensor | None
    occupancy: Tensor | None
    depth_bin: Tensor | None
    image_heat: Tensor
    bev_heat: Tensor
    bev_lines: Tensor | None


def make_targets(labels: Labels, augmentation: Augmentation, ego2img: Floats, config: ModelConfig, random: np.random.Generator) -> Targets:
    """Targets for labels that are already in the augmented frame (occupancy alone is still in the ego frame); `ego2img` (6, 4, 4) as the network gets it."""
    boxes = boxes_in_range(labels.boxes, config)
    lines = None if labels.map is None else line_orders(labels.map)
    occupancy = None if labels.occupancy is None else thin_free(occupancy_target(labels.occupancy, augmentation, config), random)
    depth = None if labels.lidar_m is None else depth_target(labels.lidar_m, ego2img, config)
    return Targets(
        boxes=torch.from_numpy(box_states(boxes)),
        box_class=torch.from_numpy(boxes.class_id),
        lines=None if lines is None else torch.from_numpy(lines),
        line_class=None if labels.map is None else torch.from_numpy(labels.map.class_id),
        line_closed=None if labels.map is None else torch.from_numpy(labels.map.closed),
        occupancy=None if occupancy is None else torch.from_numpy(occupancy),
        depth_bin=None if depth is None else torch.from_numpy(depth),
        image_heat=torch.from_numpy(image_heat(boxes, ego2img, config)),
        bev_heat=torch.from_numpy(bev_heat(boxes, config)),
        bev_lines=None if labels.map is None else torch.from_numpy(bev_lines(labels.map, config)),
    )


def boxes_in_range(boxes: BoxLabels, config: ModelConfig) -> BoxLabels:
    """Boxes whose centre is less than 5 m outside the BEV grid: beyond that nothing of them can be seen in it."""
    margin = 5.0
    keep = np.ones(len(boxes.class_id), dtype=bool)
    for axis, (low, high) in enumerate((config.view.x_range_m, config.view.y_range_m)):
        keep &= (boxes.centers_m[:, axis] > low - margin) & (boxes.centers_m[:, axis] < high + margin)
    return BoxLabels(boxes.centers_m[keep], boxes.size_wlh_m[keep], boxes.yaw_rad[keep], boxes.velocity_mps[keep], boxes.class_id[keep])


def box_states(boxes: BoxLabels) -> Floats:
    """(M, 11) box states."""
    states = np.zeros((len(boxes.class_id), BOX_STATE), dtype=np.float32)
    states[:, :3] = boxes.centers_m
    states[:, 3:6] = np.log(np.maximum(boxes.size_wlh_m, 0.05))
    states[:, 6], states[:, 7] = np.sin(boxes.yaw_rad), np.cos(boxes.yaw_rad)
    states[:, 8:10] = boxes.velocity_mps
    return states


def line_orders(lines: MapLines) -> Floats:
    """(L, V, 20, 2): forwards and backwards; a closed element also from every point on. Open elements repeat their two orders to fill V."""
    count = 2 * (LINE_POINTS - 1) if lines.closed.any() else 2
    orders = np.zeros((len(lines.class_id), count, LINE_POINTS, 2), dtype=np.float32)
    for number, (line, closed) in enumerate(zip(lines.points_m, lines.closed, strict=True)):
        points = resample(line, LINE_POINTS)
        if not closed:
            orders[number, 0::2], orders[number, 1::2] = points, points[::-1]
            continue
        ring = points[:-1]
        for shift in range(LINE_POINTS - 1):
            turned = np.roll(ring, -shift, axis=0)
            turned = np.concatenate([turned, turned[:1]])
            orders[number, 2 * shift], orders[number, 2 * shift + 1] = turned, turned[::-1]
    return orders


def occupancy_target(semantics: NDArray[np.uint8], augmentation: Augmentation, config: ModelConfig) -> NDArray[np.uint8]:
    """(V,) labels of all levels, each in the order y, x, z."""
    flat = []
    for level in config.occupancy.levels:
        ranges = (level.x_range_m, level.y_range_m, level.z_range_m)
        centers = tuple((low + (np.arange(n) + 0.5) * (high - low) / n).astype(np.float32) for (low, high), n in zip(ranges, level.cells, strict=True))
        flat.append(occupancy_on_grid(semantics, augmentation, (centers[0], centers[1], centers[2]), OCC3D_RANGE_M).reshape(-1))
    return np.concatenate(flat)


def thin_free(occupancy: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """(V,) labels with all but one of FREE_THINNING free voxels marked UNSEEN."""
    dropped = (occupancy == OCCUPANCY_FREE) & (random.integers(0, FREE_THINNING, occupancy.shape, dtype=np.uint8) > 0)
    return np.where(dropped, np.uint8(UNSEEN), occupancy)


def depth_target(lidar_m: Floats, ego2img: Floats, config: ModelConfig) -> NDArray[np.int64]:
    """(6, Hf, Wf) bin of the nearest lidar point in each feature cell, -1 without one."""
    stride = config.view.feature_stride
    rows, columns = config.image_size[0] // stride, config.image_size[1] // stride
    depth = np.full((len(ego2img), rows * columns), np.inf, dtype=np.float32)
    for camera, projection in enumerate(ego2img):
        image = lidar_m @ projection[:3, :3].T + projection[:3, 3]
        image = image[image[:, 2] > 0.5]
        pixel = (image[:, :2] / image[:, 2:] + 0.5) / stride
        inside = ((pixel >= 0) & (pixel < (columns, rows))).all(axis=1)
        cell, near = pixel[inside].astype(np.int64), image[inside, 2]
        order = np.argsort(-near)  # the nearest point is written last
        depth[camera, cell[order, 1] * columns + cell[order, 0]] = near[order]
    bins = np.round(depth_to_bin(np.where(np.isfinite(depth), depth, 1e6), config.view))
    bins[(bins < 0) | (bins > config.view.depth_bins - 1)] = -1
    return bins.astype(np.int64).reshape(len(ego2img), rows, columns)


def image_heat(boxes: BoxLabels, ego2img: Floats, config: ModelConfig) -> Floats:
    """(6, 10, Hf, Wf): a bell around each box centre in the image features, as wide as the box looks."""
    stride = config.detection.feature_stride
    rows, columns = config.image_size[0] // stride, config.image_size[1] // stride
    heat = np.zeros((len(ego2img), len(DETECTION_CLASSES), rows, columns), dtype=np.float32)
    for camera, projection in enumerate(ego2img):
        image = boxes.centers_m @ projection[:3, :3].T + projection[:3, 3]
        for number in np.flatnonzero(image[:, 2] > 1.0):
            depth_m = image[number, 2]
            center = (image[number, :2] / depth_m + 0.5) / stride - 0.5
            width_m, length_m, height_m = boxes.size_wlh_m[number]
            # Vertical focal length over depth turns metres into pixels; the width seen is between width and length of the box.
            pixels_per_m = float(np.linalg.norm(projection[1, :3])) / depth_m / stride
            sigma = np.maximum(0.25 * pixels_per_m * np.array([0.5 * (width_m + length_m), height_m]), 0.6)
            _add_bell(heat[camera, boxes.class_id[number]], center, sigma)
    return heat


def bev_heat(boxes: BoxLabels, config: ModelConfig) -> Floats:
    """(10, Y, X): a bell around each box centre, at least one cell wide."""
    rows, columns = config.view.cells
    heat = np.zeros((len(DETECTION_CLASSES), rows, columns), dtype=np.float32)
    cells = _bev_pixels(boxes.centers_m[:, :2], config)
    cell_m = (config.view.x_range_m[1] - config.view.x_range_m[0]) / columns
    for number, class_id in enumerate(boxes.class_id):
        sigma = max(0.8, 0.2 * float(boxes.size_wlh_m[number, :2].mean()) / cell_m)
        _add_bell(heat[class_id], cells[number], np.array([sigma, sigma]))
    return heat


def _add_bell(heat: Floats, center: NDArray[np.floating], sigma: NDArray[np.floating]) -> None:
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


def bev_lines(lines: MapLines, config: ModelConfig) -> Floats:
    """(3, Y, X): map elements drawn one cell wide."""
    rows, columns = config.view.cells
    canvas = np.zeros((len(MAP_CLASSES), rows, columns), dtype=np.uint8)
    for line, class_id in zip(lines.points_m, lines.class_id, strict=True):
        # Fixed-point coordinates with 4 fractional bits.
        pixels = np.round(_bev_pixels(line, config) * 16).astype(np.int32)
        cv2.polylines(canvas[class_id], [pixels[:, None]], isClosed=False, color=1, thickness=1, shift=4)
    return canvas.astype(np.float32)


def _bev_pixels(points_m: Floats, config: ModelConfig) -> Floats:
    """(P, 2) metres -> (column, row) of the BEV grid, cell centres at whole numbers."""
    low = np.float32([config.view.x_range_m[0], config.view.y_range_m[0]])
    high = np.float32([config.view.x_range_m[1], config.view.y_range_m[1]])
    return (points_m - low) / (high - low) * np.float32(config.view.cells[::-1]) - 0.5


__all__ = ["LINE_POINTS", "UNSEEN", "Targets", "make_targets"]
