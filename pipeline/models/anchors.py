"""Anchors from the training labels by k-means: box centres for detection, control points for the map.

Same labels and seed give the same anchors. Where there are fewer labels than anchors, the rest is filled with a regular layout, so that a data set
of one sample still builds a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2

from pipeline.config import ModelConfig
from pipeline.maps.rings import to_corners
from pipeline.models import bspline
from pipeline.models.heads.detection import BOX_STATE

Floats = NDArray[np.float32]
# Anchors say where, not what; their size is also how far around them they look at first.
TYPICAL_SIZE_WLH_M = (2.5, 2.5, 1.6)
ANCHOR_Z_M = 0.9
KMEANS_ITERATIONS = 20


# z, log w, log l, log h, sin yaw, cos yaw: all anchors head along x.
ANCHOR_SHAPE = np.array([ANCHOR_Z_M, *np.log(TYPICAL_SIZE_WLH_M), 0.0, 1.0], dtype=np.float32)


@dataclass(frozen=True)
class Anchors:
    """boxes (N, 11) box states; polylines (Q, 6, 3) control points, metres. Both in the BEV frame."""

    boxes: Floats
    polylines: Floats


def build_anchors(config: ModelConfig, centers_m: Floats, polylines_m: Sequence[Floats], seed: int) -> Anchors:
    """Anchors for a data set.

    Args:
        config: model section of the parameters.
        centers_m: (M, 3) centres of all training boxes.
        polylines_m: training map elements, each (P, 2).
        seed: seed of k-means.
    """
    return Anchors(box_anchors(config, centers_m, seed), polyline_anchors(config, polylines_m, seed))


def box_anchors(config: ModelConfig, centers_m: Floats, seed: int) -> Floats:
    """(N, 11): the fixed anchors first, then those of the temporal slots. Both sets cover the labels by themselves."""
    temporal = config.detection.temporal_instances
    fixed = _box_set(config, centers_m, config.detection.anchors - temporal, seed)
    return np.concatenate([fixed, _box_set(config, centers_m, temporal, seed + 1)])


def _box_set(config: ModelConfig, centers_m: Floats, count: int, seed: int) -> Floats:
    spread = np.stack([_regular(config.view.x_range_m, count), _shuffled(_regular(config.view.y_range_m, count), seed)], axis=1)
    boxes = np.zeros((count, BOX_STATE), dtype=np.float32)
    boxes[:, :2] = _cluster(centers_m[:, :2], spread, seed)
    boxes[:, 2:8] = ANCHOR_SHAPE
    return boxes


def polyline_anchors(config: ModelConfig, polylines_m: Sequence[Floats], seed: int) -> Floats:
    """(Q, 6, 3) control points, on the ground."""
    count = config.map.num_query
    known = [control_points(line, config) for line in polylines_m]
    labels = np.stack(known) if known else np.zeros((0, bspline.CONTROL_POINTS, 2))
    along = np.linspace(-15.0, 15.0, bspline.CONTROL_POINTS)
    spread = np.stack([np.tile(along, (count, 1)), np.tile(_regular((-15.0, 15.0), count)[:, None], bspline.CONTROL_POINTS)], axis=-1)
    flat = _cluster(labels.reshape(len(labels), bspline.CONTROL_POINTS * 2), spread.reshape(count, -1), seed)
    ground = np.zeros((count, bspline.CONTROL_POINTS, 1), dtype=np.float32)
    return np.concatenate([flat.reshape(count, bspline.CONTROL_POINTS, 2), ground], axis=-1).astype(np.float32)


def control_points(line_m: Floats, config: ModelConfig) -> Floats:
    """(6, 2) control points of the spline nearest to a polyline (P, 2); those of a ring (its ends coincide) are its corners."""
    if np.allclose(line_m[0], line_m[-1], atol=1e-3):
        return ring_corners(line_m)
    points = config.map.sample_points
    return (bspline.fit_matrix(points, config.map.spline_degree) @ resample(line_m, points)).astype(np.float32)


def ring_corners(ring_m: Floats) -> Floats:
    """(6, 2) corners of a closed ring (P, 2), the last one equal to the first.

    Crossings are quadrangles, often much longer than wide: a curve of six control points has room for their corners, but only where the points of
    the label go by corners and not by length.
    """
    corners = to_corners(np.asarray(ring_m, dtype=np.float64), bspline.CONTROL_POINTS - 1).astype(np.float32)
    # One direction and one start for all rings, so that rings alike have corners alike.
    x, y = corners.T
    if np.sum(x * np.roll(y, -1) - y * np.roll(x, -1)) < 0:
        corners = corners[::-1]
    corners = np.roll(corners, -int(np.lexsort((corners[:, 1], corners[:, 0]))[0]), axis=0)
    return np.concatenate([corners, corners[:1]])


def resample(line_m: Floats, points: int) -> Floats:
    """(P, D) polyline -> (points, D) at equal arc length, both ends included."""
    lengths = np.linalg.norm(np.diff(line_m, axis=0), axis=1)
    distance = np.concatenate([[0.0], np.cumsum(lengths)])
    at = np.linspace(0.0, distance[-1], points)
    return np.stack([np.interp(at, distance, line_m[:, axis]) for axis in range(line_m.shape[1])], axis=1).astype(np.float32)


def _cluster(labels: NDArray[np.floating], spread: NDArray[np.floating], seed: int) -> Floats:
    """`len(spread)` k-means centres of `labels`; rows of `spread` where there are too few labels or a cluster ran empty."""
    count = len(spread)
    if len(labels) < 2 * count:
        known = np.asarray(labels, dtype=np.float64)[:count].reshape(-1, spread.shape[1])
        return np.concatenate([known, spread[len(known) :]]).astype(np.float32)
    random = np.random.default_rng(seed)
    centers, owner = kmeans2(np.asarray(labels, dtype=np.float64), count, iter=KMEANS_ITERATIONS, minit="++", missing="warn", rng=random)
    empty = np.bincount(owner, minlength=count) == 0
    centers[empty] = spread[empty]
    return centers.astype(np.float32)


def _regular(bounds_m: tuple[float, float], count: int) -> NDArray[np.float64]:
    low, high = bounds_m
    return low + (np.arange(count) + 0.5) * (high - low) / max(count, 1)


def _shuffled(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).permutation(values)
