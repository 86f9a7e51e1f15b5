"""One scene from its seed: simulate it, write its images, sweeps and occupancy labels, and return its table rows and map."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.config import SyntheticConfig
from pipeline.dataset.synthetic.actors import CATEGORY
from pipeline.dataset.synthetic.ground import ROAD, make_ground
from pipeline.dataset.synthetic.layout import Layout, make_layout
from pipeline.dataset.synthetic.lidar import count_in_box, sweep
from pipeline.dataset.synthetic.mapfile import MapRecords, make_map
from pipeline.dataset.synthetic.occupancy import CameraMask, LidarMask, Surfaces, npz_bytes, sample_surfaces, voxelize
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.dataset.synthetic.render import Light, make_light, render
from pipeline.dataset.synthetic.rig import CAMERA_JITTER_MS, CAMERA_PHASE_MS, SWEEP_INTERVAL_US, Mount, Rig, about, make_rig, matrix
from pipeline.dataset.synthetic.scenery import make_scenery
from pipeline.dataset.synthetic.tables import Row, Rows, attribute_token, category_token, chain, sensor_token, token_maker, visibility_token
from pipeline.dataset.synthetic.traffic import Traffic, make_traffic
from pipeline.dataset.synthetic.world import World
from pipeline.taxonomy import LIDAR

FIRST_SCENE_NUMBER = 2001
"""Scene names start beyond those of nuScenes, which end at scene-1110."""

_EPOCH_US = 1_600_000_000_000_000
_SCENE_SPACING_US = 60_000_000
_SWEEPS_PER_SAMPLE = 10
_ANNOTATION_RANGE_M = 60.0


@dataclass(frozen=True)
class SceneTask:
    """What a worker needs to make a scene: its number, where its tile lies in the location's map frame (tile centre, m), where to write."""

    config: SyntheticConfig
    index: int
    location: str
    tile_centre_m: tuple[float, float]
    root: Path


@dataclass(frozen=True)
class SceneResult:
    """Rows of a scene by table, its map, and its drivable area (packed bits of a (2000,2000) raster, row 0 at the top)."""

    name: str
    location: str
    tile_centre_m: tuple[float, float]
    rows: Rows
    map_records: MapRecords
    drivable_bits: NDArray[np.uint8]


@dataclass
class _Simulation:
    """A scene in memory while it is recorded."""

    task: SceneTask
    plan: Layout
    traffic: Traffic
    world: World
    light: Light
    rig: Rig
    rng: np.random.Generator

    def ego2tile(self, time_s: float) -> Float:
        """Pose (4,4) of the ego frame."""
        x, y, z, yaw = self.traffic.ego.pose_at(time_s)
        return matrix(about("z", yaw), (x, y, z))


def scene_name(index: int) -> str:
    """Name of the scene with this number."""
    return f"scene-{FIRST_SCENE_NUMBER + index:04d}"


def make_scene(task: SceneTask) -> SceneResult:
    """Simulate and record one scene; everything depends on the seed and the scene's number only."""
    cv2.setNumThreads(1)
    rng = np.random.default_rng([task.config.seed, task.index])
    plan = make_layout(rng)
    ground = make_ground(plan, rng)
    traffic = make_traffic(plan, 0.5 * task.config.samples_per_scene, task.config.traffic_radius_m, rng)
    world = World(ground, make_scenery(plan, ground, rng), traffic.actors)
    light, rig = make_light(rng), make_rig(task.config.image_width, task.config.image_height, rng)
    simulation = _Simulation(task, plan, traffic, world, light, rig, rng)
    token = token_maker(task.config.seed, task.index)
    rows = _record(simulation, token)
    offset = np.array(task.tile_centre_m)
    records = make_map(plan, offset, lambda name: token(f"map/{name}"))
    return SceneResult(scene_name(task.index), task.location, task.tile_centre_m, rows, records, np.packbits(ground.labels == ROAD))


