"""One scene as triangles: what a ray meets, at any time.

Scenery and standing objects share one static ray-casting scene, all but the ground plane, which rays meet in closed form. Each moving object has
its own ray-casting scene in its own frame; rays are taken into that frame at the object's pose, so nothing is rebuilt from one instant to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from embreex.mesh_construction import TriangleMesh
from embreex.rtcore import EmbreeDevice
from embreex.rtcore_scene import EmbreeScene
from numpy.typing import NDArray

from pipeline.dataset.synthetic.ground import GROUND_PLANE_TRIANGLES, HORIZON_M, Ground
from pipeline.dataset.synthetic.mesh import Float32, Mesh
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.dataset.synthetic.traffic import Actor


@dataclass(frozen=True)
class Hits:
    """What N rays meet: range in metres (inf: nothing) and index of the triangle in `World.mesh` (-1: nothing)."""

    range_m: Float32
    triangle: NDArray[np.int32]


@dataclass(frozen=True)
class Instant:
    """The scene at one time: the actors' poses (A,4) = x, y, z, yaw, centres (A,3) of the balls around them, and normals (T,3) of all triangles."""

    poses: Float
    centres: Float
    normals: Float32


@dataclass(frozen=True)
class View:
    """A cone around a bundle of rays from one point: apex (3,), unit axis (3,) and half angle in radians."""

    apex: Float
    axis: Float
    half_angle: float

    @staticmethod
    def around(apex: Float, directions: Float32) -> View:
        """The view of rays along unit `directions` (N,3)."""
        mean = directions[:: max(len(directions) // 256, 1)].mean(axis=0, dtype=float) if len(directions) else np.zeros(3)
        length = float(np.linalg.norm(mean))
        if length < 0.1:
            return View(apex, np.array([1.0, 0.0, 0.0]), np.pi)
        axis = mean / length
        return View(apex, axis, float(np.arccos(np.clip((directions @ axis.astype(np.float32)).min(), -1.0, 1.0))) + 0.01)

    def meets(self, centres: Float, radii: Float) -> NDArray[np.bool_]:
        """Whether each of the balls (B,3), (B,) may be hit."""
        offset = centres - self.apex
        distance = np.maximum(np.linalg.norm(offset, axis=1), 1e-9)
        angle = np.arccos(np.clip(offset @ self.axis / distance, -1.0, 1.0))
        return (distance <= radii) | (angle <= self.half_angle + np.arcsin(np.minimum(radii / distance, 1.0)))


class World:
    """Triangles of a scene: `mesh` holds the ground plane, other scenery and standing actors in the tile frame, then each moving actor in its own.

    `instance` (T,) is the actor of each triangle, -1 for scenery.
    """

    def __init__(self, ground: Ground, scenery: Mesh, actors: tuple[Actor, ...]) -> None:
        self.ground, self.actors = ground, actors
        self.movers = [k for k, actor in enumerate(actors) if actor.motion.moves]
        start = np.array([actor.motion.pose_at(0.0) for actor in actors], float).reshape(-1, 4)
        self._start = start
        standing = [k for k, actor in enumerate(actors) if not actor.motion.moves]
        parts = [scenery] + [actors[k].shape.mesh.moved(*start[k]) for k in standing] + [actors[k].shape.mesh for k in self.movers]
        self.mesh = Mesh.join(parts)
        sizes = [len(part.triangles) for part in parts]
        self.instance = np.repeat(np.array([-1, *standing, *self.movers], np.int32), sizes)
        self.first_triangle = dict(zip([-1, *standing, *self.movers], np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        self._normals = self.mesh.normals()
        self.static_count = sum(sizes[: 1 + len(standing)])
        self._body_sizes = np.array([actor.shape.size_lwh_m for actor in actors]).reshape(-1, 3)
        self._radii = 0.5 * np.linalg.norm(self._body_sizes, axis=1)
        device = EmbreeDevice()
        static = self.mesh.triangles[: self.static_count]
        # The ground plane is met in closed form, and no ray comes from below it to the undersides that lie on it.
        underside = (self._normals[: self.static_count, 2] < -0.99) & (static[:, :, 2].max(axis=1) <= 0.0)
        underside[:GROUND_PLANE_TRIANGLES] = True
        kept = np.flatnonzero(~underside)
        self._static = _scene(static[kept], device)
        # Triangle of each hit; the last entry is for hit -1, nothing but the plane.
        self._static_triangle = np.append(kept, 0).astype(np.int32)
        self._bodies = [_scene(actor.shape.mesh.triangles, device) for actor in actors]

    def poses(self, time_s: float) -> Float:
        """Poses (A,4) of all actors at a time since the scene's start."""
        poses = self._start.copy()
        for k in self.movers:
            poses[k] = self.actors[k].motion.pose_at(time_s)
        return poses

    def at(self, time_s: float) -> Instant:
        """The state of the scene at a time since its start."""
        poses = self.poses(time_s)
        normals = self._normals.copy()
        for k in self.movers:
            part = slice(self.first_triangle[k], self.first_triangle[k] + len(self.actors[k].shape.mesh.triangles))
            normals[part] = self._normals[part] @ _rotation(poses[k, 3]).T
        centres = poses[:, :3].copy()
        centres[:, 2] += 0.5 * self._body_sizes[:, 2]
        return Instant(poses, centres, normals)

    def near(self, instant: Instant, view: View, directions: Float32) -> dict[int, NDArray[np.int64]]:
        """For each actor that may be met, the indices of the rays `directions` (N,3) of a view that pass through the ball around it."""
        actors = np.flatnonzero(view.meets(instant.centres, self._radii))
        offset = instant.centres[actors] - view.apex
        distance = np.linalg.norm(offset, axis=1)
        cosines = (offset / distance[:, None]).astype(np.float32) @ directions.T
        limits = np.cos(np.arcsin(np.minimum(self._radii[actors] / distance, 1.0)))
        limits[distance <= self._radii[actors]] = -2.0
        found = {int(k): np.flatnonzero(row > limit) for k, row, limit in zip(actors, cosines, limits, strict=True)}
        return {k: rays for k, rays in found.items() if len(rays)}

    def cast(self, instant: Instant, origin: Float, directions: Float32, near: dict[int, NDArray[np.int64]] | None = None) -> Hits:
        """First hits of rays from one point `origin` (3,) above the ground along unit `directions` (N,3), both in the tile frame.

        `near` is what the method of that name says about these rays, if it is known.
        """
        near = self.near(instant, View.around(origin, directions), directions) if near is None else near
        range_m = _plane_range(origin, directions)
        origins = np.empty_like(directions)
        origins[:] = origin
        # Rays end at the range given and the scene overwrites it with that of what they hit before.
        triangle = self._static_triangle[self._static.run(origins, directions, dists=range_m, output=True)["primID"]]
        triangle[np.isinf(range_m)] = -1
        for k in near.keys() & set(self.movers):
            index = near[k]
            index = index[range_m[index] > np.linalg.norm(instant.centres[k] - origin) - self._radii[k]]
            if len(index):
                rays = self._localised(k, instant, origins[:1], directions[index])
                ends = range_m[index]
                primitive = self._bodies[k].run(*rays, dists=ends, output=True)["primID"]
                closer = np.flatnonzero(primitive >= 0)
                range_m[index[closer]] = ends[closer]
                triangle[index[closer]] = primitive[closer] + self.first_triangle[k]
        return Hits(range_m, triangle)

    def hidden(self, instant: Instant, origin: Float, directions: Float32, hits: Hits, near: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
        """How many of the rays would meet each actor (A,) if what they hit first were not in the way."""
        counts = np.zeros(len(self.actors), np.int64)
        start = np.asarray(origin, np.float32)[None]
        for k, index in near.items():
            reach = np.linalg.norm(instant.centres[k] - origin) + self._radii[k]
            triangle = hits.triangle[index]
            # A ray that ends beyond the actor has passed it; one that ends on it does not miss it.
            blocked = (hits.range_m[index] < reach) & ((self.instance[triangle] != k) | (triangle < 0))
            index = index[blocked]
            if len(index):
                rays = self._localised(k, instant, start, directions[index])
                counts[k] = np.count_nonzero(self._bodies[k].run(*rays, query="OCCLUDED") == 0)
        return counts

    def lit(self, instant: Instant, view: View, points: Float32, sun: Float32) -> NDArray[np.bool_]:
        """Whether the sun, seen along the unit vector `sun` (3,), reaches points (3,N) just off the surfaces that a view shows."""
        starts = np.ascontiguousarray(points.T)
        lit = self._static.run(starts, sun[None], query="OCCLUDED") != 0
        shading = self._shading(instant, view, sun)
        if not shading:
            return lit
        across = _across(sun)
        u, v, along = np.vstack([across, sun]) @ points
        for k in shading:
            cu, cv = (across @ instant.centres[k]).tolist()
            in_beam = np.square(u - np.float32(cu)) + np.square(v - np.float32(cv)) < self._radii[k] ** 2
            index = np.flatnonzero(in_beam & (along < instant.centres[k] @ sun + self._radii[k]) & lit)
            if len(index):
                shaded = self._bodies[k].run(*self._localised(k, instant, starts[index], sun[None]), query="OCCLUDED") == 0
                lit[index[shaded]] = False
        return lit

    def _shading(self, instant: Instant, view: View, sun: Float32, steps: int = 8) -> list[int]:
        """The moving actors whose shadows may lie in a view. A shadow is covered by balls from the actor to where it reaches the ground."""
        if not self.movers:
            return []
        centres, radii = instant.centres[self.movers], self._radii[self.movers]
        length = (centres[:, 2] + radii) / sun[2]
        balls = centres[:, None] - (np.linspace(0.0, 1.0, steps) * length[:, None])[..., None] * sun.astype(float)
        wide = np.hypot(radii, 0.5 * length / (steps - 1))
        meets = view.meets(balls.reshape(-1, 3), np.repeat(wide, steps)).reshape(-1, steps).any(axis=1)
        return [k for k, shades in zip(self.movers, meets, strict=True) if shades]

    def _localised(self, k: int, instant: Instant, origins: Float32, directions: Float32) -> tuple[Float32, Float32]:
        """Rays in the actor's frame, as many as there are origins or directions: embreex repeats a single direction, but not a single origin."""
        rotation = _rotation(instant.poses[k, 3])
        position = instant.poses[k, :3].astype(np.float32)
        starts = np.empty((max(len(origins), len(directions)), 3), np.float32)
        starts[:] = (origins - position) @ rotation
        return starts, directions @ rotation


def _plane_range(origin: Float, directions: Float32) -> Float32:
    """Range (N,) at which rays (N,3) from a point above the ground meet the ground plane, inf for those that do not."""
    x, y, z = np.asarray(origin, np.float32)
    range_m = -z / np.minimum(directions[:, 2], np.float32(-1e-9))
    limit = np.float32(HORIZON_M)
    range_m[(np.abs(x + range_m * directions[:, 0]) > limit) | (np.abs(y + range_m * directions[:, 1]) > limit)] = np.inf
    return range_m


def _across(direction: Float32) -> Float32:
    """Two unit vectors (2,3) at right angles to a unit vector (3,) and to each other."""
    first = np.cross(direction, [1.0, 0.0, 0.0] if abs(direction[0]) < 0.7 else [0.0, 1.0, 0.0])
    first /= np.linalg.norm(first)
    return np.stack([first, np.cross(direction, first)]).astype(np.float32)


def _rotation(yaw: float) -> Float32:
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]], np.float32)


def _scene(triangles: Float32, device: EmbreeDevice) -> EmbreeScene:
    scene = EmbreeScene(device)
    TriangleMesh(scene, np.ascontiguousarray(triangles, np.float32))
    return scene
