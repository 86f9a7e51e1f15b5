"""Calibration.

Is each matrix what it claims to be, does the rig look where its channel names say, and do lidar, boxes and cameras agree?
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.dataset.build import calibration_matrices, matrices
from pipeline.dataset.geometry import FloatArray
from pipeline.dataset.tables import positions, vectors
from pipeline.taxonomy import CAMERAS
from pipeline.validation.context import Context, IntArray, frame_sample, problems

# Direction of each camera's optical axis in the ego frame, degrees counter-clockwise from forward (nuScenes rig, rounded).
NOMINAL_HEADING_DEG = {
    "CAM_FRONT_LEFT": 55.0,
    "CAM_FRONT": 0.0,
    "CAM_FRONT_RIGHT": -55.0,
    "CAM_BACK_RIGHT": -110.0,
    "CAM_BACK": 180.0,
    "CAM_BACK_LEFT": 110.0,
}
# So many cameras with a matrix of their own show that the rig was measured, not simulated.
MEASURED_CAMERAS = 3


def measure(context: Context) -> pa.Table:
    """One row a calibrated_sensor record in use; camera quantities are null for other sensors.

    Columns: rotation_error (deviation of the quaternion's length from 1), intrinsics_problem, foreign_problem,
    shared_problem, field_of_view_deg, principal_point_offset
    (of the image's half size), heading_error_deg, elevation_deg, roll_deg (of cameras), and the deviation from the usual calibration of the same
    channel in the data set's other logs: rig_rotation_deg, rig_position_m, rig_focal_ratio.
    """
    table = context.tables.calibrated_sensor
    channel, size = _channel_and_size(context)
    rows = np.flatnonzero(channel != "")
    intrinsics, sensor2ego = (values[rows] for values in calibration_matrices(context.tables))
    channel, size = channel[rows], size[rows]
    camera = np.isin(channel, CAMERAS)
    quaternion = vectors(context.tables.folder / "calibrated_sensor.json", table, "rotation", 4)[rows]
    return pa.table(
        {
            "token": table["token"].take(pa.array(rows)),
            "channel": channel.tolist(),
            "rotation_error": np.abs(np.linalg.norm(quaternion, axis=1) - 1),
            "extrinsics_problem": problems(len(rows), [("extrinsics are not finite", ~np.isfinite(sensor2ego).all(axis=(1, 2)))]),
            **_shared_intrinsics(channel, intrinsics, camera),
            **_intrinsics(intrinsics, size, camera),
            **_direction(channel, sensor2ego, camera),
            **_rig(channel, intrinsics, sensor2ego, camera),
        }
    )


def _channel_and_size(context: Context) -> tuple[NDArray[np.str_], IntArray]:
    """Channel ("" when no key frame uses it) and image size (width, height) of each calibrated_sensor record."""
    frames, table = context.index.frames, context.tables.calibrated_sensor
    data = context.tables.sample_data
    row = positions(data["calibrated_sensor_token"].take(pa.array(positions(frames["token"], data))), table)
    channel = np.full(table.num_rows, "", dtype="<U64")
    channel[row] = frames["channel"].to_numpy(zero_copy_only=False).astype(str)
    size = np.zeros((table.num_rows, 2), dtype=np.int64)
    size[row] = np.stack([frames["width"].to_numpy(), frames["height"].to_numpy()], axis=1)
    return channel, size


def _masked(values: FloatArray, valid: NDArray[np.bool_]) -> pa.Array:
    return pa.array(np.asarray(values, dtype=np.float64), mask=~(valid & np.isfinite(values)))


def _intrinsics(intrinsics: FloatArray, size: IntArray, camera: NDArray[np.bool_]) -> dict[str, pa.Array]:
    fx, fy = intrinsics[:, 0, 0], intrinsics[:, 1, 1]
    finite = np.isfinite(intrinsics).all(axis=(1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        offset = np.abs(intrinsics[:, :2, 2] / (size / 2) - 1).max(axis=1)
        field_of_view = 2 * np.degrees(np.arctan(size[:, 0] / (2 * fx)))
        uneven = np.abs(fx / fy - 1) > 0.05
    last_row = np.abs(intrinsics[:, 2] - [0, 0, 1]).max(axis=1) > 1e-9
    cases = [
        ("camera_intrinsic is missing or not finite", ~finite),
        ("last row is not 0 0 1", last_row),
        ("focal length is not positive", (fx <= 0) | (fy <= 0)),
        ("fx and fy differ by more than 5 %", uneven),
        ("skew is not 0", (np.abs(intrinsics[:, 0, 1]) > 1) | (np.abs(intrinsics[:, 1, 0]) > 1)),
    ]
    return {
        "intrinsics_problem": problems(len(camera), [(text, camera & mask) for text, mask in cases]),
        "principal_point_offset": _masked(offset, camera),
        "field_of_view_deg": _masked(field_of_view, camera),
    }


def _shared_intrinsics(channel: NDArray[np.str_], intrinsics: FloatArray, camera: NDArray[np.bool_]) -> dict[str, pa.Array]:
    """Cameras whose matrix equals, to the last bit, that of another channel: measured calibrations never do.

    A matrix that two channels have, while at least three others have their own, was copied from one to the other (foreign_problem). Where more
    share one, the rig may be a simulated one (shared_problem).
    """
    owners: dict[bytes, set[str]] = {}
    for row in np.flatnonzero(camera):
        owners.setdefault(intrinsics[row].tobytes(), set()).add(str(channel[row]))
    sharing = {name for names in owners.values() if len(names) > 1 for name in names}
    measured = len(set(channel[camera].tolist()) - sharing) >= MEASURED_CAMERAS
    users = np.array([len(owners[intrinsics[row].tobytes()]) if camera[row] else 0 for row in range(len(channel))])
    foreign = (users == 2) & measured
    return {
        "foreign_problem": problems(len(channel), [("the camera matrix is that of another channel", foreign)]),
        "shared_problem": problems(len(channel), [("another channel has the same camera matrix", (users > 1) & ~foreign)]),
    }


def _direction(channel: NDArray[np.str_], sensor2ego: FloatArray, camera: NDArray[np.bool_]) -> dict[str, pa.Array]:
    """Where the optical axis (z of the camera frame) and the image's down direction (y) point in the ego frame."""
    axis, down = sensor2ego[:, :3, 2], sensor2ego[:, :3, 1]
    nominal = np.array([NOMINAL_HEADING_DEG.get(name, 0.0) for name in channel])
    turn = np.degrees(np.arctan2(axis[:, 1], axis[:, 0])) - nominal
    # Roll: the image's x axis must be level; its slope is the roll of the camera about its optical axis.
    right = sensor2ego[:, :3, 0]
    roll = np.degrees(np.arctan2(np.abs(right[:, 2]), -down[:, 2]))
    return {
        "heading_error_deg": _masked(np.abs((turn + 180) % 360 - 180), camera),
        "elevation_deg": _masked(np.abs(np.degrees(np.arcsin(np.clip(axis[:, 2], -1, 1)))), camera),
        "roll_deg": _masked(roll, camera),
    }


def _rig(channel: NDArray[np.str_], intrinsics: FloatArray, sensor2ego: FloatArray, camera: NDArray[np.bool_]) -> dict[str, pa.Array]:
    """Deviation from the usual calibration of the channel: median position and focal length, mean rotation projected onto a rotation (SVD)."""
    rotation_deg, position_m, focal = (np.full(len(channel), np.nan) for _ in range(3))
    for name in np.unique(channel):
        rows = np.flatnonzero((channel == name) & np.isfinite(sensor2ego).all(axis=(1, 2)))
        if len(rows) < 2:
            continue
        # The record that is closest to all others is the usual one: unlike a mean, a few tampered ones do not move it.
        angles = angles_deg(sensor2ego[rows, :3, :3])
        usual = rows[np.argmin(np.median(angles, axis=1))]
        rotation_deg[rows] = angles[list(rows).index(usual)]
        position_m[rows] = np.linalg.norm(sensor2ego[rows, :3, 3] - np.median(sensor2ego[rows, :3, 3], axis=0), axis=1)
        focal[rows] = np.abs(intrinsics[rows, 0, 0] / np.median(intrinsics[rows, 0, 0]) - 1)
    every = np.ones(len(channel), dtype=bool)
    return {
        "rig_rotation_deg": _masked(rotation_deg, every),
        "rig_position_m": _masked(position_m, every),
        "rig_focal_ratio": _masked(focal, camera),
    }


def angles_deg(rotations: FloatArray) -> FloatArray:
    """Angles (N,N) between rotations (N,3,3), degrees; trace(A^T B) = 1 + 2 cos(angle)."""
    traces = np.einsum("aij,bij->ab", rotations, rotations)
    return np.degrees(np.arccos(np.clip((traces - 1) / 2, -1, 1)))


def measure_coverage(context: Context) -> pa.Table:
    """One row a sample: view_gap_deg, the widest horizontal direction (degrees) that none of its cameras sees; identical camera poses.

    Six surround cameras overlap; a camera that is turned, swapped or given another's intrinsics opens a hole.
    """
    frames = context.index.frames
    sample, count = frame_sample(context), context.index.samples.num_rows
    rows = np.flatnonzero(pc.is_in(frames["channel"], value_set=pa.array(CAMERAS)).to_numpy())
    sensor2ego, intrinsics = matrices(frames["sensor2ego"], 4)[rows], matrices(frames["intrinsics"], 3)[rows]
    width = frames["width"].to_numpy()[rows]
    heading = np.degrees(np.arctan2(sensor2ego[:, 1, 2], sensor2ego[:, 0, 2]))
    with np.errstate(invalid="ignore", divide="ignore"):
        left = np.degrees(np.arctan(intrinsics[:, 0, 2] / intrinsics[:, 0, 0]))
        right = np.degrees(np.arctan((width - intrinsics[:, 0, 2]) / intrinsics[:, 0, 0]))
    valid = np.isfinite(heading) & np.isfinite(left) & np.isfinite(right)
    seen = np.zeros((count, 360), dtype=bool)
    for owner, center, to_left, to_right in zip(sample[rows][valid], heading[valid], left[valid], right[valid], strict=True):
        seen[owner, np.arange(int(np.ceil(center - to_right)), int(np.floor(center + to_left)) + 1) % 360] = True
    complete = np.bincount(sample[rows], minlength=count) == len(CAMERAS)
    gaps, group = np.unique(seen, axis=0, return_inverse=True)
    widest = np.array([_widest_gap(row) for row in gaps])[group.reshape(-1)]
    return pa.table({"token": context.index.samples["token"], "view_gap_deg": _masked(widest, complete)})


def _widest_gap(seen: NDArray[np.bool_]) -> float:
    """Longest circular run of False."""
    if not seen.any():
        return float(len(seen))
    directions = np.flatnonzero(seen)
    return float(np.max(np.diff(np.append(directions, directions[0] + len(seen)))) - 1)