def _record(sim: _Simulation, token: Any) -> Rows:
    """Write the scene's files and return its rows."""
    rows: Rows = {name: [] for name in ("log", "scene", "sample", "sample_data", "ego_pose", "calibrated_sensor", "sample_annotation", "instance")}
    start_us = _EPOCH_US + sim.task.index * _SCENE_SPACING_US
    log_name = f"synthetic-{sim.task.index:04d}"
    log = {"token": token("log"), "logfile": log_name, "vehicle": "synthetic", "date_captured": "2020-09-13", "location": sim.task.location}
    rows["log"].append(log)
    mounts: dict[str, tuple[Mount, list]] = {c: (k.mount, k.intrinsics.tolist()) for c, k in sim.rig.cameras.items()}
    mounts[LIDAR] = (sim.rig.lidar, [])
    for channel, (mount, intrinsics) in mounts.items():
        rows["calibrated_sensor"].append(
            {
                "token": token(f"calibration/{channel}"),
                "sensor_token": sensor_token(channel),
                "translation": list(mount.position_m),
                "rotation": list(mount.quaternion),
                "camera_intrinsic": intrinsics,
            }
        )
    surfaces = sample_surfaces(sim.world, sim.ego2tile(0.25 * sim.task.config.samples_per_scene)[:2, 3])
    camera_mask, lidar_mask = CameraMask(sim.rig), LidarMask(sim.rig.lidar.sensor2ego, sim.task.config.lidar_azimuth_steps)
    sweeps = np.arange(sim.task.config.samples_per_scene) * _SWEEPS_PER_SAMPLE + 2
    sweeps = sweeps + sim.rng.choice([-1, 0, 1], len(sweeps), p=[0.06, 0.88, 0.06])
    for k, sweep_number in enumerate(sweeps):
        lidar_us = start_us + int(sweep_number) * SWEEP_INTERVAL_US + int(sim.rng.integers(-300, 300))
        sample = {"token": token(f"sample/{k}"), "timestamp": lidar_us, "scene_token": token("scene")}
        rows["sample"].append(sample)
        _SampleRecorder(sim, rows, token, k, log_name, start_us, camera_mask, lidar_mask, surfaces).record(sample)
    _finish(sim, rows, token)
    return rows


@dataclass
class _SampleRecorder:
    """Writes the sensor files, occupancy and annotations of one key frame."""

    sim: _Simulation
    rows: Rows
    token: Any
    index: int
    log_name: str
    start_us: int
    camera_mask: CameraMask
    lidar_mask: LidarMask
    surfaces: Surfaces

    def record(self, sample: Row) -> None:
        """Lidar first (it gives the sample its time), then the cameras at their own times."""
        sim, lidar_us = self.sim, int(sample["timestamp"])
        time_s = self._seconds(lidar_us)
        instant, ego2tile = sim.world.at(time_s), sim.ego2tile(time_s)
        lidar2tile = ego2tile @ sim.rig.lidar.sensor2ego
        points = sweep(sim.world, instant, lidar2tile, sim.task.config.lidar_azimuth_steps, sim.rng)
        self._sensor_file(sample, LIDAR, lidar_us, points.tobytes(), 0, 0)
        semantics = voxelize(sim.world, self.surfaces, instant, ego2tile)
        seen = np.zeros_like(semantics)
        visible, silhouette = np.zeros((2, len(sim.world.actors)), np.int64)
        for channel, camera in sim.rig.cameras.items():
            jitter_ms = float(np.clip(sim.rng.normal(0.0, CAMERA_JITTER_MS), -1.0, 1.0))
            camera_us = lidar_us + round(1000.0 * min(CAMERA_PHASE_MS[channel] + jitter_ms, -0.05))
            camera2tile = sim.ego2tile(self._seconds(camera_us)) @ camera.mount.sensor2ego
            then = sim.world.at(self._seconds(camera_us))
            frame = render(sim.world, then, sim.light, camera, camera2tile, int(sim.rng.integers(2**31)))
            _, jpeg = cv2.imencode(".jpg", frame.bgr, [cv2.IMWRITE_JPEG_QUALITY, sim.task.config.jpeg_quality])
            self._sensor_file(sample, channel, camera_us, jpeg.tobytes(), camera.width, camera.height)
            self.camera_mask.see(seen, semantics, channel, np.linalg.inv(camera2tile) @ ego2tile, frame.range_m)
            visible += frame.visible_px
            silhouette += frame.silhouette_px
        points_ego = points[:, :3] @ sim.rig.lidar.sensor2ego[:3, :3].T.astype(np.float32) + sim.rig.lidar.sensor2ego[:3, 3].astype(np.float32)
        crossed = self.lidar_mask.seen(points, points_ego)
        self._occupancy(sample, {"semantics": semantics, "mask_lidar": crossed, "mask_camera": seen})
        points_tile = lidar2tile[:3, :3] @ points[:, :3].astype(float).T + lidar2tile[:3, 3:]
        self._annotate(sample, instant.poses, ego2tile, points_tile, visible, silhouette)

    def _seconds(self, time_us: int) -> float:
        return (time_us - self.start_us) * 1e-6

    def _sensor_file(self, sample: Row, channel: str, time_us: int, content: bytes, width: int, height: int) -> None:
        """Write a sensor file with its sample_data and ego_pose rows."""
        extension = "pcd.bin" if channel == LIDAR else "jpg"
        name = f"samples/{channel}/{self.log_name}__{channel}__{time_us}.{extension}"
        (self.sim.task.root / name).write_bytes(content)
        token = self.token(f"data/{self.index}/{channel}")
        x, y, z, yaw = self.sim.traffic.ego.pose_at(self._seconds(time_us))
        tile_x, tile_y = self.sim.task.tile_centre_m
        pose = {"token": token, "timestamp": time_us, "rotation": list(about("z", yaw)), "translation": [x + tile_x, y + tile_y, z]}
        self.rows["ego_pose"].append(pose)
        self.rows["sample_data"].append(
            {
                "token": token,
                "sample_token": sample["token"],
                "ego_pose_token": token,
                "calibrated_sensor_token": self.token(f"calibration/{channel}"),
                "timestamp": time_us,
                "fileformat": "pcd" if channel == LIDAR else "jpg",
                "is_key_frame": True,
                "height": height,
                "width": width,
                "filename": name,
            }
        )

    def _occupancy(self, sample: Row, arrays: dict[str, NDArray[np.uint8]]) -> None:
        folder = self.sim.task.root / "gts" / scene_name(self.sim.task.index) / sample["token"]
        folder.mkdir(parents=True)
        (folder / "labels.npz").write_bytes(npz_bytes(arrays))

    def _annotate(
        self, sample: Row, poses: Float, ego2tile: Float, points_tile: Float, visible: NDArray[np.int64], silhouette: NDArray[np.int64]
    ) -> None:
        """Boxes of all actors within 60 m of the ego vehicle; `points_tile` (3,N), pixel counts (A,)."""
        tile_x, tile_y = self.sim.task.tile_centre_m
        for k, actor in enumerate(self.sim.world.actors):
            x, y, z, yaw = poses[k].tolist()
            if np.hypot(x - ego2tile[0, 3], y - ego2tile[1, 3]) > _ANNOTATION_RANGE_M:
                continue
            length, width, height = actor.shape.size_lwh_m
            centre = np.array([x, y, z + 0.5 * height])
            self.rows["sample_annotation"].append(
                {
                    "token": self.token(f"annotation/{self.index}/{k}"),
                    "sample_token": sample["token"],
                    "instance_token": self.token(f"instance/{k}"),
                    "visibility_token": visibility_token(int(visible[k]), int(silhouette[k])),
                    "attribute_tokens": [attribute_token(actor.attribute)] if actor.attribute else [],
                    "translation": [centre[0] + tile_x, centre[1] + tile_y, centre[2]],
                    "size": [width, length, height],
                    "rotation": list(about("z", yaw)),
                    "num_lidar_pts": count_in_box(points_tile, centre, yaw, actor.shape.size_lwh_m),
                    "num_radar_pts": 0,
                    "_seen": bool(visible[k]),
                }
            )


