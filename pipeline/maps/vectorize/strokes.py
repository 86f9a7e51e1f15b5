"""Masks of lines (paint, road centre lines of any width) to polylines."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import shapely

from pipeline.config import VectorizeConfig
from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.network import Network, from_skeleton
from pipeline.maps.vectorize.refine import Lookup, refine
from pipeline.maps.vectorize.skeleton import SkeletonPixels, trace
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
    rows, columns = np.nonzero(thin(mask).view(np.bool_))  # numpy finds truth values faster than numbers
    distance = cv2.distanceTransform(mask, cv2.DIST_L2, cv2.DIST_MASK_5)
    return SkeletonPixels(rows, columns, distance[rows, columns].astype(np.float64))


def array_lookup(mask: MaskArray) -> Lookup:
    """Look-up of points in a mask held in memory."""
    framed = np.pad(mask.astype(np.int8), 1, constant_values=-1)
    limit = np.array([mask.shape[1], mask.shape[0]])

    def lookup(xy: FloatArray) -> np.ndarray:
        cell = np.clip(np.floor(xy).astype(np.int64), -1, limit) + 1
        return framed[cell[:, 1], cell[:, 0]]

    return lookup


def strokes_of(pixels: SkeletonPixels, lookup: Lookup, config: VectorizeConfig) -> Strokes:
    """Trace, refine, smooth and simplify a skeleton (Douglas-Peucker with `config.tolerance_px`)."""
    network = refine(from_skeleton(pixels, trace(pixels)), lookup, config)
    if len(network.ends) == 0:
        return Strokes([], [])
    which = np.repeat(np.arange(len(network.ends)), np.diff(network.offsets))
    lines = shapely.simplify(shapely.linestrings(smoothed(network), indices=which), config.tolerance_px, preserve_topology=False)
    coordinates, owner = shapely.get_coordinates(lines, return_index=True)
    polylines = np.split(coordinates, np.flatnonzero(np.diff(owner)) + 1)
    return Strokes(polylines, (network.ends[:, 0] == network.ends[:, 1]).tolist())


def smoothed(network: Network) -> FloatArray:
    """Points of all paths after a moving average that narrows towards the ends, so that ends stay where they are."""
    counts = np.diff(network.offsets)
    start, stop = np.repeat(network.offsets[:-1], counts), np.repeat(network.offsets[1:], counts)
    at = np.arange(len(network.points))
    half = np.minimum(SMOOTHING_PX, np.minimum(at - start, stop - 1 - at))
    sums = np.concatenate([np.zeros((1, 2)), np.cumsum(network.points, axis=0)])
    mean: FloatArray = (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)[:, None]
    return mean
