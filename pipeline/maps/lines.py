"""Polylines of a whole map as flat arrays with a spatial index, and their exact clipping to a BEV range.

Clipping works on single segments (Liang & Barsky, A new concept and method for line clipping, 1984) and then strings together only
segments that were neighbours in the source and share a vertex inside the range. So no piece can join what the map does not join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import shapely
from numpy.typing import NDArray

from pipeline.maps.frames import BevRange, FloatArray, PlanarPose, range_outline

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class LinePiece:
    """A connected piece of one source line inside the range, ego frame. A closed piece repeats its first point at the end."""

    points_m: FloatArray  # (P, 2)
    closed: bool
    clipped: bool  # part of the source line lies outside the range
    line: int  # index of the source line


@dataclass(frozen=True)
class LineSet:
    """Segments of many polylines, global frame, in source order. Build it with `LineSet.of`."""

    starts_m: FloatArray  # (S, 2)
    ends_m: FloatArray  # (S, 2)
    line: IntArray  # (S,) source line of each segment, ascending
    first: IntArray  # (L,) first segment of each line
    count: IntArray  # (L,) number of segments of each line
    closed: NDArray[np.bool_] = field(repr=False)  # (L,)

    @classmethod
    def of(cls, lines: Sequence[FloatArray]) -> LineSet:
        """Flatten polylines (P_i, 2) with P_i >= 2; a line whose first and last points are equal is closed."""
        count = np.array([len(points) - 1 for points in lines], dtype=np.int64)
        starts = np.concatenate([points[:-1] for points in lines]) if lines else np.empty((0, 2))
        ends = np.concatenate([points[1:] for points in lines]) if lines else np.empty((0, 2))
        closed = np.array([len(points) > 3 and bool((points[0] == points[-1]).all()) for points in lines], dtype=bool)
        return cls(starts, ends, np.repeat(np.arange(len(lines)), count), np.cumsum(count) - count, count, closed)

    def __len__(self) -> int:
        """Number of lines."""
        return len(self.count)

    @cached_property
    def tree(self) -> shapely.STRtree:
        """Index over the segments."""
        return shapely.STRtree(shapely.linestrings(np.stack([self.starts_m, self.ends_m], axis=1)))

    def clip(self, pose: PlanarPose, bev: BevRange) -> list[LinePiece]:
        """Pieces of all lines inside `bev`, in the ego frame of `pose`, ordered by source line and position along it."""
        near = np.sort(self.tree.query(range_outline(pose, bev)))
        start, end = pose.to_ego(self.starts_m[near]), pose.to_ego(self.ends_m[near])
        enter, leave = clip_segments(start, end, bev)
        inside = enter < leave
        segment, start, end, enter, leave = near[inside], start[inside], end[inside], enter[inside], leave[inside]
        if len(segment) == 0:
            return []
        entry, exit_ = start + enter[:, None] * (end - start), start + leave[:, None] * (end - start)
        joined = (self.line[segment[1:]] == self.line[segment[:-1]]) & (np.diff(segment) == 1) & (leave[:-1] == 1.0) & (enter[1:] == 0.0)
        bounds = np.concatenate([[0], np.flatnonzero(~joined) + 1, [len(segment)]])
        runs: dict[int, list[_Run]] = {}
        for a, b in pairwise(bounds.tolist()):
            points = np.vstack([entry[a : a + 1], exit_[a:b]])
            run = _Run(int(segment[a]), int(segment[b - 1]), bool(enter[a] == 0.0), bool(leave[b - 1] == 1.0), points)
            runs.setdefault(int(self.line[segment[a]]), []).append(run)
        return [piece for line, parts in runs.items() for piece in self._pieces(line, parts)]

    def _pieces(self, line: int, runs: list[_Run]) -> list[LinePiece]:
        """Runs of one line as pieces; the last run of a closed line continues in its first one when both reach the line's first point."""
        first, last = int(self.first[line]), int(self.first[line] + self.count[line] - 1)
        head, tail = runs[0], runs[-1]
        reaches_both_ends = head.first == first and head.starts_whole and tail.last == last and tail.ends_whole
        complete = reaches_both_ends and len(runs) == 1
        if complete and self.closed[line]:
            head.points_m[-1] = head.points_m[0]  # equal in the source; the rotation may differ in the last bit
        elif reaches_both_ends and self.closed[line]:
            points = np.vstack([tail.points_m, head.points_m[1:]])
            runs = [*runs[1:-1], _Run(tail.first, head.last, tail.starts_whole, head.ends_whole, points)]
        return [LinePiece(run.points_m, complete and bool(self.closed[line]), not complete, line) for run in runs]


@dataclass(frozen=True)
class _Run:
    """Consecutive segments of one line inside the range."""

    first: int
    last: int
    starts_whole: bool  # the first segment starts inside
    ends_whole: bool  # the last segment ends inside
    points_m: FloatArray


def clip_segments(start: FloatArray, end: FloatArray, bev: BevRange) -> tuple[FloatArray, FloatArray]:
    """Parameters (enter, leave) in [0, 1] of the part of each segment inside the range; enter >= leave where there is none.

    Args:
        start, end: (S, 2) end points, ego frame, m.
        bev: the range.
    """
    enter, leave = np.zeros(len(start)), np.ones(len(start))
    for axis, low, high in ((0, bev.x_min, bev.x_max), (1, bev.y_min, bev.y_max)):
        origin, delta = start[:, axis], end[:, axis] - start[:, axis]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            to_low, to_high = (low - origin) / delta, (high - origin) / delta
        parallel_outside = (delta == 0.0) & ((origin < low) | (origin > high))
        near = np.where(delta == 0.0, 0.0, np.minimum(to_low, to_high))
        far = np.where(delta == 0.0, 1.0, np.maximum(to_low, to_high))
        enter = np.where(parallel_outside, 1.0, np.maximum(enter, near))
        leave = np.where(parallel_outside, 0.0, np.minimum(leave, far))
    return enter, leave


def drop_repeated_nodes(points_m: FloatArray, tolerance_m: float) -> FloatArray:
    """Polyline (P, 2) without nodes closer than `tolerance_m` to the node kept before them.

    The two ends stay where they are, so lines that met in a node still meet. A line of no length becomes one point.
    """
    step = np.hypot(*np.diff(points_m, axis=0).T)
    if len(points_m) < 2 or (step >= tolerance_m).all():
        return points_m
    kept = [0]
    for index in range(1, len(points_m)):
        if np.hypot(*(points_m[index] - points_m[kept[-1]])) >= tolerance_m:
            kept.append(index)
    if len(kept) > 1:
        kept[-1] = len(points_m) - 1
    return points_m[kept]


def resample(points_m: FloatArray, count: int) -> FloatArray:
    """`count` points (count, 2) at equal arc length along a polyline (P, 2), both ends included."""
    steps = points_m[1:] - points_m[:-1]
    along = np.zeros(len(points_m))
    np.cumsum(np.hypot(steps[:, 0], steps[:, 1]), out=along[1:])
    at = np.arange(count) * (along[-1] / (count - 1))
    resampled = np.empty((count, 2))
    resampled[:, 0], resampled[:, 1] = np.interp(at, along, points_m[:, 0]), np.interp(at, along, points_m[:, 1])
    resampled[-1] = points_m[-1]
    return resampled


def length_m(points_m: FloatArray) -> float:
    """Length of a polyline (P, 2)."""
    steps = points_m[1:] - points_m[:-1]
    return float(np.hypot(steps[:, 0], steps[:, 1]).sum())
