"""Who is in a scene, where, and how they move: the ego vehicle, traffic, parked vehicles, people, a work zone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.dataset.synthetic.actors import MEAN_SIZE_LWH_M, Shape, make_shape
from pipeline.dataset.synthetic.layout import Layout, Road
from pipeline.dataset.synthetic.paths2d import ArcPath, Float

KERB_HEIGHT_M = 0.15
EGO_SIZE_LWH_M = (4.6, 1.85, 1.6)
REAR_AXLE_TO_CENTRE_M = 1.4

_TRIES = 60
# How many of each class a scene gets (lowest, highest), and the share of them that moves.
_COUNTS: dict[str, tuple[int, int, float]] = {
    "trailer": (1, 2, 0.25),
    "bus": (1, 2, 0.6),
    "construction_vehicle": (1, 2, 0.0),
    "truck": (1, 3, 0.5),
    "car": (4, 7, 0.5),
    "barrier": (3, 5, 0.0),
    "traffic_cone": (3, 5, 0.0),
    "motorcycle": (2, 3, 0.55),
    "bicycle": (2, 3, 0.5),
    "pedestrian": (3, 6, 0.7),
}
_SPEEDS_MPS: dict[str, tuple[float, float]] = {
    "car": (4.0, 11.0),
    "truck": (4.0, 9.0),
    "bus": (3.0, 8.0),
    "trailer": (4.0, 8.0),
    "motorcycle": (4.0, 11.0),
    "bicycle": (2.5, 6.0),
    "pedestrian": (0.8, 1.8),
}


@dataclass(frozen=True)
class Motion:
    """Travel along `path` from arc length `start_m` at time 0 with constant speed and acceleration; `height_m` is the base's z."""

    path: ArcPath
    start_m: float
    speed_mps: float
    acceleration_mps2: float = 0.0
    height_m: float = 0.0

    def poses(self, time_s: Float) -> Float:
        """Poses (N,4) = x, y, z, yaw at times (N,) since the scene's start."""
        pose = self.path.pose(self._along(time_s))
        return np.stack([pose[:, 0], pose[:, 1], np.full(len(pose), self.height_m), pose[:, 2]], axis=1)

    def pose_at(self, time_s: float) -> tuple[float, float, float, float]:
        """Pose (x, y, z, yaw) at one time."""
        x, y, yaw = self.path.pose_at(self._along(time_s))
        return x, y, self.height_m, yaw

    def _along(self, time_s: Any) -> Any:
        return self.start_m + self.speed_mps * time_s + 0.5 * self.acceleration_mps2 * time_s**2

    @property
    def moves(self) -> bool:
        """Whether the speed is not zero."""
        return self.speed_mps > 0.0


@dataclass(frozen=True)
class Actor:
    """An annotated object: shape, motion and nuScenes attribute ("" for none)."""

    shape: Shape
    motion: Motion
    attribute: str


@dataclass(frozen=True)
class Traffic:
    """The ego vehicle's motion (rear axle on the ground) and everybody else."""

    ego: Motion
    actors: tuple[Actor, ...]


@dataclass
class _Space:
    """Which ground is taken at each of K times; bodies are covered by discs."""

    times_s: Float
    centres: Float
    radii: Float = field(default_factory=lambda: np.zeros(0))

    def claim(self, motion: Motion, size_lwh_m: tuple[float, float, float], ahead_m: float = 0.0, margin_m: float = 0.25) -> bool:
        """Take the ground of a body if it is free at all times; say whether it was."""
        length, width, _ = size_lwh_m
        long, short = max(length, width), min(length, width)
        count = int(np.ceil(long / short))
        radius = 0.5 * float(np.hypot(short, long / count)) + margin_m
        # What stands needs one pose; it is compared with the others at all times.
        pose = motion.poses(self.times_s if motion.moves else self.times_s[:1])
        along = ahead_m + (np.arange(count) - 0.5 * (count - 1)) * long / count
        yaw = pose[:, 3] if length >= width else pose[:, 3] + 0.5 * np.pi
        discs = pose[:, None, :2] + along[None, :, None] * np.stack([np.cos(yaw), np.sin(yaw)], axis=1)[:, None, :]
        x, y = (discs[:, :, None, axis] - self.centres[:, None, :, axis] for axis in range(2))
        if (x * x + y * y < np.square(self.radii + radius)).any():
            return False
        self.centres = np.concatenate([self.centres, np.broadcast_to(discs, (len(self.times_s), count, 2))], axis=1)
        self.radii = np.concatenate([self.radii, np.full(count, radius)])
        return True


