"""Planar curves made of straight lines and circular arcs: road centre lines, lanes, routes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]

_ARC_STEP_M = 1.5
_LINE_STEP_M = 25.0


def _advance(pose: Float, length_m: Float | float, curvature: Float | float) -> Float:
    """Poses (N,3) reached from `pose` (N,3) or (3,) after `length_m` on a circle of signed `curvature` (1/m, left positive)."""
    turn = np.asarray(length_m * curvature)
    chord = length_m * np.sinc(turn / (2.0 * np.pi))
    heading = pose[..., 2] + 0.5 * turn
    return np.stack([pose[..., 0] + chord * np.cos(heading), pose[..., 1] + chord * np.sin(heading), pose[..., 2] + turn], axis=-1)


@dataclass(frozen=True)
class ArcPath:
    """A smooth curve: start pose (x m, y m, yaw rad) and pieces of constant curvature.

    `lengths_m` and `curvatures` (1/m, left positive) have one entry a piece. Positions s outside [0, length_m] continue the end pieces.
    """

    start: tuple[float, float, float]
    lengths_m: tuple[float, ...]
    curvatures: tuple[float, ...]

    @cached_property
    def _knots(self) -> tuple[Float, Float]:
        """Start pose of each piece (P,3) and cumulated lengths (P+1,)."""
        poses = [np.array(self.start, float)]
        for length, curvature in zip(self.lengths_m, self.curvatures, strict=True):
            poses.append(_advance(poses[-1], length, curvature))
        return np.array(poses), np.concatenate([[0.0], np.cumsum(self.lengths_m)])

    @property
    def length_m(self) -> float:
        """Total length."""
        return float(self._knots[1][-1])

    @property
    def end(self) -> tuple[float, float, float]:
        """Pose (x, y, yaw) at the end."""
        x, y, yaw = self._knots[0][-1]
        return float(x), float(y), float(yaw)

    def pose(self, s_m: ArrayLike) -> Float:
        """Poses (N,3) = x, y, yaw at the arc lengths `s_m` (N,)."""
        s = np.atleast_1d(np.asarray(s_m, float))
        poses, cumulated = self._knots
        piece = np.clip(np.searchsorted(cumulated, s, side="right") - 1, 0, len(self.lengths_m) - 1)
        return _advance(poses[piece], s - cumulated[piece], np.array(self.curvatures)[piece])

    def points(self, s_m: ArrayLike, offset_m: ArrayLike = 0.0) -> Float:
        """Points (N,2) at arc lengths `s_m`, shifted by `offset_m` to the left of the direction of travel."""
        pose = self.pose(s_m)
        return pose[:, :2] + np.asarray(offset_m, float)[..., None] * np.stack([-np.sin(pose[:, 2]), np.cos(pose[:, 2])], axis=1)

    def stations(self, start_m: float = 0.0, stop_m: float | None = None) -> Float:
        """Arc lengths from `start_m` to `stop_m` dense enough to draw the curve: every 1.5 m on arcs, every 25 m on lines."""
        stop = self.length_m if stop_m is None else stop_m
        cuts = np.unique(np.clip(np.concatenate([[start_m, stop], self._knots[1]]), start_m, stop))
        cuts = cuts[np.concatenate([[True], np.diff(cuts) > 1e-6])]
        pieces = [np.array([cuts[0]])]
        for low, high in pairwise(cuts):
            index = int(np.clip(np.searchsorted(self._knots[1], 0.5 * (low + high), side="right") - 1, 0, len(self.lengths_m) - 1))
            step = _ARC_STEP_M if self.curvatures[index] else _LINE_STEP_M
            pieces.append(np.linspace(low, high, int(np.ceil((high - low) / step)) + 1)[1:])
        return np.concatenate(pieces)

    def polyline(self, start_m: float = 0.0, stop_m: float | None = None, offset_m: float = 0.0) -> Float:
        """Points (N,2) along the curve between two arc lengths, shifted to the left by `offset_m`."""
        return self.points(self.stations(start_m, stop_m), offset_m)

    def offset(self, offset_m: float) -> ArcPath:
        """The parallel curve `offset_m` to the left (radii must stay positive)."""
        x, y = self.points(0.0, offset_m)[0]
        scale = [1.0 - k * offset_m for k in self.curvatures]
        lengths = tuple(length * f for length, f in zip(self.lengths_m, scale, strict=True))
        return ArcPath((float(x), float(y), self.start[2]), lengths, tuple(k / f for k, f in zip(self.curvatures, scale, strict=True)))

    def reversed(self) -> ArcPath:
        """The same curve travelled backwards."""
        x, y, yaw = self.end
        return ArcPath((x, y, yaw + np.pi), self.lengths_m[::-1], tuple(-k for k in self.curvatures[::-1]))

    def then(self, other: ArcPath) -> ArcPath:
        """This curve followed by `other`, which must start where this one ends."""
        return ArcPath(self.start, self.lengths_m + other.lengths_m, self.curvatures + other.curvatures)

    def section(self, start_m: float, stop_m: float) -> ArcPath:
        """The part between two arc lengths."""
        x, y, yaw = self.pose(start_m)[0]
        _, cumulated = self._knots
        low, high = np.clip(cumulated[:-1], start_m, stop_m), np.clip(cumulated[1:], start_m, stop_m)
        keep = [i for i in range(len(low)) if high[i] - low[i] > 1e-9]
        lengths, curvatures = tuple(float(high[i] - low[i]) for i in keep), tuple(self.curvatures[i] for i in keep)
        return ArcPath((float(x), float(y), float(yaw)), lengths, curvatures)


def turn_between(start: tuple[float, float, float], end: tuple[float, float, float]) -> ArcPath:
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
