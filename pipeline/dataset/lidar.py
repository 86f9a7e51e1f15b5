"""Lidar sweeps: nuScenes .pcd.bin files (float32 x, y, z, intensity, ring)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.geometry import transform
from pipeline.dataset.records import LidarFrame
from pipeline.errors import file_error

VALUES_PER_POINT = 5


def read_points(path: Path) -> NDArray[np.float32]:
    """All returns (N,5) in the lidar frame: x, y, z in metres, intensity, ring.

    Raises:
        DataError: the file is missing, empty or not a whole number of points.
    """
    try:
        values = np.fromfile(path, dtype=np.float32)
        size = path.stat().st_size
    except OSError as error:
        raise file_error(path, f"lidar file cannot be read ({error.strerror})") from None
    if size == 0 or size % (4 * VALUES_PER_POINT):
        raise file_error(path, f"lidar file has {size} bytes: it must hold a whole number of points of {VALUES_PER_POINT} float32")
    return values.reshape(-1, VALUES_PER_POINT)


def points_in_ego(frame: LidarFrame, min_distance_m: float = 1.0) -> NDArray[np.float64]:
    """Returns (N,3) in the BEV frame of the frame's sample (the ego frame at the lidar's time stamp), metres.

    Args:
        frame: a sample's LIDAR_TOP key frame.
        min_distance_m: nearer returns are the vehicle itself or noise and are left out, as are points with NaN or infinite coordinates.
    """
    points = read_points(frame.path)[:, :3].astype(np.float64)
    points = points[np.isfinite(points).all(axis=1)]
    return transform(frame.lidar2ego, points[np.linalg.norm(points, axis=1) >= min_distance_m])