def make_traffic(plan: Layout, duration_s: float, radius_m: float, rng: np.random.Generator) -> Traffic:
    """Populate a street plan for `duration_s` seconds without collisions, all within `radius_m` of where the ego vehicle is in
    the middle of the scene.
    """
    times = np.linspace(-0.3, duration_s + 0.3, 12)
    space = _Space(times, np.zeros((len(times), 0, 2)))
    ego = _ego_motion(plan, duration_s, rng)
    space.claim(ego, EGO_SIZE_LWH_M, REAR_AXLE_TO_CENTRE_M, margin_m=0.4)
    focus = ego.pose_at(0.5 * duration_s)[:2]
    placer = _Placer(plan, focus, radius_m, duration_s, rng, space, plan.routes())
    actors = list(_work_zone(placer))
    for name, (low, high, moving_share) in _COUNTS.items():
        missing = int(rng.integers(low, high + 1)) - sum(actor.shape.name == name for actor in actors)
        for _ in range(missing):
            actors += placer.place(name, rng.random() < moving_share)
    return Traffic(ego, tuple(actors))


def _limited_speed(path: ArcPath, speed_mps: float, lateral_mps2: float = 2.5) -> float:
    """The speed, or what the tightest curve allows."""
    sharpest = max(abs(k) for k in path.curvatures)
    return min(speed_mps, float(np.sqrt(lateral_mps2 / sharpest))) if sharpest else speed_mps


def _ego_motion(plan: Layout, duration_s: float, rng: np.random.Generator) -> Motion:
    """A random route; the middle of the scene lies near the tile's centre, or on the approach to the junction."""
    routes = plan.routes()
    index = int(rng.integers(len(routes)))
    path = routes[index]
    speed = _limited_speed(path, float(rng.uniform(3.0, 10.0)))
    if plan.junction is None:
        middle = 0.5 * path.length_m + float(rng.uniform(-15.0, 15.0))
    else:
        middle = plan.lane_path(*plan.connectors[index].source).length_m + float(rng.uniform(-32.0, 12.0))
    acceleration = float(rng.uniform(-0.6, 0.6))
    start = middle - speed * 0.5 * duration_s
    return Motion(path, start, speed, acceleration)


