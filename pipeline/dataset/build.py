"""Join the nuScenes tables into the columnar index: samples, sensor frames, sweeps, boxes and instances, all with whole-column operations.

Semantics are those of nuscenes-devkit (key frames of a sample, annotation velocity, category to detection class, boxes moved into the ego
frame); the tests compare every record with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray, invert, pose, quaternion_to_matrix
from pipeline.dataset.tables import Tables, positions, reference, vectors
from pipeline.errors import file_error
from pipeline.taxonomy import DETECTION_CLASSES, LIDAR

# Category to class of the nuScenes detection challenge, as in the devkit's category_to_detection_name; other categories have no class.
CATEGORY_TO_CLASS: dict[str, str] = {
    "movable_object.barrier": "barrier",
    "vehicle.bicycle": "bicycle",
    "vehicle.bus.bendy": "bus",
    "vehicle.bus.rigid": "bus",
    "vehicle.car": "car",
    "vehicle.construction": "construction_vehicle",
    "vehicle.motorcycle": "motorcycle",
    "human.pedestrian.adult": "pedestrian",
    "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian",
    "human.pedestrian.police_officer": "pedestrian",
    "movable_object.trafficcone": "traffic_cone",
    "vehicle.trailer": "trailer",
    "vehicle.truck": "truck",
}
# The devkit's box_velocity: no estimate across a larger gap; doubled for centred differences.
MAX_VELOCITY_GAP_S = 1.5

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class IndexTables:
    """The index in memory; docs/architecture.md lists the columns.

    `sweeps` holds the frames between key frames in compact form: quaternion and position of the ego pose, and a token of `calibrations`.
    """

    samples: pa.Table
    frames: pa.Table
    sweeps: pa.Table
    calibrations: pa.Table
    boxes: pa.Table
    instances: pa.Table


@dataclass(frozen=True)
class _Order:
    """Samples scene by scene in time order: `rows[i]` is the table row of the i-th sample, `rank` the inverse."""

    rows: IntArray
    rank: IntArray
    scene: IntArray  # scene table row, in order
    index_in_scene: IntArray  # in order
    timestamp_us: IntArray  # in order


def build_index(tables: Tables, splits: Mapping[str, Sequence[str]]) -> IndexTables:
    """Build the index.

    Args:
        tables: raw tables.
        splits: scene names by split; scenes in none get the split "".

    Raises:
        DataError: a reference between tables is broken, a list has the wrong length or a file name leaves the data set.
    """
    order = _order_samples(tables)
    key_frames, sweep_rows, frame_sample = _split_frames(tables, order)
    pose_row = reference(tables, "sample_data", "ego_pose_token", "ego_pose")
    frames = _frames(tables, key_frames, pose_row[key_frames])
    ego2global = _sample_poses(frames, frame_sample, order)
    boxes, box_sample = _boxes(tables, order, ego2global)
    samples = _samples(tables, order, splits, ego2global, frame_sample, box_sample)
    sweeps = _sweeps(tables, sweep_rows, pose_row[sweep_rows])
    return IndexTables(samples, frames, sweeps, _calibrations(tables), boxes, _instances(tables, order, box_sample, boxes))


def with_verdicts(index: IndexTables, drop_reasons: Mapping[str, str], bad_frames: Mapping[str, str]) -> IndexTables:
    """The index with the verdicts of validation.

    Args:
        index: freshly built index.
        drop_reasons: reason by token of each sample that must not be used.
        bad_frames: problem by token of each key frame whose file cannot be used.
    """
    reasons = [drop_reasons.get(token, "") for token in index.samples["token"].to_pylist()]
    samples = _set(index.samples, "keep", pa.array([not reason for reason in reasons], pa.bool_()))
    samples = _set(samples, "drop_reason", pa.array(reasons, pa.string()))
    problems = [bad_frames.get(token, "") for token in index.frames["token"].to_pylist()]
    return replace(index, samples=samples, frames=_set(index.frames, "problem", pa.array(problems, pa.string())))


def _set(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def timestamps_us(column: pa.ChunkedArray) -> IntArray:
    """Time stamps as integer micro-seconds; fractional ones (Lyft Level 5) are rounded."""
    return np.rint(column.to_numpy()).astype(np.int64)


def _fixed(values: NDArray[Any]) -> pa.Array:
    """(N,...) floats as an Arrow column of fixed-size lists."""
    flat = np.ascontiguousarray(values, dtype=np.float64).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), int(np.prod(values.shape[1:])))


def _take(column: pa.ChunkedArray, rows: IntArray) -> pa.Array:
    return column.combine_chunks().take(pa.array(rows))


def _take_or_empty(column: pa.ChunkedArray, rows: IntArray) -> pa.Array:
    """Like take; row -1 gives ""."""
    return pc.fill_null(column.combine_chunks().take(pa.array(rows, mask=rows < 0)), "")


def _order_samples(tables: Tables) -> _Order:
    scene = reference(tables, "sample", "scene_token", "scene")
    stamps = timestamps_us(tables.sample["timestamp"])
    rows = np.lexsort((np.arange(len(stamps)), stamps, scene))
    rank = np.empty_like(rows)
    rank[rows] = np.arange(len(rows))
    ordered = scene[rows]
    first = np.searchsorted(ordered, ordered, side="left")
    return _Order(rows, rank, ordered, np.arange(len(rows)) - first, stamps[rows])


def _split_frames(tables: Tables, order: _Order) -> tuple[IntArray, IntArray, IntArray]:
    """Rows of sample_data that are key frames, by sample and channel; the other rows by channel and time; the sample of each key frame."""
    data = tables.sample_data
    sample = order.rank[reference(tables, "sample_data", "sample_token", "sample")]
    stamps = timestamps_us(data["timestamp"])
    sensor = reference(tables, "calibrated_sensor", "sensor_token", "sensor")[
        reference(tables, "sample_data", "calibrated_sensor_token", "calibrated_sensor")
    ]
    channel = _alphabetic_rank(tables.sensor["channel"])[sensor]
    is_key = data["is_key_frame"].to_numpy()
    key, rest = np.flatnonzero(is_key), np.flatnonzero(~is_key)
    key = key[np.lexsort((key, channel[key], sample[key]))]
    rest = rest[np.lexsort((rest, stamps[rest], channel[rest], order.scene[sample[rest]]))]
    return key, rest, sample[key]


def _alphabetic_rank(names: pa.ChunkedArray) -> IntArray:
    return np.unique(np.array(names.to_pylist(), dtype=str), return_inverse=True)[1].reshape(-1).astype(np.int64)


def _frames(tables: Tables, rows: IntArray, pose_row: IntArray) -> pa.Table:
    """Key frames with matrices, in the order of `rows` of sample_data; `pose_row` is the ego_pose row of each."""
    columns = ["token", "sample_token", "calibrated_sensor_token", "timestamp", "filename", "width", "height"]
    data = tables.sample_data.select(columns).take(pa.array(rows))
    _check_file_names(tables, data)
    calibration_row = positions(data["calibrated_sensor_token"], tables.calibrated_sensor)
    sensor_row = reference(tables, "calibrated_sensor", "sensor_token", "sensor")[calibration_row]
    intrinsics, sensor2ego = calibration_matrices(tables)
    return pa.table(
        {
            "token": data["token"],
            "sample_token": data["sample_token"].cast(pa.string()),
            "channel": _take(tables.sensor["channel"], sensor_row),
            "modality": _take(tables.sensor["modality"], sensor_row),
            "timestamp_us": timestamps_us(data["timestamp"]),
            "filename": data["filename"],
            "width": pc.fill_null(data["width"], 0),
            "height": pc.fill_null(data["height"], 0),
            "intrinsics": _fixed(intrinsics[calibration_row]),
            "sensor2ego": _fixed(sensor2ego[calibration_row]),
            "ego2global": _fixed(_ego_poses(tables, pose_row)),
            "ego_timestamp_us": timestamps_us(tables.ego_pose["timestamp"])[pose_row],
            "problem": pa.array([""] * len(rows), pa.string()),
        }
    )


def calibration_matrices(tables: Tables) -> tuple[FloatArray, FloatArray]:
    """Camera matrices (C,3,3), NaN where the sensor has none, and sensor2ego (C,4,4) of the calibrated_sensor table."""
    path = tables.folder / "calibrated_sensor.json"
    table = tables.calibrated_sensor
    intrinsics = np.full((table.num_rows, 3, 3), np.nan)
    for row, value in enumerate(table["camera_intrinsic"].to_pylist()):
        if not value:
            continue
        if len(value) != 3 or any(line is None or len(line) != 3 or None in line for line in value):
            raise file_error(path, f"camera_intrinsic of record {table['token'][row].as_py()!r} is {value}: it must be 3 x 3 numbers or []")
        intrinsics[row] = value
    sensor2ego = pose(vectors(path, table, "rotation", 4), vectors(path, table, "translation", 3))
    return intrinsics, sensor2ego


def _ego_poses(tables: Tables, rows: IntArray) -> FloatArray:
    path = tables.folder / "ego_pose.json"
    return pose(vectors(path, tables.ego_pose, "rotation", 4)[rows], vectors(path, tables.ego_pose, "translation", 3)[rows])


def _check_file_names(tables: Tables, data: pa.Table) -> None:
    """File names must stay inside the dataroot."""
    leaves = pc.match_substring_regex(data["filename"], r"^([/\\]|[A-Za-z]:)|(^|[/\\])\.\.([/\\]|$)").to_numpy()
    if leaves.any():
        row = int(np.argmax(leaves))
        token, name = data["token"][row].as_py(), data["filename"][row].as_py()
        raise file_error(tables.folder / "sample_data.json", f"filename {name!r} of record {token!r} leaves the data set")


def _sweeps(tables: Tables, rows: IntArray, pose_row: IntArray) -> pa.Table:
    """Frames between key frames; their order is by scene, channel and time."""
    columns = ["token", "sample_token", "calibrated_sensor_token", "timestamp", "filename"]
    data = tables.sample_data.select(columns).take(pa.array(rows))
    _check_file_names(tables, data)
    calibration_row = positions(data["calibrated_sensor_token"], tables.calibrated_sensor)
    sensor_row = reference(tables, "calibrated_sensor", "sensor_token", "sensor")[calibration_row]
    path = tables.folder / "ego_pose.json"
    return pa.table(
        {
            "token": data["token"],
            "sample_token": data["sample_token"],
            "channel": _take(tables.sensor["channel"], sensor_row).dictionary_encode(),
            "timestamp_us": timestamps_us(data["timestamp"]),
            "filename": data["filename"],
            "calibrated_sensor_token": data["calibrated_sensor_token"],
            "ego_quaternion": _fixed(vectors(path, tables.ego_pose, "rotation", 4)[pose_row]),
            "ego_position_m": _fixed(vectors(path, tables.ego_pose, "translation", 3)[pose_row]),
        }
    )


def _calibrations(tables: Tables) -> pa.Table:
    intrinsics, sensor2ego = calibration_matrices(tables)
    channel = _take(tables.sensor["channel"], reference(tables, "calibrated_sensor", "sensor_token", "sensor"))
    token = tables.calibrated_sensor["token"]
    return pa.table({"token": token, "channel": channel, "intrinsics": _fixed(intrinsics), "sensor2ego": _fixed(sensor2ego)})


def _sample_poses(frames: pa.Table, frame_sample: IntArray, order: _Order) -> FloatArray:
    """ego2global (S,4,4) of each sample: the pose of its LIDAR_TOP key frame, else of the key frame nearest in time; NaN without frames."""
    poses = np.full((len(order.rows), 4, 4), np.nan)
    if not len(frame_sample):
        return poses
    distance_us = np.abs(frames["timestamp_us"].to_numpy() - order.timestamp_us[frame_sample])
    is_lidar = pc.equal(frames["channel"], LIDAR).to_numpy()
    best_first = np.lexsort((np.where(is_lidar, -1, distance_us), frame_sample))
    owners, starts = np.unique(frame_sample[best_first], return_index=True)
    poses[owners] = matrices(frames["ego2global"], 4)[best_first[starts]]
    return poses


def matrices(column: pa.ChunkedArray, side: int) -> FloatArray:
    """A column of fixed-size lists as matrices (N,side,side)."""
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, side, side)


def _samples(
    tables: Tables, order: _Order, splits: Mapping[str, Sequence[str]], ego2global: FloatArray, frame_sample: IntArray, box_sample: IntArray
) -> pa.Table:
    split_of = {name: split for split, names in splits.items() for name in names}
    location_of = _take(tables.log["location"], reference(tables, "scene", "log_token", "log"))
    names = tables.scene["name"].to_pylist()
    scene_split = pa.array([split_of.get(name, "") for name in names], pa.string())
    sample = tables.sample.take(pa.array(order.rows))
    count = len(order.rows)
    return pa.table(
        {
            "token": sample["token"],
            "scene_token": sample["scene_token"],
            "scene_name": _take(tables.scene["name"], order.scene),
            "index_in_scene": order.index_in_scene,
            "timestamp_us": order.timestamp_us,
            "prev": sample["prev"],
            "next": sample["next"],
            "split": scene_split.take(pa.array(order.scene)),
            "location": location_of.take(pa.array(order.scene)),
            "ego2global": _fixed(ego2global),
            "keep": pa.array(np.ones(count, dtype=bool)),
            "drop_reason": pa.array([""] * count, pa.string()),
            "first_frame": np.searchsorted(frame_sample, np.arange(count)),
            "frames": np.bincount(frame_sample, minlength=count),
            "first_box": np.searchsorted(box_sample, np.arange(count)),
            "boxes": np.bincount(box_sample, minlength=count),
        }
    )


def _boxes(tables: Tables, order: _Order, ego2global: FloatArray) -> tuple[pa.Table, IntArray]:
    """Annotations in the global and the BEV frame, sorted by sample (in file order within one), and the sample of each."""
    path = tables.folder / "sample_annotation.json"
    annotation = tables.sample_annotation
    sample = order.rank[reference(tables, "sample_annotation", "sample_token", "sample")]
    velocity = annotation_velocity(tables)
    rows = np.argsort(sample, kind="stable")
    center = vectors(path, annotation, "translation", 3)[rows]
    size = vectors(path, annotation, "size", 3)[rows]
    quaternion = vectors(path, annotation, "rotation", 4)[rows]
    instance = reference(tables, "sample_annotation", "instance_token", "instance")
    category = reference(tables, "instance", "category_token", "category")[instance]
    global2ego = invert(ego2global)[sample[rows]]
    table = pa.table(
        {
            "token": _take(annotation["token"], rows),
            "sample_token": _take(annotation["sample_token"], rows).cast(pa.string()),
            "instance_token": _take(annotation["instance_token"], rows).cast(pa.string()),
            "category": _take(tables.category["name"], category[rows]),
            "class_id": category_class_ids(tables)[category[rows]],
            "global_center": _fixed(center),
            "size_wlh": _fixed(size),
            "global_quaternion": _fixed(quaternion),
            "global_velocity": _fixed(velocity[rows]),
            **_ego_columns(global2ego, center, quaternion, velocity[rows]),
            "num_lidar_pts": _take(annotation["num_lidar_pts"], rows),
            "num_radar_pts": _take(annotation["num_radar_pts"], rows),
            "visibility": _visibility(annotation)[rows],
            "attribute": _attributes(tables).take(pa.array(rows)),
        }
    )
    return table, sample[rows]


def _ego_columns(global2ego: FloatArray, center: FloatArray, quaternion: FloatArray, velocity: FloatArray) -> dict[str, FloatArray]:
    """x, y, z, yaw, vx, vy in the BEV frame; yaw is the heading of the box's x axis seen from above, as in the devkit's quaternion_yaw."""
    rotation = global2ego[:, :3, :3]
    moved = np.einsum("nij,nj->ni", rotation, center) + global2ego[:, :3, 3]
    heading = np.einsum("nij,nj->ni", rotation, quaternion_to_matrix(quaternion)[:, :, 0])
    moving = np.einsum("nij,nj->ni", rotation, velocity)
    return {
        "x": moved[:, 0],
        "y": moved[:, 1],
        "z": moved[:, 2],
        "yaw": np.arctan2(heading[:, 1], heading[:, 0]),
        "vx": moving[:, 0],
        "vy": moving[:, 1],
    }


def annotation_velocity(tables: Tables) -> FloatArray:
    """Global velocity (A,3) in m/s of each annotation, as the devkit's box_velocity.

    Centred difference of the neighbours in the instance's chain, one-sided at its ends, NaN for a single annotation or a gap over 1.5 s
    (3 s centred). A neighbour token that does not exist gives NaN too; validation reports it.
    """
    annotation = tables.sample_annotation
    here = np.arange(annotation.num_rows)
    has_prev, has_next = (pc.not_equal(annotation[side], "").to_numpy() for side in ("prev", "next"))
    prev, following = positions(annotation["prev"], annotation), positions(annotation["next"], annotation)
    broken = (has_prev & (prev < 0)) | (has_next & (following < 0))
    first = np.where(has_prev & ~broken, prev, here)
    last = np.where(has_next & ~broken, following, here)
    center = vectors(tables.folder / "sample_annotation.json", annotation, "translation", 3)
    # Same order of operations as the devkit, so that the results are equal to the last bit.
    seconds = 1e-6 * timestamps_us(tables.sample["timestamp"])[reference(tables, "sample_annotation", "sample_token", "sample")]
    gap_s = seconds[last] - seconds[first]
    limit_s = np.where(has_prev & has_next, 2 * MAX_VELOCITY_GAP_S, MAX_VELOCITY_GAP_S)
    with np.errstate(divide="ignore", invalid="ignore"):
        velocity = (center[last] - center[first]) / gap_s[:, None]
    velocity[(first == last) | (gap_s > limit_s) | (gap_s == 0)] = np.nan
    return velocity


def category_class_ids(tables: Tables) -> IntArray:
    """Index into DETECTION_CLASSES of each row of the category table, -1 for none."""
    classes = [CATEGORY_TO_CLASS.get(name) for name in tables.category["name"].to_pylist()]
    return np.array([-1 if name is None else DETECTION_CLASSES.index(name) for name in classes], dtype=np.int64)


def _visibility(annotation: pa.Table) -> IntArray:
    """Visibility bin 1..4, 0 where unknown; nuScenes tokens are the digits themselves."""
    tokens = annotation["visibility_token"].combine_chunks()
    known = pc.index_in(tokens.dictionary, value_set=pa.array(["", "1", "2", "3", "4"]))
    return np.asarray(pc.fill_null(known, 0), dtype=np.int64)[tokens.indices.to_numpy()]


def _attributes(tables: Tables) -> pa.Array:
    """Name of the first attribute of each annotation, "" without one."""
    tokens = tables.sample_annotation["attribute_tokens"].combine_chunks()
    counts = pc.list_value_length(tokens).to_numpy(zero_copy_only=False)
    rows = positions(tokens.flatten(), tables.attribute)
    starts = np.cumsum(counts) - counts
    first = np.full(len(counts), -1, dtype=np.int64)
    first[counts > 0] = rows[starts[counts > 0]]
    return _take_or_empty(tables.attribute["name"], first)


def _instances(tables: Tables, order: _Order, box_sample: IntArray, boxes: pa.Table) -> pa.Table:
    """One row an instance: category, number of annotations, first and last sample in time ("" without annotations), seconds between."""
    instance = tables.instance
    owner = positions(boxes["instance_token"], instance)
    stamps = order.timestamp_us[box_sample]
    count = np.bincount(owner, minlength=instance.num_rows)
    by_time = np.lexsort((stamps, owner))
    ends = np.cumsum(count) - 1
    starts = ends - count + 1
    seen = count > 0
    first, last = np.full(len(count), -1), np.full(len(count), -1)
    first[seen], last[seen] = box_sample[by_time[starts[seen]]], box_sample[by_time[ends[seen]]]
    tokens = tables.sample["token"].combine_chunks().take(pa.array(order.rows))
    return pa.table(
        {
            "token": instance["token"],
            "category": _take(tables.category["name"], reference(tables, "instance", "category_token", "category")),
            "annotations": count,
            "first_sample": _take_or_empty(pa.chunked_array([tokens]), first),
            "last_sample": _take_or_empty(pa.chunked_array([tokens]), last),
            "duration_s": np.where(seen, 1e-6 * (order.timestamp_us[last] - order.timestamp_us[first]), 0.0),
        }
    )
