"""Occupancy labels in the Occ3D-nuScenes layout, from the scene's surfaces and the rays of the sensors."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.synthetic.ground import Ground
from pipeline.dataset.synthetic.mesh import Float32, Material, Mesh
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.dataset.synthetic.rig import LIDAR_ELEVATION_DEG, Camera, Rig, about, matrix, usual_camera
from pipeline.dataset.synthetic.world import Instant, World
from pipeline.taxonomy import OCCUPANCY_FREE

GRID_SHAPE = (200, 200, 16)
GRID_ORIGIN_M = np.array([-40.0, -40.0, -1.0])
VOXEL_M = 0.4

_EGO2GRID = np.vstack([np.eye(3) / VOXEL_M, -GRID_ORIGIN_M / VOXEL_M]).T
"""(3,4): ego-frame points to positions in voxels from the grid's corner."""
_POINT_SPACING_M = 0.2
_GROUND_LAYER = 2
"""z index of the voxels from -0.2 to 0.2 m."""
_REACH_M = 75.0


@dataclass(frozen=True)
class Surfaces:
    """Points on the scene's surfaces (4,P), homogeneous, with labels (P,): first `standing` ones in the tile frame, then each mover's in its own.

    `movers` says which of the points belong to each mover.
    """

    points: Float32
    labels: NDArray[np.uint8]
    standing: slice
    movers: dict[int, slice]


def sample_surfaces(world: World, centre_m: Float) -> Surfaces:
    """Points about 0.2 m apart on everything but the ground, up to the grid's top and within 75 m of `centre_m` (2,)."""
    static = world.mesh.triangles[: world.static_count]
    top_m = GRID_ORIGIN_M[2] + GRID_SHAPE[2] * VOXEL_M
    middle = static.mean(axis=1)[:, :2]
    reach = np.linalg.norm(static[:, :, :2] - middle[:, None], axis=2).max(axis=1)
    near = np.linalg.norm(middle - centre_m, axis=1) < _REACH_M + reach
    low = static[:, :, 2].min(axis=1) < top_m
    solid = world.mesh.materials[: world.static_count] != Material.GROUND
    chosen = np.flatnonzero(near & low & solid)
    part = Mesh(*(getattr(world.mesh, name)[chosen] for name in ("triangles", "colours", "materials", "labels")))
    points, triangle = part.surface_points(_POINT_SPACING_M)
    x, y, z = points.T
    keep = np.flatnonzero((z < top_m) & (np.hypot(x - np.float32(centre_m[0]), y - np.float32(centre_m[1])) < _REACH_M))
    bodies = [world.actors[k].shape.mesh for k in world.movers]
    parts = [points.T.take(keep, axis=1), *(body.surface_points(_POINT_SPACING_M)[0].T for body in bodies)]
    counts = [part.shape[1] for part in parts]
    homogeneous = np.ones((4, sum(counts)), np.float32)
    np.concatenate(parts, axis=1, out=homogeneous[:3])
    labels = np.concatenate([part.labels[triangle[keep]], np.repeat([body.labels[0] for body in bodies], counts[1:]).astype(np.uint8)])
    slices = [slice(*ends) for ends in pairwise(np.cumsum([0, *counts]).tolist())]
    return Surfaces(homogeneous, labels, slices[0], dict(zip(world.movers, slices[1:], strict=True)))


