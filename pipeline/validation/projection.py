"""Do lidar points fall into the boxes and images where they should? A wrong lidar extrinsic or pose empties the boxes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.dataset.build import matrices
from pipeline.dataset.geometry import FloatArray, quaternion_to_matrix, transform
from pipeline.dataset.lidar import points_in_ego
from pipeline.dataset.records import LidarFrame
from pipeline.errors import DataError
from pipeline.taxonomy import LIDAR
from pipeline.validation.context import Context

# Boxes with fewer points than this say little: a handful of returns near a face may fall on either side.
MIN_POINTS = 5


def lidar_frames(context: Context) -> dict[str, LidarFrame]:
    """LIDAR_TOP key frame whose file exists, by sample token."""
    frames = context.index.frames
    rows = np.flatnonzero(pc.equal(frames["channel"], LIDAR).to_numpy())
    table = frames.take(pa.array(rows))
    sensor2ego, ego2global = matrices(table["sensor2ego"], 4), matrices(table["ego2global"], 4)
    names = table["filename"].to_pylist()
    stamps, tokens = table["timestamp_us"].to_pylist(), table["sample_token"].to_pylist()
    return {
        token: LidarFrame(context.dataroot / names[i], stamps[i], sensor2ego[i], ego2global[i])
        for i, token in enumerate(tokens)
        if (context.dataroot / names[i]).is_file()
    }


def measure(context: Context) -> pa.Table:
    """One row a checked sample (at most `projection_samples` of the configuration, evenly spread): box_point_share, the share of boxes with at least
    5 annotated lidar points that hold at least half of them when the points are moved by calibration and pose (null without such boxes)."""
    lidar = lidar_frames(context)
    samples = context.index.samples.select(["token", "first_box", "boxes"]).to_pylist()
    candidates = [row for row in samples if row["token"] in lidar]
    step = max(1, -(-len(candidates) // context.config.projection_samples))
    chosen = candidates[::step]
    shares = np.array([_share(context, lidar[row["token"]], row["first_box"], row["boxes"]) for row in chosen], dtype=np.float64)
    tokens = pa.array([row["token"] for row in chosen], pa.string())
    return pa.table({"token": tokens, "sample_token": tokens, "box_point_share": pa.array(shares, mask=~np.isfinite(shares))})


def _share(context: Context, lidar: LidarFrame, first: int, count: int) -> float:
    boxes = context.index.boxes.slice(first, count)
    expected = boxes["num_lidar_pts"].to_numpy()
    chosen = np.flatnonzero(expected >= MIN_POINTS)
    if not len(chosen):
        return float("nan")
    try:
        points = transform(lidar.ego2global, points_in_ego(lidar, min_distance_m=0.0))
    except DataError:  # an unreadable file is a finding of its own
        return float("nan")
    center, size, quaternion = (
        boxes[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(count, -1)[chosen]
        for name in ("global_center", "size_wlh", "global_quaternion")
    )
    counted = count_inside(points, center, size, quaternion)
    return float(np.mean(counted >= 0.5 * expected[chosen]))


def count_inside(points_m: FloatArray, center_m: FloatArray, size_wlh_m: FloatArray, quaternion_wxyz: FloatArray) -> NDArray[np.int64]:
    """Number of points (P,3) inside each of N boxes, all in one frame."""
    rotation = quaternion_to_matrix(quaternion_wxyz)
    half_lwh = size_wlh_m[:, [1, 0, 2]] / 2
    counts = np.zeros(len(center_m), dtype=np.int64)
    for i in range(len(center_m)):
        near = points_m[np.abs(points_m[:, 0] - center_m[i, 0]) < np.linalg.norm(half_lwh[i])]
        counts[i] = (np.abs((near - center_m[i]) @ rotation[i]) <= half_lwh[i]).all(axis=1).sum()
    return counts
