"""Occupancy labels in the Occ3D-nuScenes layout, from the scene's surfaces and the rays of the sensors."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.synthetic.ground import Ground
from pipeline.dataset.synthetic.mesh import Float32, Material, Mesh
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.dataset.synthetic.rig import LIDAR_ELEVATION_DEG, Camera, Rig
from pipeline.dataset.synthetic.world import Instant, World
from pipeline.taxonomy import OCCUPANCY_FREE

GRID_SHAPE = (200, 200, 16)
GRID_ORIGIN_M = np.array([-40.0, -40.0, -1.0])
VOXEL_M = 0.4

_POINT_SPACING_M = 0.2
_GROUND_LAYER = 2
"""z index of the voxels from -0.2 to 0.2 m."""
_REACH_M = 75.0


@dataclass(frozen=True)
class Surfaces:
    """Points on the scene's surfaces: standing ones (P,3) in the tile frame with labels (P,), and each mover's in its own frame."""

    points: Float32
    labels: NDArray[np.uint8]
    movers: dict[int, Float32]


def sample_surfaces(world: World, centre_m: Float) -> Surfaces:
    """Points about 0.2 m apart on everything but the ground, up to the grid's top and within 75 m of `centre_m` (2,)."""
    static = world.mesh.triangles[: world.static_count]
    middle = static.mean(axis=1)
    near = np.linalg.norm(middle[:, :2] - centre_m, axis=1) < _REACH_M + 15.0
    low = static[:, :, 2].min(axis=1) < GRID_ORIGIN_M[2] + GRID_SHAPE[2] * VOXEL_M
    solid = world.mesh.materials[: world.static_count] != Material.GROUND
    chosen = np.flatnonzero(near & low & solid)
    part = Mesh(*(getattr(world.mesh, name)[chosen] for name in ("triangles", "colours", "materials", "labels")))
    points, triangle = part.surface_points(_POINT_SPACING_M)
    keep = (points[:, 2] < GRID_ORIGIN_M[2] + GRID_SHAPE[2] * VOXEL_M) & (np.linalg.norm(points[:, :2] - centre_m, axis=1) < _REACH_M)
    movers = {k: world.actors[k].shape.mesh.surface_points(_POINT_SPACING_M)[0] for k in world.movers}
    return Surfaces(points[keep], part.labels[triangle[keep]], movers)


def voxelize(world: World, surfaces: Surfaces, instant: Instant, ego2tile: Float) -> NDArray[np.uint8]:
    """Labels (200,200,16) in the ego frame: the class of the surface in each voxel, free (17) elsewhere.

    Ground classes fill one layer of voxels, objects overwrite it. Interiors of solids are free: nothing sees them.
    """
    semantics = np.full(GRID_SHAPE, OCCUPANCY_FREE, np.uint8)
    semantics[:, :, _GROUND_LAYER] = _ground_layer(world.ground, ego2tile)
    _stamp(semantics, surfaces.points, surfaces.labels, ego2tile)
    for k, points in surfaces.movers.items():
        x, y, z, yaw = instant.poses[k]
        c, s = np.cos(yaw), np.sin(yaw)
        moved = points @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]], np.float32) + np.array([x, y, z], np.float32)
        _stamp(semantics, moved, world.actors[k].shape.mesh.labels[:1], ego2tile)
    return semantics


def _ground_layer(ground: Ground, ego2tile: Float) -> NDArray[np.uint8]:
    centres = GRID_ORIGIN_M[0] + (np.arange(GRID_SHAPE[0]) + 0.5) * VOXEL_M
    x, y = np.meshgrid(centres, centres, indexing="ij")
    (c, s), tile = ego2tile[:2, 0], ego2tile[:2, 3]
    return ground.label_at(np.stack([c * x - s * y + tile[0], s * x + c * y + tile[1]], axis=-1).reshape(-1, 2)).reshape(GRID_SHAPE[:2])


def _stamp(semantics: NDArray[np.uint8], points: Float32, labels: NDArray[np.uint8], ego2tile: Float) -> None:
    """Write labels (P,) or (1,) into the voxels of tile-frame points (P,3), in place."""
    local = (points - ego2tile[:3, 3].astype(np.float32)) @ ego2tile[:3, :3].astype(np.float32)
    index, inside = voxel_index(local)
    kept = np.flatnonzero(inside)
    x, y, z = index.take(kept, axis=0).T
    semantics.ravel()[(x * GRID_SHAPE[1] + y) * GRID_SHAPE[2] + z] = labels if len(labels) == 1 else labels[kept]


