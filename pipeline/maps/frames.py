"""From the global (map) frame to the ego BEV frame in the plane."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import shapely
from numpy.typing import NDArray

from pipeline.errors import DataError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PlanarPose:
    """Ego pose in the map plane: origin (x_m, y_m) and heading yaw_rad of the ego x axis, counter-clockwise from global x."""

    x_m: float
    y_m: float
    yaw_rad: float

    @classmethod
    def from_matrix(cls, ego2global: FloatArray) -> PlanarPose:
        """Project a (4, 4) ego2global matrix to the plane: its translation and the heading of its x axis; roll and pitch are dropped.

        Raises:
            DataError: the matrix is not (4, 4) or not finite.
        """
        matrix = np.asarray(ego2global, dtype=np.float64)
        if matrix.shape != (4, 4) or not np.isfinite(matrix).all():
            raise DataError(f"ego2global: must be a finite 4x4 matrix, got shape {matrix.shape}, values {matrix.ravel().tolist()}")
        return cls(float(matrix[0, 3]), float(matrix[1, 3]), float(np.arctan2(matrix[1, 0], matrix[0, 0])))

    @cached_property
    def ego2global_rotation(self) -> FloatArray:
        """(2, 2) rotation that turns ego directions into global ones."""
        cos, sin = np.cos(self.yaw_rad), np.sin(self.yaw_rad)
        return np.array([[cos, -sin], [sin, cos]])

    def to_ego(self, points_m: FloatArray) -> FloatArray:
        """Global points (..., 2) in the ego frame."""
        return (points_m - (self.x_m, self.y_m)) @ self.ego2global_rotation

    def to_global(self, points_m: FloatArray) -> FloatArray:
        """Ego points (..., 2) in the global frame."""
        return points_m @ self.ego2global_rotation.T + (self.x_m, self.y_m)


@dataclass(frozen=True)
class BevRange:
    """Axis-aligned rectangle of the ego BEV frame that labels are clipped to, m."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float

    def corners(self) -> FloatArray:
        """(4, 2) corners, counter-clockwise."""
        return np.array([[self.x_min, self.y_min], [self.x_max, self.y_min], [self.x_max, self.y_max], [self.x_min, self.y_max]])


@lru_cache(maxsize=8)
def range_outline(pose: PlanarPose, bev: BevRange) -> shapely.Polygon:
    """The range around a pose as a polygon in the global frame; several layers ask for the same one."""
    return shapely.polygons(pose.to_global(bev.corners()))
