"""One scene as triangles: what a ray meets, at any time.

Scenery and standing objects share one static ray-casting scene. Each moving object has its own ray-casting scene in its own frame; rays are taken
into that frame at the object's pose, so nothing is rebuilt from one instant to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from embreex.mesh_construction import TriangleMesh
from embreex.rtcore_scene import EmbreeScene
from numpy.typing import NDArray

from pipeline.dataset.synthetic.ground import Ground
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
    """The actors' poses (A,4) = x, y, z, yaw at one time, and the normals (T,3) of all triangles then."""

    poses: Float
    normals: Float32


@dataclass(frozen=True)
class _View:
    """A cone around a bundle of rays: unit axis (3,) and half angle in radians."""

    axis: Float
    half_angle: float

    @staticmethod
    def around(directions: Float32) -> _View:
        mean = directions[:: max(len(directions) // 256, 1)].mean(axis=0, dtype=float) if len(directions) else np.zeros(3)
        length = float(np.linalg.norm(mean))
        if length < 0.1:
            return _View(np.array([1.0, 0.0, 0.0]), np.pi)
        axis = mean / length
        return _View(axis, float(np.arccos(np.clip((directions @ axis.astype(np.float32)).min(), -1.0, 1.0))) + 0.01)


class World:
    """Triangles of a scene: `mesh` holds scenery and standing actors in the tile frame, then each moving actor in its own frame.

    `instance` (T,) is the actor of each triangle, -1 for scenery.
    """

    def __init__(self, ground: Ground, scenery: Mesh, actors: tuple[Actor, ...]) -> None:
        self.ground, self.actors = ground, actors
        self.movers = [k for k, actor in enumerate(actors) if actor.motion.moves]
        start = np.concatenate([np.zeros((0, 4)), *[actor.motion.poses(np.zeros(1)) for actor in actors]])
        self._start = start
        standing = [k for k, actor in enumerate(actors) if not actor.motion.moves]
        parts = [scenery] + [actors[k].shape.mesh.moved(*start[k]) for k in standing] + [actors[k].shape.mesh for k in self.movers]
        self.mesh = Mesh.join(parts)
        sizes = [len(part.triangles) for part in parts]
        self.instance = np.repeat(np.array([-1, *standing, *self.movers], np.int32), sizes)
        self.first_triangle = dict(zip([-1, *standing, *self.movers], np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        self._normals = self.mesh.normals()
        self.static_count = sum(sizes[: 1 + len(standing)])
        self._static = _scene(self.mesh.triangles[: self.static_count])
        self._bodies = [_scene(actor.shape.mesh.triangles) for actor in actors]

    def poses(self, time_s: float) -> Float:
        """Poses (A,4) of all actors at a time since the scene's start."""
        poses = self._start.copy()
        for k in self.movers:
            poses[k] = self.actors[k].motion.poses(np.array([time_s]))[0]
        return poses

    def at(self, time_s: float) -> Instant:
        """The state of the scene at a time since its start."""
        poses = self.poses(time_s)
        normals = self._normals.copy()
        for k in self.movers:
            part = slice(self.first_triangle[k], self.first_triangle[k] + len(self.actors[k].shape.mesh.triangles))
            normals[part] = self._normals[part] @ _rotation(poses[k, 3]).T
        return Instant(poses, normals)

    def cast(self, instant: Instant, origin: Float, directions: Float32) -> Hits:
        """First hits of rays from one point `origin` (3,) along unit `directions` (N,3), both in the tile frame."""
        origins = np.broadcast_to(np.asarray(origin, np.float32), directions.shape).copy()
        result = self._static.run(origins, directions, query="INTERSECT", output=True)
        triangle = result["primID"].astype(np.int32, copy=False)
        range_m = np.where(triangle >= 0, result["tfar"], np.float32(np.inf))
        view = _View.around(directions)
        for k in self.movers:
            index = self._near(k, instant, origin, directions, view)
            if not len(index):
                continue
            local = self._bodies[k].run(*self._localised(k, instant, origins[index], directions[index]), query="INTERSECT", output=True)
            closer = (local["primID"] >= 0) & (local["tfar"] < range_m[index])
            range_m[index[closer]] = local["tfar"][closer]
            triangle[index[closer]] = local["primID"][closer] + self.first_triangle[k]
        return Hits(range_m, triangle)

    def hidden(self, instant: Instant, origin: Float, directions: Float32, hits: Hits) -> NDArray[np.int64]:
        """How many of the rays would meet each actor (A,) if what they hit first were not in the way."""
        counts = np.zeros(len(self.actors), np.int64)
        start = np.asarray(origin, np.float32)
        instance, view = self.instance[hits.triangle], _View.around(directions)
        for k in range(len(self.actors)):
            centre, radius = self._ball(k, instant)
            index = self._near(k, instant, origin, directions, view)
            # A ray that ends beyond the actor has passed it; one that ends on it does not miss it.
            blocked = (hits.range_m[index] < np.linalg.norm(centre - origin) + radius) & ((instance[index] != k) | (hits.triangle[index] < 0))
            index = index[blocked]
            if len(index):
                rays = self._localised(k, instant, np.broadcast_to(start, (len(index), 3)), directions[index])
                counts[k] = np.count_nonzero(self._bodies[k].run(*rays, query="OCCLUDED") == 0)
        return counts

    def lit(self, instant: Instant, points: Float32, sun: Float32) -> NDArray[np.bool_]:
        """Whether the sun, seen along the unit vector `sun` (3,), reaches points (N,3) just off the surfaces."""
        directions = np.broadcast_to(sun, points.shape).copy()
        lit = self._static.run(points, directions, query="OCCLUDED") != 0
        x, y, z = np.ascontiguousarray(points.T)
        towards = x * sun[0] + y * sun[1] + z * sun[2]
        square = x * x + y * y + z * z
        for k in self.movers:
            centre, radius = self._ball(k, instant)
            # Squared distance of the ball's centre from the line through the point towards the sun.
            along = np.float32(centre @ sun) - towards
            c = (2.0 * centre).astype(np.float32)
            apart = square - (x * c[0] + y * c[1] + z * c[2]) - along * along + np.float32(centre @ centre)
            index = np.flatnonzero((apart < radius**2) & (along > -radius) & lit)
            if len(index):
                shaded = self._bodies[k].run(*self._localised(k, instant, points[index], directions[index]), query="OCCLUDED") == 0
                lit[index[shaded]] = False
        return lit

    def _ball(self, k: int, instant: Instant) -> tuple[Float, float]:
        """Centre (3,) and radius of the ball around an actor."""
        size = np.array(self.actors[k].shape.size_lwh_m)
        return instant.poses[k, :3] + [0.0, 0.0, 0.5 * size[2]], float(0.5 * np.linalg.norm(size))

    def _near(self, k: int, instant: Instant, origin: Float, directions: Float32, view: _View) -> NDArray[np.int64]:
        """Indices of the rays from `origin` that pass through the ball around an actor."""
        centre, radius = self._ball(k, instant)
        offset = centre - origin
        distance = float(np.linalg.norm(offset))
        if distance <= radius:
            return np.arange(len(directions))
        reach = float(np.arcsin(radius / distance))
        if np.arccos(np.clip(view.axis @ offset / distance, -1.0, 1.0)) > view.half_angle + reach:
            return np.zeros(0, np.int64)
        limit = np.cos(reach)
        return np.flatnonzero(directions @ (offset / distance).astype(np.float32) > limit)

    def _localised(self, k: int, instant: Instant, origins: Float32, directions: Float32) -> tuple[Float32, Float32]:
        """Rays in the actor's frame."""
        rotation = _rotation(instant.poses[k, 3])
        position = instant.poses[k, :3].astype(np.float32)
        return np.ascontiguousarray((origins - position) @ rotation), np.ascontiguousarray(directions @ rotation)


def _rotation(yaw: float) -> Float32:
    c, s = np.cos(yaw), np.sin(yaw)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]], np.float32)


def _scene(triangles: Float32) -> EmbreeScene:
    scene = EmbreeScene()
    TriangleMesh(scene, np.ascontiguousarray(triangles, np.float32))
    return scene