def voxel_index(points_m: NDArray[np.floating]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Voxel indices (N,3) of ego-frame points (N,3) and whether each lies inside the grid (N,)."""
    index = np.floor((points_m - GRID_ORIGIN_M.astype(np.float32)) * np.float32(1.0 / VOXEL_M)).astype(np.int32)
    x, y, z = index.T
    # One comparison tests both ends: as unsigned numbers, negative indices are huge.
    return index, (x.view(np.uint32) < GRID_SHAPE[0]) & (y.view(np.uint32) < GRID_SHAPE[1]) & (z.view(np.uint32) < GRID_SHAPE[2])


@lru_cache(maxsize=1)
def voxel_centres() -> Float32:
    """Centres (3,640000) of all voxels in the ego frame, in the order of a flattened label array."""
    axes = [GRID_ORIGIN_M[i] + (np.arange(GRID_SHAPE[i]) + 0.5) * VOXEL_M for i in range(3)]
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]).astype(np.float32)


class CameraMask:
    """Which voxels the cameras see. Candidates are found once, with a margin for calibration spread and the ego's motion within a sweep."""

    def __init__(self, rig: Rig) -> None:
        self._candidates: dict[str, tuple[NDArray[np.int32], Float32]] = {}
        centres = voxel_centres()
        for channel, camera in rig.cameras.items():
            u, v, depth, _ = _project(centres, camera, np.linalg.inv(camera.mount.sensor2ego))
            margin = 0.1 * camera.width
            near = (depth > 0.1) & (u > -margin) & (u < camera.width + margin) & (v > -margin) & (v < camera.height + margin)
            index = np.flatnonzero(near).astype(np.int32)
            self._candidates[channel] = index, centres.take(index, axis=1)

    def see(self, mask: NDArray[np.uint8], semantics: NDArray[np.uint8], channel: str, camera: Camera, ego2camera: Float, range_m: Float32) -> None:
        """Mark in `mask` the voxels that `channel` sees: their centre lies before the surface in its pixel (by range image (H,W)), or in it."""
        index, centres = self._candidates[channel]
        u, v, depth, distance = _project(centres, camera, ego2camera)
        column, row = np.rint(u).astype(np.int32), np.rint(v).astype(np.int32)
        inside = np.flatnonzero((depth > 0.1) & (column >= 0) & (column < camera.width) & (row >= 0) & (row < camera.height))
        index, distance = index[inside], distance[inside]
        # A surface lies up to half a voxel's diagonal before the centre of its voxel.
        slack = np.where(semantics.ravel()[index] != OCCUPANCY_FREE, np.float32(0.87 * VOXEL_M), np.float32(0.0))
        seen = distance <= range_m.ravel()[row[inside] * camera.width + column[inside]] + slack
        mask.ravel()[index[seen]] = 1


def _project(points: Float32, camera: Camera, ego2camera: Float) -> tuple[Float32, Float32, Float32, Float32]:
    """Pixel coordinates u, v, depth and distance (N,) of ego-frame points (3,N)."""
    x, y, depth = ego2camera[:3, :3].astype(np.float32) @ points + ego2camera[:3, 3:].astype(np.float32)
    safe = np.maximum(depth, np.float32(1e-3))
    k = camera.intrinsics.astype(np.float32)
    return k[0, 0] * x / safe + k[0, 2], k[1, 1] * y / safe + k[1, 2], depth, np.sqrt(x * x + y * y + depth * depth)


class LidarMask:
    """Which voxels the lidar sees. For each voxel that a beam crosses, the beam nearest to its centre is found once a scene."""

    def __init__(self, lidar2ego: Float, azimuth_steps: int) -> None:
        x, y, z = lidar2ego[:3, :3].T.astype(np.float32) @ (voxel_centres() - lidar2ego[:3, 3:].astype(np.float32))
        flat = np.hypot(x, y)
        self._steps = azimuth_steps
        turn = np.rint(np.arctan2(x, y) * np.float32(azimuth_steps / (2.0 * np.pi))).astype(np.int32) % azimuth_steps
        spacing_deg = LIDAR_ELEVATION_DEG[1] - LIDAR_ELEVATION_DEG[0]
        rank = (np.rad2deg(np.arctan2(z, flat)) - LIDAR_ELEVATION_DEG[0]) / spacing_deg
        ring = np.rint(rank).astype(np.int32)
        distance = np.hypot(flat, z)
        # Height of the beam above or below the centre; a voxel is crossed within half its height.
        miss_m = np.abs(rank - ring) * np.deg2rad(spacing_deg) * distance
        self._voxel = np.flatnonzero((ring >= 0) & (ring < len(LIDAR_ELEVATION_DEG)) & (miss_m < 0.5 * VOXEL_M)).astype(np.int32)
        self._beam = turn[self._voxel] * len(LIDAR_ELEVATION_DEG) + ring[self._voxel]
        self._distance = distance[self._voxel].astype(np.float32)

    def seen(self, points: Float32, points_ego_m: Float32) -> NDArray[np.uint8]:
        """Mask (200,200,16) for a sweep (N,5) in the lidar frame, given also as ego-frame points (N,3).

        Seen are the voxels on the way to a return and those of the returns; a beam without a return shows nothing.
        """
        turn = np.rint(np.arctan2(points[:, 0], points[:, 1]) * np.float32(self._steps / (2.0 * np.pi))).astype(np.int32) % self._steps
        reach = np.zeros(self._steps * len(LIDAR_ELEVATION_DEG), np.float32)
        reach[turn * len(LIDAR_ELEVATION_DEG) + points[:, 4].astype(np.int32)] = np.linalg.norm(points[:, :3], axis=1)
        mask = np.zeros(GRID_SHAPE, np.uint8)
        mask.ravel()[self._voxel[self._distance <= reach[self._beam]]] = 1
        index, inside = voxel_index(points_ego_m)
        cells = index[inside]
        mask[cells[:, 0], cells[:, 1], cells[:, 2]] = 1
        return mask


def npz_bytes(arrays: dict[str, NDArray]) -> bytes:
    """A compressed .npz archive whose bytes depend on the arrays only (members carry a fixed date)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=2) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, member.getvalue(), compresslevel=2)
    return buffer.getvalue()
