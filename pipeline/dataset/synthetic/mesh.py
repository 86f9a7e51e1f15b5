"""Triangle soups with a colour and a material per triangle, and the primitive solids everything is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Colour = Sequence[float]


class Material(IntEnum):
    """How a triangle is coloured."""

    GROUND = 0
    """From the ground texture at the hit point."""
    PLAIN = 1
    """Its own colour."""
    FACADE = 2
    """Its own colour with a grid of windows."""
    FOLIAGE = 3
    """Its own colour, strongly mottled."""
    MASONRY = 4
    """Its own colour, mottled."""


@dataclass(frozen=True)
class Mesh:
    """T triangles whose normals point outwards: corners (T,3,3) in metres, linear RGB (T,3) in 0..1, materials (T,), Occ3D labels (T,)."""

    triangles: Float32
    colours: Float32
    materials: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    @staticmethod
    def join(meshes: Sequence[Mesh]) -> Mesh:
        """One mesh with the triangles of all, in order."""
        return Mesh(*(np.concatenate([getattr(m, name) for m in meshes]) for name in ("triangles", "colours", "materials", "labels")))

    def moved(self, x: float, y: float, z: float, yaw: float) -> Mesh:
        """The mesh turned by `yaw` about z, then shifted."""
        c, s = np.cos(yaw), np.sin(yaw)
        rotation = np.array([[c, s, 0.0], [-s, c, 0.0], [0.0, 0.0, 1.0]])
        triangles = (self.triangles @ rotation + np.array([x, y, z])).astype(np.float32)
        return Mesh(triangles, self.colours, self.materials, self.labels)

    def labelled(self, label: int) -> Mesh:
        """The mesh with one Occ3D label."""
        return Mesh(self.triangles, self.colours, self.materials, np.full(len(self.triangles), label, np.uint8))

    def normals(self) -> Float32:
        """Unit normals (T,3)."""
        a, b, c = self.triangles[:, 0], self.triangles[:, 1], self.triangles[:, 2]
        normal = np.cross(b - a, c - a)
        return (normal / np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-12)).astype(np.float32)

    def surface_points(self, spacing_m: float) -> tuple[Float32, NDArray[np.int64]]:
        """About one point per spacing_m^2, spread evenly: points (P,3) and the triangle of each (P,).

        Barycentric coordinates follow the R2 low-discrepancy sequence (M. Roberts, 2018).
        """
        a, b, c = (self.triangles[:, i].astype(float) for i in range(3))
        area = 0.5 * np.linalg.norm(np.cross(b - a, c - a), axis=1)
        count = np.ceil(area / spacing_m**2).astype(int)
        triangle = np.repeat(np.arange(len(count)), count)
        rank = np.arange(len(triangle)) - np.repeat(np.cumsum(count) - count, count)
        u, v = _low_discrepancy(int(count.max(initial=0)))[:, rank]
        # Axis by axis: numpy gathers from and adds contiguous rows much quicker than columns.
        points = np.empty((3, len(triangle)), np.float32)
        for axis, row in enumerate(points):
            row[:] = a[:, axis].astype(np.float32)[triangle]
            row += u * (b - a)[:, axis].astype(np.float32)[triangle]
            row += v * (c - a)[:, axis].astype(np.float32)[triangle]
        return points.T, triangle


def _low_discrepancy(count: int) -> Float32:
    """The first points (2,N) of the R2 sequence, folded into the triangle u + v <= 1."""
    uv = 0.5 + np.arange(count) * np.array([[0.7548776662466927], [0.5698402909980532]])
    uv -= np.floor(uv)
    return np.where(uv.sum(axis=0) > 1.0, 1.0 - uv, uv).astype(np.float32)


def soup(triangles: NDArray[np.floating], colour: Colour, material: Material = Material.PLAIN, label: int = 0) -> Mesh:
    """A mesh of one colour from corners (T,3,3)."""
    count = len(triangles)
    colours = np.empty((count, 3), np.float32)
    colours[:] = colour
    return Mesh(np.ascontiguousarray(triangles, np.float32), colours, np.full(count, material, np.uint8), np.full(count, label, np.uint8))


@lru_cache(maxsize=64)
def _ring_faces(rings: int, sides: int) -> NDArray[np.int64]:
    """Corner indices (T,3) of the solid through `rings` rings of `sides` corners: two triangles a wall panel, fans at both ends."""
    corner = np.arange(rings * sides).reshape(rings, sides)
    following = np.roll(corner, -1, axis=1)
    walls = [(corner[:-1], following[:-1], following[1:]), (corner[:-1], following[1:], corner[1:])]
    faces = [np.stack(wall, axis=-1).reshape(-1, 3) for wall in walls]
    for ring, order in ((corner[0], [0, 2, 1]), (corner[-1], [0, 1, 2])):
        fan = np.stack([np.full(sides - 2, ring[0]), ring[1:-1], ring[2:]], axis=-1)
        faces.append(fan[:, order])
    return np.concatenate(faces)


def _ring_solid(rings: NDArray[np.floating]) -> NDArray[np.floating]:
    """Triangles (T,3,3), normals outwards, of the closed solid through rings (R,N,3) of corners, capped at both ends."""
    triangles = rings.reshape(-1, 3)[_ring_faces(*rings.shape[:2])]
    (ax, ay, az), (bx, by, bz) = (triangles[:, 1] - triangles[:, 0]).T, (triangles[:, 2] - triangles[:, 0]).T
    normal = np.empty((len(triangles), 3))
    normal[:, 0] = ay * bz - az * by
    normal[:, 1] = az * bx - ax * bz
    normal[:, 2] = ax * by - ay * bx
    # Six times the volume: the sum over triangles of (corner - any fixed point) . normal.
    volume = np.vdot(triangles[:, 0] - triangles[0, 0], normal)
    kept = triangles[(np.abs(normal) > 1e-9).any(axis=1)]
    return kept if volume > 0.0 else kept[:, ::-1]


def box(low: Sequence[float], high: Sequence[float], colour: Colour, material: Material = Material.PLAIN, label: int = 0) -> Mesh:
    """An axis-aligned box from its lowest to its highest corner."""
    return soup(np.where(_unit_box(), high, low), colour, material, label)


@lru_cache(maxsize=1)
def _unit_box() -> NDArray[np.bool_]:
    """Triangles (12,3,3), normals outwards, of the box from 0 to 1."""
    rings = np.array([[[0.0, 0.0, z], [1.0, 0.0, z], [1.0, 1.0, z], [0.0, 1.0, z]] for z in (0.0, 1.0)])
    return _ring_solid(rings) > 0.5


def extruded(profile_xz: Sequence[Sequence[float]], y0: float, y1: float, colour: Colour) -> Mesh:
    """A convex side profile (N,2) of (x, z), clockwise seen from the left, stretched from y0 to y1."""
    return soup(_ring_solid(np.array([[(x, y, z) for x, z in profile_xz] for y in (y0, y1)], float)), colour)


def lathe(
    centre: Sequence[float], radii: Sequence[float], heights: Sequence[float], colour: Colour, sides: int = 8,
    material: Material = Material.PLAIN, label: int = 0, axis: str = "z",
) -> Mesh:  # fmt: skip
    """A solid of revolution: `radii` at `heights` along `axis` from `centre` (cylinders, cones, rounded blobs)."""
    rings = np.empty((len(radii), sides, 3))
    first, second, along = {"z": (0, 1, 2), "y": (2, 0, 1), "x": (1, 2, 0)}[axis]
    cosines, sines = _circle(sides)
    rings[..., first] = np.multiply.outer(radii, cosines)
    rings[..., second] = np.multiply.outer(radii, sines)
    rings[..., along] = np.asarray(heights, float)[:, None]
    rings += np.asarray(centre, float)
    return soup(_ring_solid(rings), colour, material, label)


@lru_cache(maxsize=16)
def _circle(sides: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosines and sines of the directions of the corners of a regular polygon."""
    angle = (np.arange(sides) + 0.5) * 2.0 * np.pi / sides
    return np.cos(angle), np.sin(angle)


def blob(centre: Sequence[float], radius: Sequence[float], colour: Colour, material: Material, label: int, rng: np.random.Generator) -> Mesh:
    """A rough ellipsoid with the half-axes `radius`, for foliage and heads."""
    tilt = np.linspace(-0.5 * np.pi, 0.5 * np.pi, 6)
    angle = np.arange(7) * 2.0 * np.pi / 7
    scale = rng.uniform(0.8, 1.0, (6, 7))
    x = np.cos(tilt)[:, None] * np.cos(angle) * scale * radius[0] + centre[0]
    y = np.cos(tilt)[:, None] * np.sin(angle) * scale * radius[1] + centre[1]
    z = np.sin(tilt)[:, None] * np.ones(7) * radius[2] + centre[2]
    mesh = soup(_ring_solid(np.stack([x, y, z], axis=-1)), colour, material, label)
    shade = rng.uniform(0.8, 1.15, (len(mesh.triangles), 1)).astype(np.float32) if material == Material.FOLIAGE else np.float32(1.0)
    return Mesh(mesh.triangles, mesh.colours * shade, mesh.materials, mesh.labels)
