"""One sample as typed arrays.

The BEV frame is the ego frame at the time stamp of the sample's LIDAR_TOP key frame: x forward, y left, z up, metres.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray, invert, pad_intrinsics


@dataclass(frozen=True)
class Boxes:
    """N annotated boxes in the BEV frame."""

    tokens: tuple[str, ...]
    instance_tokens: tuple[str, ...]
    center_m: FloatArray  # (N,3)
    size_wlh_m: FloatArray  # (N,3) width (along y of the box), length (along x), height
    yaw_rad: FloatArray  # (N,) from the x axis to the box's length axis, counter-clockwise
    velocity_mps: FloatArray  # (N,2) NaN where unknown
    class_id: NDArray[np.int64]  # (N,) index into DETECTION_CLASSES, -1 for none
    num_lidar_pts: NDArray[np.int64]  # (N,) -1 where unknown
    visibility: NDArray[np.int64]  # (N,) 1 (0-40 %) to 4 (80-100 %), 0 where unknown
    attributes: tuple[str, ...]  # attribute name or ""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class CameraFrame:
    """One camera image and where it was taken."""

    path: Path
    timestamp_us: int
    width: int
    height: int
    intrinsics: FloatArray  # (3,3) pixels
    camera2ego: FloatArray  # (4,4)
    ego2global: FloatArray  # (4,4) at the camera's own time stamp


@dataclass(frozen=True)
class LidarFrame:
    """One lidar sweep and where it was taken."""

    path: Path
    timestamp_us: int
    lidar2ego: FloatArray  # (4,4)
    ego2global: FloatArray  # (4,4) at the lidar's own time stamp


@dataclass(frozen=True)
class SampleRecord:
    """One key frame of a scene: its place in the scene, its sensors and its boxes."""

    token: str
    scene_token: str
    scene_name: str
    index_in_scene: int
    timestamp_us: int
    prev: str
    next: str
    split: str
    location: str
    ego2global: FloatArray  # (4,4) BEV frame to global
    cameras: dict[str, CameraFrame]
    lidar: LidarFrame | None
    boxes: Boxes

    def ego2img(self, channel: str) -> FloatArray:
        """Projection (4,4) of BEV points into the original image of a camera: rows 0, 1: pixel times depth, row 2: depth in metres.

        It goes by way of the global frame, because the ego moves between the time stamps of lidar and camera.
        """
        camera = self.cameras[channel]
        bev2camera = invert(camera.camera2ego) @ invert(camera.ego2global) @ self.ego2global
        return pad_intrinsics(camera.intrinsics) @ bev2camera