@dataclass
class _Placer:
    """Proposes places for objects within `radius_m` of `focus` (x, y) and keeps those that are free."""

    plan: Layout
    focus: tuple[float, float]
    radius_m: float
    duration_s: float
    rng: np.random.Generator
    space: _Space
    routes: list[ArcPath]

    def place(self, name: str, moving: bool) -> Iterator[Actor]:
        """One object of a class, if a free place is found; a standing one may end up moving and the other way round if there is no room."""
        with_rider = moving
        shape = make_shape(name, self.rng, with_rider)
        for attempt in range(2 * _TRIES):
            if attempt == _TRIES and name in _SPEEDS_MPS:
                moving = not moving
            motion = self.moving(name) if moving else self.standing(name)
            if motion is None or math.dist(motion.pose_at(0.5 * self.duration_s)[:2], self.focus) > self.radius_m:
                continue
            if self.space.claim(motion, shape.size_lwh_m):
                yield Actor(shape, motion, attribute_of(name, motion.moves, with_rider))
                return

    def moving(self, name: str) -> Motion | None:
        """Along a lane, its right edge (bicycles), a sidewalk or a crossing (pedestrians)."""
        speed = float(self.rng.uniform(*_SPEEDS_MPS[name]))
        if name == "pedestrian":
            return self._walking(speed)
        path = self.routes[int(self.rng.integers(len(self.routes)))]
        if name in ("bicycle", "motorcycle"):
            path = path.offset(float(self.rng.uniform(-1.2, -0.6) if name == "bicycle" else self.rng.uniform(-0.6, 0.6)))
        speed = _limited_speed(path, speed)
        start = float(self.rng.uniform(2.0, path.length_m - speed * self.duration_s - 2.0))
        return Motion(path, start, speed)

    def _walking(self, speed: float) -> Motion:
        if self.plan.crossings and self.rng.random() < 0.35:
            crossing = self.plan.crossings[int(self.rng.integers(len(self.plan.crossings)))]
            road = self.plan.roads[crossing.road]
            along = float(self.rng.uniform(crossing.start_m + 0.4, crossing.stop_m - 0.4))
            ends = road.path.points([along, along], [road.right_m, road.left_m])
            ends = ends[::-1] if self.rng.random() < 0.5 else ends
            delta = ends[1] - ends[0]
            path = ArcPath((*ends[0].tolist(), float(np.arctan2(delta[1], delta[0]))), (float(np.linalg.norm(delta)),), (0.0,))
            return Motion(path, float(self.rng.uniform(0.0, max(path.length_m - speed * self.duration_s, 0.5))), speed)
        road, side = self.road_side()
        path = road.path.offset(road.kerb_m(side) + side * road.walk_m(side) * float(self.rng.uniform(0.3, 0.8)))
        path = path if self.rng.random() < 0.5 else path.reversed()
        return Motion(path, float(self.rng.uniform(0.0, path.length_m)), speed, height_m=KERB_HEIGHT_M)

    def road_side(self) -> tuple[Road, int]:
        return self.plan.roads[int(self.rng.integers(len(self.plan.roads)))], (-1, 1)[int(self.rng.integers(2))]

    def standing(self, name: str) -> Motion | None:
        """In a parking strip, on a lot, on a sidewalk, or (cones and barriers) along the edge of a lane."""
        places: list[Callable[[str], Motion | None]] = {
            "pedestrian": [self._on_walk],
            "bicycle": [self._on_walk, self._on_lot],
            "motorcycle": [self._on_walk, self._in_parking, self._on_lot],
            "traffic_cone": [self._at_lane_edge, self._on_lot],
            "barrier": [self._at_lane_edge, self._on_lot],
        }.get(name, [self._in_parking, self._on_lot])  # type: ignore[assignment]
        return places[int(self.rng.integers(len(places)))](name)

    def still(self, x: float, y: float, yaw: float, height_m: float = 0.0) -> Motion:
        return Motion(ArcPath((float(x), float(y), float(yaw)), (1.0,), (0.0,)), 0.0, 0.0, height_m=height_m)

    def _in_parking(self, name: str) -> Motion | None:
        road, side = self.road_side()
        if not road.parking_m(side):
            return None
        along = float(self.rng.uniform(road.painted_m[0][0] + 6.0, road.path.length_m - 6.0))
        if not any(low + 6.0 < along < high - 6.0 for low, high in road.painted_m):
            return None
        offset = road.kerb_m(side) - side * (0.5 * max(MEAN_SIZE_LWH_M[name][1], 2.0) + 0.25)
        x, y = road.path.point_at(along, offset)
        yaw = road.path.pose_at(along)[2] + (0.0 if side < 0 else np.pi) + float(self.rng.normal(0.0, 0.02))
        return self.still(x, y, yaw)

    def _on_lot(self, name: str) -> Motion | None:
        if not self.plan.lots:
            return None
        lot = self.plan.lots[int(self.rng.integers(len(self.plan.lots)))]
        length, width, _ = MEAN_SIZE_LWH_M[name]
        turned = self.rng.random() < 0.5 and length + 1.0 < abs(lot.far_m - lot.near_m)
        reach_s, reach_d = (0.5 * width, 0.5 * length) if turned else (0.5 * length, 0.5 * width)
        low_d, high_d = sorted((lot.near_m + lot.side * (reach_d + 0.3), lot.far_m - lot.side * (reach_d + 0.3)))
        if lot.stop_m - lot.start_m < 2.0 * reach_s + 1.0:
            return None
        along = float(self.rng.uniform(lot.start_m + reach_s + 0.4, lot.stop_m - reach_s - 0.4))
        path = self.plan.roads[lot.road].path
        x, y = path.point_at(along, float(self.rng.uniform(low_d, high_d)))
        yaw = path.pose_at(along)[2] + (0.5 * np.pi if turned else 0.0) + np.pi * int(self.rng.integers(2)) + float(self.rng.normal(0.0, 0.08))
        return self.still(x, y, yaw)

    def _on_walk(self, name: str) -> Motion:
        road, side = self.road_side()
        along = float(self.rng.uniform(1.0, road.path.length_m))
        x, y = road.path.point_at(along, road.kerb_m(side) + side * road.walk_m(side) * float(self.rng.uniform(0.3, 0.85)))
        if name == "pedestrian":
            yaw = float(self.rng.uniform(-np.pi, np.pi))
        else:
            yaw = road.path.pose_at(along)[2] + 0.5 * np.pi * int(self.rng.integers(4)) + float(self.rng.normal(0.0, 0.1))
        return self.still(x, y, yaw, KERB_HEIGHT_M)

    def _at_lane_edge(self, name: str) -> Motion:
        road, side = self.road_side()
        along = float(self.rng.uniform(3.0, road.path.length_m))
        lanes = road.backward if side > 0 else road.forward
        x, y = road.path.point_at(along, side * (lanes * road.lane_width_m + float(self.rng.uniform(-0.1, 0.5))))
        # A barrier's long side is its width, so along the road means a quarter turn.
        yaw = road.path.pose_at(along)[2] + 0.5 * np.pi + float(self.rng.normal(0.0, 0.1))
        return self.still(x, y, yaw)


