"""Planar curves made of straight lines and circular arcs: road centre lines, lanes, routes."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]
Pose = tuple[float, float, float]

_ARC_STEP_M = 1.5
_LINE_STEP_M = 25.0


def _step(pose: Pose, length_m: float, curvature: float) -> Pose:
    """`_advance` for one pose."""
    half = 0.5 * length_m * curvature
    chord = length_m * (math.sin(half) / half) if half else length_m
    return pose[0] + chord * math.cos(pose[2] + half), pose[1] + chord * math.sin(pose[2] + half), pose[2] + 2.0 * half


def _advance(pose: Float, length_m: Float | float, curvature: Float | float) -> Float:
    """Poses (N,3) reached from `pose` (N,3) or (3,) after `length_m` on a circle of signed `curvature` (1/m, left positive)."""
    turn = length_m * curvature
    chord = length_m * np.sinc(turn / (2.0 * np.pi))
    heading = pose[..., 2] + 0.5 * turn
    reached = np.empty((*heading.shape, 3))
    reached[..., 0] = pose[..., 0] + chord * np.cos(heading)
    reached[..., 1] = pose[..., 1] + chord * np.sin(heading)
    reached[..., 2] = pose[..., 2] + turn
    return reached


@dataclass(frozen=True)
class ArcPath:
    """A smooth curve: start pose (x m, y m, yaw rad) and pieces of constant curvature.

    `lengths_m` and `curvatures` (1/m, left positive) have one entry a piece. Positions s outside [0, length_m] continue the end pieces.
    """

    start: Pose
    lengths_m: tuple[float, ...]
    curvatures: tuple[float, ...]

    @cached_property
    def _pieces(self) -> tuple[list[Pose], list[float]]:
        """Start poses of the P pieces and the end pose, and the arc lengths (P+1) there."""
        poses, cumulated = [self.start], [0.0]
        for length, curvature in zip(self.lengths_m, self.curvatures, strict=True):
            poses.append(_step(poses[-1], length, curvature))
            cumulated.append(cumulated[-1] + length)
        return poses, cumulated

    @cached_property
    def _knots(self) -> tuple[Float, Float, Float]:
        """`_pieces` as arrays (P+1,3) and (P+1,), and the curvatures (P,)."""
        poses, cumulated = self._pieces
        return np.array(poses), np.array(cumulated), np.array(self.curvatures)

    @property
    def length_m(self) -> float:
        """Total length."""
        return self._pieces[1][-1]

    @property
    def end(self) -> Pose:
        """Pose (x, y, yaw) at the end."""
        return self._pieces[0][-1]

    def _piece(self, s_m: float) -> int:
        """Index of the piece at one arc length."""
        return min(max(bisect_right(self._pieces[1], s_m) - 1, 0), len(self.lengths_m) - 1)

    def pose_at(self, s_m: float) -> Pose:
        """Pose (x, y, yaw) at one arc length."""
        poses, cumulated = self._pieces
        piece = self._piece(s_m)
        return _step(poses[piece], s_m - cumulated[piece], self.curvatures[piece])

    def point_at(self, s_m: float, offset_m: float = 0.0) -> tuple[float, float]:
        """The point at one arc length, shifted by `offset_m` to the left of the direction of travel."""
        x, y, yaw = self.pose_at(s_m)
        return x - offset_m * math.sin(yaw), y + offset_m * math.cos(yaw)

    def pose(self, s_m: ArrayLike) -> Float:
        """Poses (N,3) = x, y, yaw at the arc lengths `s_m` (N,)."""
        s = np.atleast_1d(np.asarray(s_m, float))
        poses, cumulated, curvatures = self._knots
        # Searching the inner knots only: what lies before the first or beyond the last piece belongs to it.
        piece = np.searchsorted(cumulated[1:-1], s, side="right")
        return _advance(poses[piece], s - cumulated[piece], curvatures[piece])

    def points(self, s_m: ArrayLike, offset_m: ArrayLike = 0.0) -> Float:
        """Points (N,2) at arc lengths `s_m`, shifted by `offset_m` to the left of the direction of travel."""
        pose = self.pose(s_m)
        points, yaw = pose[:, :2], pose[:, 2]
        offset = np.asarray(offset_m, float)
        points[:, 0] -= offset * np.sin(yaw)
        points[:, 1] += offset * np.cos(yaw)
        return points

    def stations(self, start_m: float = 0.0, stop_m: float | None = None) -> Float:
        """Arc lengths from `start_m` to `stop_m` dense enough to draw the curve: every 1.5 m on arcs, every 25 m on lines."""
        stop = self.length_m if stop_m is None else stop_m
        cuts = sorted({start_m, stop, *(s for s in self._pieces[1] if start_m < s < stop)})
        cuts = cuts[:1] + [high for low, high in pairwise(cuts) if high - low > 1e-6]
        stations = cuts[:1]
        for low, high in pairwise(cuts):
            count = math.ceil((high - low) / (_ARC_STEP_M if self.curvatures[self._piece(0.5 * (low + high))] else _LINE_STEP_M))
            stations += [low + k * ((high - low) / count) for k in range(1, count)] + [high]
        return np.array(stations)

    def polyline(self, start_m: float = 0.0, stop_m: float | None = None, offset_m: float = 0.0) -> Float:
        """Points (N,2) along the curve between two arc lengths, shifted to the left by `offset_m`."""
        return self.points(self.stations(start_m, stop_m), offset_m)

    def offset(self, offset_m: float) -> ArcPath:
        """The parallel curve `offset_m` to the left (radii must stay positive)."""
        x, y = self.point_at(0.0, offset_m)
        scale = [1.0 - k * offset_m for k in self.curvatures]
        lengths = tuple(length * f for length, f in zip(self.lengths_m, scale, strict=True))
        return ArcPath((x, y, self.start[2]), lengths, tuple(k / f for k, f in zip(self.curvatures, scale, strict=True)))

    def reversed(self) -> ArcPath:
        """The same curve travelled backwards."""
        x, y, yaw = self.end
        return ArcPath((x, y, yaw + np.pi), self.lengths_m[::-1], tuple(-k for k in self.curvatures[::-1]))

    def then(self, other: ArcPath) -> ArcPath:
        """This curve followed by `other`, which must start where this one ends."""
        return ArcPath(self.start, self.lengths_m + other.lengths_m, self.curvatures + other.curvatures)

    def section(self, start_m: float, stop_m: float) -> ArcPath:
        """The part between two arc lengths."""
        cumulated = self._knots[1]
        low, high = np.clip(cumulated[:-1], start_m, stop_m), np.clip(cumulated[1:], start_m, stop_m)
        keep = [i for i in range(len(low)) if high[i] - low[i] > 1e-9]
        lengths, curvatures = tuple(float(high[i] - low[i]) for i in keep), tuple(self.curvatures[i] for i in keep)
        return ArcPath(self.pose_at(start_m), lengths, curvatures)


def turn_between(start: Pose, end: Pose) -> ArcPath:
    """Line, arc, line from pose `start` to pose `end` (x, y, yaw), with the largest radius that fits.

    The tangents must meet ahead of `start` and behind `end`, or be the same straight line.
    """
    turn = (end[2] - start[2] + np.pi) % (2.0 * np.pi) - np.pi
    delta = np.array(end[:2]) - start[:2]
    direction = np.array([np.cos(start[2]), np.sin(start[2])])
    if abs(turn) < 1e-6:
        return ArcPath(start, (float(delta @ direction),), (0.0,))
    # start + a * direction = end - b * end_direction
    end_direction = np.array([np.cos(end[2]), np.sin(end[2])])
    before, after = np.linalg.solve(np.stack([direction, end_direction], axis=1), delta)
    tangent = min(before, after)
    radius = tangent / np.tan(abs(turn) / 2.0)
    pieces = [(before - tangent, 0.0), (radius * abs(turn), np.sign(turn) / radius), (after - tangent, 0.0)]
    kept = [(float(length), float(curvature)) for length, curvature in pieces if length > 1e-6]
    return ArcPath(start, tuple(length for length, _ in kept), tuple(curvature for _, curvature in kept))
