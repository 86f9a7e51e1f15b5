"""Do the lidar's depth edges lie on the edges of the images? The only witness against a calibration that is wrong in the same way in all logs.

Where a beam of the lidar jumps from a near surface to a far one, the outline of the near surface passes, and the image should change there, too
(after Levinson and Thrun, "Automatic Online Calibration of Cameras and Lasers", RSS 2013). The depth edges are projected into the image and
correlated with its vertical edges under all shifts of a window. With the right calibration the correlation stands out where nothing is shifted. The
sum over several samples makes it stand out further; a wrong calibration stays in the noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.build import matrices
from pipeline.dataset.geometry import FloatArray, invert, pad_intrinsics, project
from pipeline.dataset.lidar import read_points
from pipeline.dataset.records import LidarFrame
from pipeline.errors import DataError
from pipeline.taxonomy import CAMERAS
from pipeline.validation.context import Context, vehicle_of_sample
from pipeline.validation.projection import lidar_frames

Map = NDArray[np.float32]
# Images are compared at about this width: fine enough for half a degree, coarse enough to bridge the parallax of lidar and camera.
WIDTH_PX = 400
# Shifts that are tried, in pixels of that width. Edges of one object stay inside, so the rest of the window is noise to compare with.
SHIFT_X, SHIFT_Y = 48, 24
# A jump in range counts from this on, absolute and as a share of the nearer range.
MIN_STEP_M, MIN_STEP_RATIO = 0.3, 0.1
# Nearer returns are the vehicle itself.
MIN_RANGE_M = 3.0
# One image may have no edges where the lidar has some: a verdict takes at least two.
MIN_SAMPLES = 2
MIN_RINGS = 8


@dataclass
class _Sum:
    """Correlations of one camera added up."""

    shifted: FloatArray = field(default_factory=lambda: np.zeros((2 * SHIFT_Y + 1, 2 * SHIFT_X + 1)))
    samples: int = 0


def measure(context: Context) -> pa.Table:
    """One row a camera of a vehicle (token: `vehicle/channel`): samples, and edge_agreement, how far the correlation of depth and image edges at
    the given calibration stands above its mean over all shifts, in standard deviations (null with fewer than two usable samples)."""
    sums: dict[str, _Sum] = {}
    lidar = lidar_frames(context)
    for vehicle, row in _chosen(context, lidar):
        edges = _depth_edges(lidar[row["token"]])
        if edges is None:
            continue
        frames = context.index.frames.slice(row["first_frame"], row["frames"])
        for channel, image, lidar2img in _views(context, frames, lidar[row["token"]]):
            total = sums.setdefault(f"{vehicle}/{channel}", _Sum())
            total.shifted += correlate(image, *edges, lidar2img)
            total.samples += 1
    names = sorted(sums)
    agreement = np.array([peak(sums[name].shifted) if sums[name].samples >= MIN_SAMPLES else np.nan for name in names], dtype=np.float64)
    return pa.table(
        {
            "token": pa.array(names, pa.string()),
            "samples": pa.array([sums[name].samples for name in names], pa.int64()),
            "edge_agreement": pa.array(agreement, mask=~np.isfinite(agreement)),
        }
    )


def _chosen(context: Context, lidar: dict[str, LidarFrame]) -> Iterator[tuple[str, dict[str, Any]]]:
    """At most `edge_samples` samples of each vehicle, evenly spread over those with a lidar file: vehicle and row of the index."""
    columns = ["token", "first_frame", "frames"]
    rows = context.index.samples.select(columns).to_pylist()
    by_vehicle: dict[str, list[dict[str, Any]]] = {}
    for vehicle, row in zip(vehicle_of_sample(context), rows, strict=True):
        if row["token"] in lidar:
            by_vehicle.setdefault(str(vehicle), []).append(row)
    for vehicle, own in by_vehicle.items():
        for number in np.unique(np.linspace(0, len(own) - 1, context.config.edge_samples).round().astype(int)):
            yield vehicle, own[number]


def _views(context: Context, frames: pa.Table, lidar: LidarFrame) -> Iterator[tuple[str, Map, FloatArray]]:
    """Channel, edge image and projection (4,4) of lidar points into it, of each camera frame whose image can be read."""
    intrinsics = matrices(frames["intrinsics"], 3)
    sensor2ego, ego2global = matrices(frames["sensor2ego"], 4), matrices(frames["ego2global"], 4)
    for i, row in enumerate(frames.select(["channel", "filename", "width"]).to_pylist()):
        image = _grey(context.dataroot / row["filename"], row["width"]) if row["channel"] in CAMERAS and row["width"] else None
        if image is None:
            continue
        scale = image.shape[1] / row["width"]
        camera = np.diag([scale, scale, 1.0]) @ intrinsics[i]
        lidar2camera = invert(sensor2ego[i]) @ invert(ego2global[i]) @ lidar.ego2global @ lidar.lidar2ego
        if np.isfinite(camera).all() and np.isfinite(lidar2camera).all():
            yield row["channel"], vertical_edges(image), pad_intrinsics(camera) @ lidar2camera


def _grey(path: Path, width_px: int) -> NDArray[np.uint8] | None:
    """A grey image no wider than WIDTH_PX; None where it cannot be read, which is a finding of its own."""
    if not path.is_file() or not path.stat().st_size:
        return None
    # Decoding a JPEG at a quarter of its size takes a third of the time.
    image = cv2.imread(str(path), cv2.IMREAD_REDUCED_GRAYSCALE_4 if width_px >= 4 * WIDTH_PX else cv2.IMREAD_GRAYSCALE)
    if image is None:
        return None
    scale = min(1.0, WIDTH_PX / image.shape[1])
    return np.asarray(cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA), dtype=np.uint8)


def _depth_edges(lidar: LidarFrame) -> tuple[FloatArray, FloatArray] | None:
    """Depth edges of a sweep; None where the file cannot be read, or does not say which beam a return is of."""
    try:
        points = read_points(lidar.path).astype(np.float64)
    except DataError:  # a finding of its own
        return None
    return depth_edges(points) if len(np.unique(points[:, 4])) >= MIN_RINGS else None


def depth_edges(points: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Near sides of jumps in range between returns of one beam that follow each other.

    Args:
        points: (N,5) x, y, z in metres, intensity, ring, lidar frame.

    Returns:
        Points (K,3), and weights (K,): the root of the jump's share of the nearer range, at most 1.
    """
    range_m = np.linalg.norm(points[:, :3], axis=1)
    usable = np.isfinite(range_m) & (range_m > MIN_RANGE_M)
    points, range_m = points[usable], range_m[usable]
    order = np.lexsort((np.arctan2(points[:, 1], points[:, 0]), points[:, 4]))
    points, range_m = points[order], range_m[order]
    step = np.where(points[1:, 4] == points[:-1, 4], np.diff(range_m), 0.0)
    farther = np.maximum(np.append(step, 0.0), np.append(0.0, -step))
    edge = farther > np.maximum(MIN_STEP_M, MIN_STEP_RATIO * range_m)
    return points[edge, :3], np.sqrt(np.minimum(farther[edge] / range_m[edge], 1.0))