def voxelize(world: World, surfaces: Surfaces, instant: Instant, ego2tile: Float) -> NDArray[np.uint8]:
    """Labels (200,200,16) in the ego frame: the class of the surface in each voxel, free (17) elsewhere.

    Ground classes fill one layer of voxels, objects overwrite it. Interiors of solids are free: nothing sees them.
    """
    semantics = np.full(GRID_SHAPE, OCCUPANCY_FREE, np.uint8)
    semantics[:, :, _GROUND_LAYER] = _ground_layer(world.ground, ego2tile)
    tile2grid = _EGO2GRID @ np.linalg.inv(ego2tile)
    cells = np.empty((3, surfaces.points.shape[1]), np.float32)
    np.matmul(tile2grid.astype(np.float32), surfaces.points[:, surfaces.standing], out=cells[:, surfaces.standing])
    for k, part in surfaces.movers.items():
        x, y, z, yaw = instant.poses[k].tolist()
        mover2grid = tile2grid @ matrix(about("z", yaw), (x, y, z))
        np.matmul(mover2grid.astype(np.float32), surfaces.points[:, part], out=cells[:, part])
    index, inside = _cells(cells)
    kept = np.flatnonzero(inside)
    x, y, z = index.take(kept, axis=1)
    semantics.ravel()[(x * GRID_SHAPE[1] + y) * GRID_SHAPE[2] + z] = surfaces.labels[kept]
    return semantics


def _ground_layer(ground: Ground, ego2tile: Float) -> NDArray[np.uint8]:
    centres = GRID_ORIGIN_M[0] + (np.arange(GRID_SHAPE[0]) + 0.5) * VOXEL_M
    x, y = np.meshgrid(centres, centres, indexing="ij")
    (c, s), tile = ego2tile[:2, 0], ego2tile[:2, 3]
    return ground.label_at(np.stack([c * x - s * y + tile[0], s * x + c * y + tile[1]], axis=-1).reshape(-1, 2)).reshape(GRID_SHAPE[:2])


def voxel_index(points_m: NDArray[np.floating]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Voxel indices (N,3) of ego-frame points (N,3) and whether each lies inside the grid (N,)."""
    index, inside = _cells(((points_m - GRID_ORIGIN_M.astype(np.float32)) * np.float32(1.0 / VOXEL_M)).T)
    return index.T, inside


def _cells(position: NDArray[np.floating]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Voxel indices (3,N) of positions (3,N) in voxels from the grid's corner, and whether each lies inside (N,)."""
    index = np.floor(position, out=position).astype(np.int32)
    # One comparison tests both ends: as unsigned numbers, negative indices are huge.
    x, y, z = (axis < size for axis, size in zip(index.view(np.uint32), GRID_SHAPE, strict=True))
    return index, x & y & z


@lru_cache(maxsize=1)
def voxel_centres() -> Float32:
    """Centres (3,640000) of all voxels in the ego frame, in the order of a flattened label array."""
    axes = [GRID_ORIGIN_M[i] + (np.arange(GRID_SHAPE[i]) + 0.5) * VOXEL_M for i in range(3)]
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]).astype(np.float32)


class CameraMask:
    """Which voxels the cameras of a rig see, key frame by key frame."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def see(self, mask: NDArray[np.uint8], semantics: NDArray[np.uint8], channel: str, ego2camera: Float, range_m: Float32) -> None:
        """Mark in `mask` the voxels that `channel` sees: their centre lies before the surface in its pixel (by range image (H,W)), or in it."""
        camera = self._rig.cameras[channel]
        index, centres, squares = _candidates(channel, camera.width, camera.height)
        row, column, in_image, excess = _project(centres, camera, ego2camera)
        inside = np.flatnonzero(in_image)
        index = index[inside]
        reach = range_m.ravel()[row[inside] * camera.width + column[inside]]
        # A surface lies up to half a voxel's diagonal before the centre of its voxel.
        reach += (semantics.ravel()[index] != OCCUPANCY_FREE) * np.float32(0.87 * VOXEL_M)
        mask.ravel()[index[excess[inside] + squares[inside] <= reach * reach]] = 1


_MARGIN = 0.2
"""Share of the image width that covers the spread of the calibration and the ego's motion within a sweep."""


