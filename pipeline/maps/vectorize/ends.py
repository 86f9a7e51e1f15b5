"""Straight lines fitted to the ends of paths, for all ends at once, and paths re-traced to moved nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.network import Network
from pipeline.maps.vectorize.skeleton import IntArray


@dataclass(frozen=True)
class EndFit:
    """Line through a window of points near each of A path ends."""

    center: FloatArray  # (A, 2) mean of the window
    direction: FloatArray  # (A, 2) unit vector towards the end
    base: FloatArray  # (A, 2) the window's point nearest to the end, moved onto the line
    skipped: IntArray  # (A,) points between the end and the window


def fit_ends(network: Network, path: IntArray, side: IntArray, skip_px: FloatArray, window_px: FloatArray) -> EndFit:
    """Total least squares line through the points from `skip_px` to `skip_px + window_px` before each path end.

    On a path too short for that, the window is moved towards the end and shortened; it keeps at least two points.

    Args:
        network: the paths.
        path, side: (A,) path and which end of it, 0 first or 1 last.
        skip_px, window_px: (A,) in points, which are 1 to 1.4 px apart.
    """
    last = np.diff(network.offsets)[path] - 1
    near = np.minimum(np.ceil(skip_px).astype(np.int64), last // 2)
    far = np.minimum(near + np.maximum(np.ceil(window_px).astype(np.int64), 1), last)
    flat_near, flat_far = (np.where(side == 0, network.offsets[path] + k, network.offsets[path + 1] - 1 - k) for k in (near, far))
    low, high = np.minimum(flat_near, flat_far), np.maximum(flat_near, flat_far) + 1
    x, y = (network.points - network.points.mean(axis=0)).T
    sums = np.concatenate([np.zeros((1, 5)), np.cumsum(np.stack([x, y, x * x, x * y, y * y], axis=1), axis=0)])
    mean_x, mean_y, xx, xy, yy = ((sums[high] - sums[low]) / (high - low)[:, None]).T
    angle = 0.5 * np.arctan2(2.0 * (xy - mean_x * mean_y), (xx - mean_x**2) - (yy - mean_y**2))
    direction = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    outward = network.points[flat_near] - network.points[flat_far]
    direction *= np.where((direction * outward).sum(axis=1) < 0.0, -1.0, 1.0)[:, None]
    center = np.stack([mean_x, mean_y], axis=1) + network.points.mean(axis=0)
    along = ((network.points[flat_near] - center) * direction).sum(axis=1)
    return EndFit(center, direction, center + along[:, None] * direction, near)


def mean_radius(network: Network) -> FloatArray:
    """(E,) mean distance of each path's points to the background, px."""
    if len(network.points) == 0:
        return np.empty(0)
    return np.add.reduceat(network.radius, network.offsets[:-1]) / np.diff(network.offsets)


def retrace(network: Network, node_xy: FloatArray, trim: IntArray) -> Network:
    """The network with moved nodes: each path loses `trim` (E, 2) >= 1 points at its two ends and gains its nodes' new places instead."""
    counts = np.diff(network.offsets)
    position = np.arange(len(network.points)) - np.repeat(network.offsets[:-1], counts)
    kept = (position >= np.repeat(trim[:, 0], counts)) & (position < np.repeat(counts - trim[:, 1], counts))
    inner = np.add.reduceat(kept.astype(np.int64), network.offsets[:-1]) if len(counts) else counts
    offsets = np.concatenate([[0], np.cumsum(inner + 2)])
    points, radius = np.empty((offsets[-1], 2)), np.empty(offsets[-1])
    is_end = np.zeros(offsets[-1], dtype=bool)
    is_end[offsets[:-1]] = is_end[offsets[1:] - 1] = True
    points[~is_end], radius[~is_end] = network.points[kept], network.radius[kept]
    for side, at in ((0, offsets[:-1]), (1, offsets[1:] - 1)):
        points[at], radius[at] = node_xy[network.ends[:, side]], network.node_radius[network.ends[:, side]]
    return Network(node_xy, network.node_radius, network.ends, points, radius, offsets)