def vertical_edges(image: NDArray[np.uint8]) -> Map:
    """Strength of vertical edges of a grey image (H,W) relative to their surroundings, so that a busy corner does not outvote the rest."""
    strength = np.abs(cv2.Sobel(image.astype(np.float32), cv2.CV_32F, 1, 0, ksize=3))
    strength = cv2.GaussianBlur(np.minimum(strength, np.percentile(strength, 97).astype(np.float32)), (0, 0), 1.2)
    side = (2 * (image.shape[1] // 20) + 1,) * 2
    mean = cv2.blur(strength, side)
    deviation = np.sqrt(np.maximum(cv2.blur(strength * strength, side) - mean * mean, 0.0))
    return np.asarray((strength - mean) / (deviation + 0.3 * deviation.mean() + 1e-3), dtype=np.float32)


def correlate(image: Map, points_m: FloatArray, weights: FloatArray, lidar2img: FloatArray) -> FloatArray:
    """Correlation of projected depth edges with an edge image under every shift.

    Args:
        image: (H,W) edge strengths.
        points_m: (K,3) depth edges, lidar frame.
        weights: (K,).
        lidar2img: (4,4) projection into the image.

    Returns:
        (2 SHIFT_Y + 1, 2 SHIFT_X + 1) sums of weight times strength; nothing is shifted in the middle.
    """
    pixel, depth_m = project(lidar2img, points_m)
    pixel = np.where(depth_m[:, None] > 1.0, pixel, -1.0)
    inside = ((pixel >= 0) & (pixel <= np.array(image.shape[::-1]) - 1)).all(axis=1)
    column, row = pixel[inside].round().astype(np.int64).T
    drawn = np.zeros(image.shape)
    np.add.at(drawn, (row, column), weights[inside])
    # Room for the largest shift, so that the circular correlation does not wrap around.
    size = (image.shape[0] + SHIFT_Y, image.shape[1] + SHIFT_X)
    product = np.fft.irfft2(np.fft.rfft2(image, size) * np.conj(np.fft.rfft2(drawn, size)), size)
    return np.roll(product, (SHIFT_Y, SHIFT_X), (0, 1))[: 2 * SHIFT_Y + 1, : 2 * SHIFT_X + 1]


def peak(shifted: FloatArray) -> float:
    """Largest correlation within one pixel of no shift, in standard deviations above the mean over all shifts; NaN without any variation."""
    middle = shifted[SHIFT_Y - 1 : SHIFT_Y + 2, SHIFT_X - 1 : SHIFT_X + 2].max()
    deviation = shifted.std()
    return float((middle - shifted.mean()) / deviation) if deviation > 0 else float("nan")