@lru_cache(maxsize=12)
def _candidates(channel: str, width: int, height: int) -> tuple[NDArray[np.int32], Float32, Float32]:
    """Voxels that a camera may see: flat indices (M,), homogeneous ego-frame centres (4,M), squared distances (M,) of these from the ego origin."""
    camera = usual_camera(channel, width, height)
    centres = np.vstack([voxel_centres(), np.ones((1, voxel_centres().shape[1]), np.float32)])
    x, y, depth = (camera.intrinsics @ np.linalg.inv(camera.mount.sensor2ego)[:3]).astype(np.float32) @ centres
    margin = _MARGIN * width
    near = (depth > 0.0) & (x > -margin * depth) & (x < (width + margin) * depth) & (y > -margin * depth) & (y < (height + margin) * depth)
    index = np.flatnonzero(near).astype(np.int32)
    chosen = centres.take(index, axis=1)
    return index, chosen, np.square(chosen[:3]).sum(axis=0)


def _project(
    centres: Float32, camera: Camera, ego2camera: Float
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_], Float32]:
    """Pixel row and column (M,) of ego-frame points (4,M), whether they lie in the image, and by how much their squared distance from the camera
    exceeds that from the ego origin."""
    position = -ego2camera[:3, :3].T @ ego2camera[:3, 3]
    rows = np.vstack([camera.intrinsics @ ego2camera[:3], [[*(-2.0 * position), position @ position]]])
    # Half a pixel more makes cutting the decimals round, one more keeps it away from zero, where cutting would round up.
    rows[:2] += 1.5 * rows[2]
    x, y, depth, excess = rows.astype(np.float32) @ centres
    inverse = np.float32(1.0) / np.maximum(depth, np.float32(1e-3))
    column, row = (x * inverse).astype(np.int32) - 1, (y * inverse).astype(np.int32) - 1
    inside = (depth > 0.1) & (column.view(np.uint32) < camera.width) & (row.view(np.uint32) < camera.height)
    return row, column, inside, excess


class LidarMask:
    """Which voxels the lidar sees. For each voxel that a beam crosses, the beam nearest to its centre is found once a scene."""

    def __init__(self, lidar2ego: Float, azimuth_steps: int) -> None:
        x, y, z = lidar2ego[:3, :3].T.astype(np.float32) @ (voxel_centres() - lidar2ego[:3, 3:].astype(np.float32))
        flat = np.hypot(x, y)
        self._steps = azimuth_steps
        spacing_deg = LIDAR_ELEVATION_DEG[1] - LIDAR_ELEVATION_DEG[0]
        rank = (np.rad2deg(np.arctan2(z, flat)) - LIDAR_ELEVATION_DEG[0]) / spacing_deg
        ring = np.rint(rank).astype(np.int32)
        distance = np.hypot(flat, z)
        # Height of the beam above or below the centre; a voxel is crossed within half its height.
        miss_m = np.abs(rank - ring) * np.deg2rad(spacing_deg) * distance
        self._voxel = np.flatnonzero((ring >= 0) & (ring < len(LIDAR_ELEVATION_DEG)) & (miss_m < 0.5 * VOXEL_M)).astype(np.int32)
        self._beam = self._turn(x[self._voxel], y[self._voxel]) * len(LIDAR_ELEVATION_DEG) + ring[self._voxel]
        self._distance = distance[self._voxel]

    def _turn(self, x: Float32, y: Float32) -> NDArray[np.int32]:
        """Azimuth step (N,) of the beams towards points (N,) of the lidar frame."""
        return np.rint(np.arctan2(x, y) * np.float32(self._steps / (2.0 * np.pi))).astype(np.int32) % self._steps

    def seen(self, points: Float32, points_ego_m: Float32) -> NDArray[np.uint8]:
        """Mask (200,200,16) for a sweep (N,5) in the lidar frame, given also as ego-frame points (N,3).

        Seen are the voxels on the way to a return and those of the returns; a beam without a return shows nothing.
        """
        turn = self._turn(points[:, 0], points[:, 1])
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
