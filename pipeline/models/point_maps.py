"""Point maps of the view transform: where each BEV cell looks into the camera features, computed on the host from the calibration.

The six camera features are stacked into one tall image [6 * Hf, Wf] (cameras in the order of taxonomy.CAMERAS). The depth distribution is laid out
as an image
[6 * Hf, Wf * D] in which column u * D + d holds bin d of feature column u. A point map holds, for K points a cell, normalised sampling positions in
[-1, 1] as
GridSample takes them with align_corners=False; a point no camera sees has the position (-2, -2), which samples zero.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline.config import ViewConfig
from pipeline.taxonomy import CAMERAS

Floats = NDArray[np.float32]
OUTSIDE = -2.0
MIN_DEPTH_M = 0.5


def bev_cell_centers(config: ViewConfig) -> tuple[Floats, Floats]:
    """Centres of the BEV cells in metres: x (X,) ascending forward, y (Y,) ascending to the left."""
    rows, columns = config.cells
    return _centers(config.x_range_m, columns), _centers(config.y_range_m, rows)


def _centers(bounds_m: tuple[float, float], cells: int) -> Floats:
    low, high = bounds_m
    return (low + (np.arange(cells) + 0.5) * (high - low) / cells).astype(np.float32)


def depth_to_bin(depth_m: Floats, config: ViewConfig) -> Floats:
    """Continuous bin number of a depth along the optical axis; bins are spaced by equal ratios between the two ends of `depth_range_m`."""
    low, high = config.depth_range_m
    return np.log(np.maximum(depth_m, 1e-3) / low) * ((config.depth_bins - 1) / np.log(high / low))


@lru_cache(maxsize=4)
def cell_points(config: ViewConfig) -> Floats:
    """(heights, Y, X, 3) points x, y, z of the BEV frame, metres."""
    x, y = bev_cell_centers(config)
    z, yy, xx = np.meshgrid(np.array(config.heights_m, dtype=np.float32), y, x, indexing="ij")
    return np.stack([xx, yy, z], axis=-1)


def point_maps(ego2img: Floats, image_size: tuple[int, int], config: ViewConfig) -> tuple[Floats, Floats]:
    """Sampling positions of every BEV cell.

    Args:
        ego2img: (6, 4, 4) projections of the BEV frame into the network inputs, pixels.
        image_size: height and width of the network input.

    Returns:
        point_map_feature and point_map_depth, both (K, Y, X, 2) with K = heights x cameras_per_point, points of one height adjacent.
    """
    points = cell_points(config).reshape(-1, 3)
    u, v, depth_m = _project(points, ego2img)
    height, width = image_size
    visible = (depth_m > MIN_DEPTH_M) & (u > -0.5) & (u < width - 0.5) & (v > -0.5) & (v < height - 0.5)
    bins = depth_to_bin(depth_m, config)
    visible &= (bins >= 0) & (bins <= config.depth_bins - 1)
    order = _best_cameras(u, visible, width, config.cameras_per_point)
    maps = [_positions(camera, u, v, bins, visible, image_size, config) for camera in order]
    shape = (len(config.heights_m), *config.cells, 2)
    feature = np.stack([positions[0].reshape(shape) for positions in maps], axis=1)
    depth = np.stack([positions[1].reshape(shape) for positions in maps], axis=1)
    return feature.reshape(-1, *shape[1:]), depth.reshape(-1, *shape[1:])


def _project(points: Floats, ego2img: Floats) -> tuple[Floats, Floats, Floats]:
    """(P, 3) points -> u, v (pixels) and depth (metres), each (6, P)."""
    homogeneous = ego2img[:, :3, :3] @ np.ascontiguousarray(points.T) + ego2img[:, :3, 3:]
    depth_m = homogeneous[:, 2]
    inverse = 1.0 / np.maximum(depth_m, MIN_DEPTH_M)
    return homogeneous[:, 0] * inverse, homogeneous[:, 1] * inverse, depth_m


def _best_cameras(u: Floats, visible: NDArray[np.bool_], width: int, count: int) -> list[NDArray[np.int64]]:
    """For each point the cameras that see it nearest to their image centre: `count` arrays (P,)."""
    off_center = np.where(visible, np.abs(u - (width - 1) / 2), np.inf)
    first = off_center.argmin(axis=0)
    if count == 1:
        return [first]
    np.put_along_axis(off_center, first[None], np.inf, axis=0)
    second = off_center.argmin(axis=0)
    # Without a second camera argmin returns camera 0, which may be the first choice: point to one that does not see the point.
    second = np.where(np.isinf(off_center.min(axis=0)), (~visible).argmax(axis=0), second)
    return [first, second]


def _positions(
    camera: NDArray[np.int64], u: Floats, v: Floats, bins: Floats, visible: NDArray[np.bool_], image_size: tuple[int, int], config: ViewConfig
) -> tuple[Floats, Floats]:
    """Normalised positions (P, 2) of the chosen camera's pixel in the stacked feature and in the depth image."""
    index = np.arange(camera.shape[0])
    u, v, bins = u[camera, index], v[camera, index], np.clip(bins[camera, index], 0, config.depth_bins - 1)
    column, row, rows, columns = _stacked_pixel(camera, u, v, image_size, config.feature_stride)
    feature = np.stack([(2 * column + 1) / columns - 1, (2 * row + 1) / rows - 1], axis=-1)
    column, row, rows, columns = _stacked_pixel(camera, u, v, image_size, config.depth_stride)
    depth_column = np.round(column) * config.depth_bins + bins
    depth = np.stack([(2 * depth_column + 1) / (columns * config.depth_bins) - 1, (2 * row + 1) / rows - 1], axis=-1)
    hidden = ~visible[camera, index]
    feature[hidden] = OUTSIDE
    depth[hidden] = OUTSIDE
    return feature.astype(np.float32), depth.astype(np.float32)


def _stacked_pixel(camera: NDArray[np.int64], u: Floats, v: Floats, image_size: tuple[int, int], stride: int) -> tuple[Floats, Floats, int, int]:
    """Feature column and row (P,) in the stack of six cameras, and the stack's rows and columns."""
    rows, columns = (side // stride for side in image_size)
    # Clamped to pixel centres at the border, so that a sample never mixes two cameras.
    column = np.clip((u + 0.5) / stride - 0.5, 0, columns - 1)
    row = np.clip((v + 0.5) / stride - 0.5, 0, rows - 1) + camera * rows
    return column, row, rows * len(CAMERAS), columns