def _finish(sim: _Simulation, rows: Rows, token: Any) -> None:
    """Link the rows, add instances and the scene; objects that no sensor ever met are not annotated."""
    met = {row["instance_token"] for row in rows["sample_annotation"] if row["_seen"] or row["num_lidar_pts"]}
    rows["sample_annotation"] = [row for row in rows["sample_annotation"] if row["instance_token"] in met]
    for row in rows["sample_annotation"]:
        del row["_seen"]
    chain(rows["sample"])
    for frames in _grouped(rows["sample_data"], "calibrated_sensor_token").values():
        chain(frames)
    tracks = _grouped(rows["sample_annotation"], "instance_token")
    for k, actor in enumerate(sim.world.actors):
        instance = token(f"instance/{k}")
        track = tracks.get(instance)
        if track:
            chain(track)
            rows["instance"].append(
                {
                    "token": instance,
                    "category_token": category_token(CATEGORY[actor.shape.name]),
                    "nbr_annotations": len(track),
                    "first_annotation_token": track[0]["token"],
                    "last_annotation_token": track[-1]["token"],
                }
            )
    rows["scene"].append(
        {
            "token": token("scene"),
            "log_token": token("log"),
            "nbr_samples": len(rows["sample"]),
            "first_sample_token": rows["sample"][0]["token"],
            "last_sample_token": rows["sample"][-1]["token"],
            "name": scene_name(sim.task.index),
            "description": f"Synthetic: {sim.plan.kind.replace('_', ' ')}, {len(sim.world.actors)} objects",
        }
    )


def _grouped(rows: list[Row], field: str) -> dict[str, list[Row]]:
    """Rows by the value of a field, each group in the order of `rows`."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[field], []).append(row)
    return groups
