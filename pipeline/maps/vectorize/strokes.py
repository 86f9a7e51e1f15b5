"""Masks of lines (paint, road centre lines of any width) to polylines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import cv2
import numba
import numpy as np
from numpy.typing import NDArray

from pipeline.config import VectorizeConfig
from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.caps import Lookup
from pipeline.maps.vectorize.network import from_skeleton
from pipeline.maps.vectorize.refine import refine
from pipeline.maps.vectorize.skeleton import IntArray, SkeletonPixels, trace
from pipeline.maps.vectorize.thinning import MaskArray, remove_noise, thin

SMOOTHING_PX = 2  # half the window of the moving average that takes the stairs out of a pixel path


@dataclass(frozen=True)
class Strokes:
    """Polylines of a line drawing, pixel frame (x right, y down, the first pixel covers 0..1)."""

    polylines: list[FloatArray]  # (P_i, 2); a closed one repeats its first point; polylines that meet share an end point
    closed: list[bool]


def trace_strokes(mask: MaskArray, config: VectorizeConfig) -> Strokes:
    """Vectorize one mask (H, W) of 0 and 1 that fits into memory."""
    cleaned = remove_noise(mask, config.noise_px)
    return strokes_of(skeleton_pixels(cleaned), array_lookup(cleaned), config)


def skeleton_pixels(mask: MaskArray) -> SkeletonPixels:
    """Skeleton of a mask with the distance of its pixels to the background."""
    found = cv2.findNonZero(thin(mask))  # row by row
    columns, rows = (np.empty((0, 2)) if found is None else found[:, 0]).T.astype(np.int64)
    distance = cv2.distanceTransform(mask, cv2.DIST_L2, cv2.DIST_MASK_5)
    return SkeletonPixels(rows, columns, distance[rows, columns].astype(np.float64))


def array_lookup(mask: MaskArray) -> Lookup:
    """Look-up of points in a mask held in memory."""
    return partial(_looked_up, mask)


@numba.njit(cache=True)
def _looked_up(mask: MaskArray, xy: FloatArray) -> NDArray[np.int8]:
    """(N,) values of the pixels in which points (N, 2) lie, -1 outside the mask."""
    seen = np.full(len(xy), -1, dtype=np.int8)
    for point in range(len(xy)):
        column, row = math.floor(xy[point, 0]), math.floor(xy[point, 1])
        if 0 <= row < mask.shape[0] and 0 <= column < mask.shape[1]:
            seen[point] = mask[row, column]
    return seen


def strokes_of(pixels: SkeletonPixels, lookup: Lookup, config: VectorizeConfig) -> Strokes:
    """Trace, refine, smooth and simplify a skeleton (Douglas-Peucker with `config.tolerance_px`)."""
    network = refine(from_skeleton(pixels, trace(pixels)), lookup, config)
    if len(network.ends) == 0:
        return Strokes([], [])
    points = _smoothed(network.points, network.offsets)
    kept = _simplified(points, network.offsets, config.tolerance_px)
    counts = np.add.reduceat(kept, network.offsets[:-1], dtype=np.int64)
    polylines = np.split(points[kept], np.cumsum(counts)[:-1])
    return Strokes(polylines, (network.ends[:, 0] == network.ends[:, 1]).tolist())


@numba.njit(cache=True)
def _smoothed(points: FloatArray, offsets: IntArray) -> FloatArray:
    """Points of all paths after a moving average that narrows towards the ends, so that ends stay where they are."""
    smoothed = np.empty_like(points)
    for path in range(len(offsets) - 1):
        first, last = offsets[path], offsets[path + 1] - 1
        for at in range(first, last + 1):
            half = min(SMOOTHING_PX, at - first, last - at)
            x = y = 0.0
            for k in range(at - half, at + half + 1):
                x, y = x + points[k, 0], y + points[k, 1]
            smoothed[at] = x / (2 * half + 1), y / (2 * half + 1)
    return smoothed


@numba.njit(cache=True)
def _simplified(points: FloatArray, offsets: IntArray, tolerance_px: float) -> NDArray[np.bool_]:
    """Which points of the paths Douglas and Peucker's algorithm keeps (Canadian Cartographer 10, 1973)."""
    kept = np.zeros(len(points), dtype=np.bool_)
    stack = np.empty((len(points) + 1, 2), dtype=np.int64)
    for path in range(len(offsets) - 1):
        stack[0] = offsets[path], offsets[path + 1] - 1
        kept[stack[0, 0]] = kept[stack[0, 1]] = True
        waiting = 1
        while waiting > 0:
            waiting -= 1
            first, last = stack[waiting]
            x, y = points[first]
            dx, dy = points[last, 0] - x, points[last, 1] - y
            squared = dx * dx + dy * dy
            farthest, largest = -1, tolerance_px * tolerance_px
            for k in range(first + 1, last):
                px, py = points[k, 0] - x, points[k, 1] - y
                along = min(max((px * dx + py * dy) / squared, 0.0), 1.0) if squared > 0.0 else 0.0
                distance = (px - along * dx) ** 2 + (py - along * dy) ** 2
                if distance > largest:
                    farthest, largest = k, distance
            if farthest >= 0:
                kept[farthest] = True
                stack[waiting] = first, farthest
                stack[waiting + 1] = farthest, last
                waiting += 2
    return kept
