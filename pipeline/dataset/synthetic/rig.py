"""The sensor rig: six cameras and a roof lidar like those of the nuScenes cars, with a little spread from log to log."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.synthetic.paths2d import Float
from pipeline.taxonomy import CAMERAS

# Mounting position in the ego frame (m), heading (deg) and focal length at 1600 px image width: rounded from the nuScenes calibration tables.
_CAMERAS: dict[str, tuple[tuple[float, float, float], float, float]] = {
    "CAM_FRONT": ((1.70, 0.01, 1.51), 0.0, 1260.0),
    "CAM_FRONT_RIGHT": ((1.56, -0.50, 1.51), -56.0, 1258.0),
    "CAM_BACK_RIGHT": ((1.03, -0.48, 1.56), -110.0, 1256.0),
    "CAM_BACK": ((0.04, 0.01, 1.57), 180.0, 804.0),
    "CAM_BACK_LEFT": ((1.04, 0.48, 1.58), 109.0, 1256.0),
    "CAM_FRONT_LEFT": ((1.55, 0.49, 1.51), 55.0, 1265.0),
}
# Median of camera minus lidar time stamp over 404 nuScenes key frames, ms; the residual jitter of one camera is a fraction of a millisecond.
CAMERA_PHASE_MS: dict[str, float] = {
    "CAM_FRONT_LEFT": -43.07,
    "CAM_FRONT": -35.45,
    "CAM_FRONT_RIGHT": -27.53,
    "CAM_BACK_RIGHT": -19.96,
    "CAM_BACK": -10.36,
    "CAM_BACK_LEFT": -0.48,
}
CAMERA_JITTER_MS = 0.3
SWEEP_INTERVAL_US = 50_000
_LIDAR_POSITION_M = (0.95, 0.0, 1.84)
LIDAR_ELEVATION_DEG = np.linspace(-30.67, 10.67, 32)
"""Beam elevations of a 32-beam spinning lidar (HDL-32E data sheet: +10.67 to -30.67 degrees)."""
LIDAR_RANGE_M = 100.0


@dataclass(frozen=True)
class Mount:
    """A sensor's pose in the ego frame: position (3,) m and unit quaternion (w, x, y, z), as the calibrated_sensor table holds them."""

    position_m: tuple[float, float, float]
    quaternion: tuple[float, float, float, float]

    @property
    def sensor2ego(self) -> Float:
        """(4,4)."""
        return matrix(self.quaternion, self.position_m)


@dataclass(frozen=True)
class Camera:
    """A pin-hole camera: mount, intrinsics (3,3) in pixels, image size in pixels. Camera frame: x right, y down, z forward."""

    mount: Mount
    intrinsics: Float
    width: int
    height: int

    @cached_property
    def rays(self) -> NDArray[np.float32]:
        """Unit directions (H*W,3) of the pixel centres in the camera frame, row by row. Integer coordinates are pixel centres."""
        x = (np.arange(self.width) - self.intrinsics[0, 2]) / self.intrinsics[0, 0]
        y = (np.arange(self.height)[:, None] - self.intrinsics[1, 2]) / self.intrinsics[1, 1]
        length = np.sqrt(x * x + y * y + 1.0)
        rays = np.empty((self.height, self.width, 3), np.float32)
        rays[..., 0], rays[..., 1], rays[..., 2] = x / length, y / length, 1.0 / length
        return rays.reshape(-1, 3)


@dataclass(frozen=True)
class Rig:
    """Calibration of one log: cameras by channel and the lidar's mount (lidar frame: x right, y forward, z up)."""

    cameras: dict[str, Camera]
    lidar: Mount


def matrix(quaternion: tuple[float, ...], translation: tuple[float, ...]) -> Float:
    """Homogeneous (4,4) transform of a unit quaternion (w, x, y, z) and a translation (3,)."""
    w, x, y, z = quaternion
    out = np.eye(4)
    out[:3, :3] = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    out[:3, 3] = translation
    return out


def product(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, float, float, float]:
    """Hamilton product of two quaternions (w, x, y, z): rotate by `b`, then by `a`."""
    w1, x1, y1, z1 = a
    w2, x2, y2, z2 = b
    return (
        w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2,
        w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2,
        w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2,
        w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2,
    )


def about(axis: str, angle_rad: float) -> tuple[float, float, float, float]:
    """Quaternion of a rotation about the x, y or z axis."""
    half = {"x": (1, 0, 0), "y": (0, 1, 0), "z": (0, 0, 1)}[axis]
    s = float(np.sin(0.5 * angle_rad))
    return float(np.cos(0.5 * angle_rad)), s * half[0], s * half[1], s * half[2]


# Axes of a camera that looks along the ego x axis: its z is ego x, its x is ego -y, its y is ego -z.
_LOOK_FORWARD = (0.5, -0.5, 0.5, -0.5)


def usual_camera(channel: str, width: int, height: int) -> Camera:
    """A camera as it is mounted and built when nothing deviates; focal lengths scale with the image width."""
    position, heading_deg, focal_1600 = _CAMERAS[channel]
    focal = focal_1600 * width / 1600.0
    intrinsics = np.array([[focal, 0.0, 0.5 * width], [0.0, focal, 0.5 * height], [0.0, 0.0, 1.0]])
    return Camera(Mount(position, product(about("z", float(np.deg2rad(heading_deg))), _LOOK_FORWARD)), intrinsics, width, height)


def make_rig(width: int, height: int, rng: np.random.Generator) -> Rig:
    """Draw the calibration of a log for images of `width` x `height` pixels; focal lengths scale with the width."""
    cameras = {}
    for channel in CAMERAS:
        position, heading_deg, focal_1600 = _CAMERAS[channel]
        focal = focal_1600 * width / 1600.0 * float(rng.normal(1.0, 0.004))
        yaw, pitch, roll = np.deg2rad(rng.normal((heading_deg, 0.0, 0.0), 0.4))
        turn = product(product(about("z", yaw), about("y", pitch)), about("x", roll))
        mount = Mount(tuple((np.array(position) + rng.normal(0.0, 0.01, 3)).tolist()), product(turn, _LOOK_FORWARD))
        centre = np.array([0.5 * width, 0.5 * height]) + rng.normal(0.0, 0.008 * width, 2)
        intrinsics = np.array([[focal, 0.0, centre[0]], [0.0, focal, centre[1]], [0.0, 0.0, 1.0]])
        cameras[channel] = Camera(mount, intrinsics, width, height)
    lidar_turn = product(about("z", -0.5 * np.pi + float(rng.normal(0.0, 0.005))), about("x", float(rng.normal(0.0, 0.01))))
    return Rig(cameras, Mount(_LIDAR_POSITION_M, lidar_turn))


@lru_cache(maxsize=4)
def lidar_rays(azimuth_steps: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unit directions (A*32,3) in the lidar frame and the ring index (A*32,) of each, azimuth by azimuth."""
    azimuth = np.arange(azimuth_steps) * 2.0 * np.pi / azimuth_steps
    elevation = np.deg2rad(LIDAR_ELEVATION_DEG)
    directions = np.stack(
        [
            np.sin(azimuth)[:, None] * np.cos(elevation),
            np.cos(azimuth)[:, None] * np.cos(elevation),
            np.broadcast_to(np.sin(elevation), (azimuth_steps, 32)),
        ],
        axis=-1,
    )
    return directions.reshape(-1, 3).astype(np.float32), np.tile(np.arange(32, dtype=np.float32), azimuth_steps)

