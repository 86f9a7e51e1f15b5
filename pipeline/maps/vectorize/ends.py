"""Straight lines fitted to the ends of paths, for all ends at once, and paths re-traced to moved nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
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
    near = np.empty(len(path), dtype=np.int64)
    geometry = np.empty((3, len(path), 2))
    _fit(network.points, network.offsets, path, side, skip_px, window_px, near, geometry)
    center, direction, base = geometry
    return EndFit(center, direction, base, near)


@numba.njit(cache=True)
def _fit(
    points: FloatArray,
    offsets: IntArray,
    path: IntArray,
    side: IntArray,
    skip_px: FloatArray,
    window_px: FloatArray,
    near: IntArray,
    geometry: FloatArray,
) -> None:
    """See `fit_ends`; fills `near` (A,) and center, direction and base (3, A, 2)."""
    for end in range(len(path)):
        begin, last = offsets[path[end]], offsets[path[end] + 1] - 1 - offsets[path[end]]
        near[end] = min(math.ceil(skip_px[end]), last // 2)
        far = min(near[end] + max(math.ceil(window_px[end]), 1), last)
        first, step = (begin, 1) if side[end] == 0 else (begin + last, -1)
        inner, outer = points[first + step * near[end]], points[first + step * far]
        x = y = xx = xy = yy = 0.0
        for k in range(near[end], far + 1):
            dx, dy = points[first + step * k, 0] - inner[0], points[first + step * k, 1] - inner[1]
            x, y, xx, xy, yy = x + dx, y + dy, xx + dx * dx, xy + dx * dy, yy + dy * dy
        number = far - near[end] + 1
        x, y = x / number, y / number
        angle = 0.5 * math.atan2(2.0 * (xy / number - x * y), (xx / number - x * x) - (yy / number - y * y))
        cos, sin = math.cos(angle), math.sin(angle)
        if cos * (inner[0] - outer[0]) + sin * (inner[1] - outer[1]) < 0.0:
            cos, sin = -cos, -sin
        along = -(x * cos + y * sin)
        geometry[0, end] = inner[0] + x, inner[1] + y
        geometry[1, end] = cos, sin
        geometry[2, end] = inner[0] + x + along * cos, inner[1] + y + along * sin


def mean_radius(network: Network) -> FloatArray:
    """(E,) mean distance of each path's points to the background, px."""
    if len(network.points) == 0:
        return np.empty(0)
    return np.add.reduceat(network.radius, network.offsets[:-1]) / np.diff(network.offsets)


def retrace(network: Network, node_xy: FloatArray, trim: IntArray) -> Network:
    """The network with moved nodes: each path loses `trim` (E, 2) >= 1 points at its two ends and gains its nodes' new places instead."""
    points, radius, offsets = _retraced(network.points, network.radius, network.offsets, network.ends, node_xy, network.node_radius, trim)
    return Network(node_xy, network.node_radius, network.ends, points, radius, offsets)


@numba.njit(cache=True)
def _retraced(
    points: FloatArray, radius: FloatArray, offsets: IntArray, ends: IntArray, node_xy: FloatArray, node_radius: FloatArray, trim: IntArray
) -> tuple[FloatArray, FloatArray, IntArray]:
    """See `retrace`: points, radius and offsets of the paths."""
    new_points, new_radius = np.empty((len(points) + 2 * len(ends), 2)), np.empty(len(points) + 2 * len(ends))
    new_offsets = np.zeros_like(offsets)
    length = 0
    for path in range(len(ends)):
        first, last = ends[path]
        new_points[length], new_radius[length] = node_xy[first], node_radius[first]
        length += 1
        for at in range(offsets[path] + trim[path, 0], offsets[path + 1] - trim[path, 1]):
            new_points[length], new_radius[length] = points[at], radius[at]
            length += 1
        new_points[length], new_radius[length] = node_xy[last], node_radius[last]
        length += 1
        new_offsets[path + 1] = length
    return new_points[:length], new_radius[:length], new_offsets
