"""Polylines: even resampling and the symmetric Chamfer distance, vectorized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray

Points = NDArray[np.floating[Any]]


def close(polyline_m: Points) -> Points:
    """Polyline (P,2) with its first point repeated at the end, unless it is there already."""
    return polyline_m if np.allclose(polyline_m[0], polyline_m[-1]) else np.concatenate([polyline_m, polyline_m[:1]])


def resample(polyline_m: Points, points: int) -> FloatArray:
    """`points` points (points,2) evenly spaced along the length of a polyline (P,2), both ends included.

    A polyline of length 0 repeats its point.
    """
    line = np.asarray(polyline_m, dtype=np.float64)
    steps_m = np.linalg.norm(np.diff(line, axis=0), axis=1)
    length_m = np.concatenate([[0.0], np.cumsum(steps_m)])
    targets_m = np.linspace(0.0, length_m[-1], points)
    return np.stack([np.interp(targets_m, length_m, line[:, axis]) for axis in (0, 1)], axis=1)


def resample_all(polylines_m: Sequence[Points], points: int) -> FloatArray:
    """Resampled polylines (L,points,2)."""
    return np.stack([resample(line, points) for line in polylines_m]) if len(polylines_m) else np.zeros((0, points, 2))


def chamfer_matrix(a_m: Points, b_m: Points, limit_m: float = np.inf) -> FloatArray:
    """Symmetric Chamfer distances (A,B) between resampled polylines (A,P,2) and (B,P,2), m.

    d(a,b) = (mean over points of a of the distance to the nearest point of b + the same with a and b exchanged) / 2.
    Pairs whose bounding boxes are further apart than `limit_m` cannot be closer than it and are given inf without being computed.
    """
    distances = np.full((len(a_m), len(b_m)), np.inf)
    rows, columns = np.nonzero(_box_gap(a_m, b_m) <= limit_m)
    for start in range(0, len(rows), _PAIRS_PER_BLOCK):
        block = slice(start, start + _PAIRS_PER_BLOCK)
        distances[rows[block], columns[block]] = _chamfer_pairs(a_m[rows[block]], b_m[columns[block]])
    return distances


_PAIRS_PER_BLOCK = 256  # 256 pairs of 100 x 100 points: 20 MB of float64


def _chamfer_pairs(a_m: Points, b_m: Points) -> FloatArray:
    """Chamfer distances (N,) of N pairs of polylines (N,P,2)."""
    dx = a_m[:, :, None, 0] - b_m[:, None, :, 0]
    dy = a_m[:, :, None, 1] - b_m[:, None, :, 1]
    squared = dx * dx + dy * dy
    a_to_b = np.sqrt(squared.min(axis=2)).mean(axis=1)
    b_to_a = np.sqrt(squared.min(axis=1)).mean(axis=1)
    return (a_to_b + b_to_a) / 2.0


def _box_gap(a_m: Points, b_m: Points) -> NDArray[np.float64]:
    """Distance (A,B) between the axis-aligned bounding boxes of polylines, m; a lower bound of the distance between any of their points."""
    a_low, a_high, b_low, b_high = a_m.min(axis=1), a_m.max(axis=1), b_m.min(axis=1), b_m.max(axis=1)
    gap = np.maximum(a_low[:, None] - b_high[None], b_low[None] - a_high[:, None])
    return np.linalg.norm(np.maximum(gap, 0.0), axis=2)