def _work_zone(placer: _Placer) -> Iterator[Actor]:
    """A construction vehicle behind a row of barriers and cones, beside a lane or at the edge of a lot."""
    rng, plan = placer.rng, placer.plan
    for _ in range(20):
        if plan.lots and rng.random() < 0.7:
            lot = plan.lots[int(rng.integers(len(plan.lots)))]
            road, side, middle, offset = plan.roads[lot.road], lot.side, 0.5 * (lot.start_m + lot.stop_m), lot.near_m + lot.side * 0.6
        else:
            road, side = placer.road_side()
            middle = float(rng.uniform(16.0, road.path.length_m - 10.0))
            offset = side * ((road.backward if side > 0 else road.forward) * road.lane_width_m + 0.3)
            if not road.parking_m(side):
                continue
        if math.dist(road.path.point_at(middle, offset), placer.focus) > 0.8 * placer.radius_m:
            continue
        x, y = road.path.point_at(middle, offset + side * 2.6)
        heading = road.path.pose_at(middle)[2]
        yield from _claimed(placer, "construction_vehicle", placer.still(x, y, heading + float(rng.choice([0.0, np.pi]))))
        names = ["traffic_cone", *["barrier"] * int(rng.integers(2, 4)), "traffic_cone", "traffic_cone"]
        for along, name in zip(middle - 6.0 + 3.1 * np.arange(len(names)), names, strict=True):
            x, y = road.path.point_at(along, offset)
            yaw = road.path.pose_at(along)[2] + side * 0.5 * np.pi + float(rng.normal(0.0, 0.05))
            yield from _claimed(placer, name, placer.still(x, y, yaw))
        return


def _claimed(placer: _Placer, name: str, motion: Motion) -> Iterator[Actor]:
    shape = make_shape(name, placer.rng)
    if placer.space.claim(motion, shape.size_lwh_m, margin_m=0.02):
        yield Actor(shape, motion, attribute_of(name, False, False))


def attribute_of(name: str, moving: bool, with_rider: bool) -> str:
    """The nuScenes attribute of an object, "" for classes without one."""
    if name in ("traffic_cone", "barrier"):
        return ""
    if name in ("bicycle", "motorcycle"):
        return "cycle.with_rider" if with_rider else "cycle.without_rider"
    if name == "pedestrian":
        return "pedestrian.moving" if moving else "pedestrian.standing"
    return "vehicle.moving" if moving else "vehicle.parked"
