"""The roof lidar: one sweep against the same triangles that the cameras see."""

from __future__ import annotations

import numpy as np

from pipeline.dataset.synthetic.mesh import Float32, Material
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.dataset.synthetic.rig import LIDAR_RANGE_M, lidar_rays
from pipeline.dataset.synthetic.world import Instant, World

_RANGE_NOISE_M = 0.02
_DROP_RATE = 0.02


def sweep(world: World, instant: Instant, lidar2tile: Float, azimuth_steps: int, rng: np.random.Generator) -> Float32:
    """Points (N,5) = x, y, z (m, lidar frame), intensity 0..255, ring, of one sweep taken at one instant.

    Range noise is 2 cm; nothing returns from beyond 100 m; 2 % of the returns are lost, more on surfaces seen at a grazing angle.
    """
    directions, ring = lidar_rays(azimuth_steps)
    turned = directions @ lidar2tile[:3, :3].T.astype(np.float32)
    hits = world.cast(instant, lidar2tile[:3, 3], turned)
    slant = np.abs(np.einsum("ij,ij->i", instant.normals[hits.triangle], turned))
    kept = (hits.triangle >= 0) & (hits.range_m < LIDAR_RANGE_M) & (rng.random(len(ring)) > _DROP_RATE + 0.3 * np.exp(-slant / 0.01))
    range_m = hits.range_m[kept] + rng.normal(0.0, _RANGE_NOISE_M, int(kept.sum())).astype(np.float32)
    triangle = hits.triangle[kept]
    bright = world.mesh.colours[triangle].mean(axis=1)
    bright[world.mesh.materials[triangle] == Material.GROUND] = 0.12
    intensity = np.clip(255.0 * bright * (0.3 + 0.7 * slant[kept]) + rng.normal(0.0, 2.0, len(bright)), 0.0, 255.0)
    points = directions[kept] * range_m[:, None]
    return np.column_stack([points, np.rint(intensity), ring[kept]]).astype(np.float32)


def count_in_box(points_m: Float, centre_m: Float, yaw: float, size_lwh_m: tuple[float, float, float]) -> int:
    """Number of points, given as rows x, y, z (3,N), inside an upright box, borders included, as nuscenes-devkit's `points_in_box` counts."""
    reach = 0.5 * float(np.hypot(*size_lwh_m[:2])) + 0.01
    near = np.flatnonzero(np.abs(points_m[0] - centre_m[0]) <= reach)
    x, y, z = points_m[:, near] - centre_m[:, None]
    c, s = np.cos(yaw), np.sin(yaw)
    half_length, half_width, half_height = 0.5 * np.array(size_lwh_m)
    inside = (np.abs(c * x + s * y) <= half_length) & (np.abs(c * y - s * x) <= half_width) & (np.abs(z) <= half_height)
    return int(np.count_nonzero(inside))
