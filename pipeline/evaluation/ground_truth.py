"""Detection ground truth from the index alone, with what the devkit's load_gt and add_center_dist would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from nuscenes.utils.data_classes import Box
from pyquaternion import Quaternion

from pipeline.dataset.build import matrices
from pipeline.dataset.geometry import FloatArray
from pipeline.dataset.index import Index
from pipeline.evaluation.boxes import BoxTable

BICYCLE_RACK = "static_object.bicycle_rack"
_COLUMNS = [
    "sample_token", "category", "class_id", "global_center", "size_wlh", "global_quaternion", "global_velocity", "num_lidar_pts", "num_radar_pts",
    "attribute",
]  # fmt: skip


@dataclass(frozen=True)
class DetectionTruth:
    """Annotated boxes of the detection classes, and the bicycle racks by position of the sample, global frame."""

    boxes: BoxTable
    bike_racks: dict[int, list[Box]]


def detection_truth(index: Index, tokens: Sequence[str]) -> DetectionTruth:
    """Ground truth of some samples; `BoxTable.sample` counts in the order of `tokens`."""
    wanted = pa.array(list(tokens), pa.string())
    table = index.table("boxes", _COLUMNS)
    table = table.filter(pc.is_in(table["sample_token"], value_set=wanted))
    sample = pc.index_in(table["sample_token"], value_set=wanted).to_numpy().astype(np.int64)
    racks: dict[int, list[Box]] = {}
    is_rack = pc.equal(table["category"], BICYCLE_RACK)
    for position, row in zip(sample[is_rack.to_numpy()], table.filter(is_rack).to_pylist(), strict=True):
        racks.setdefault(int(position), []).append(Box(row["global_center"], row["size_wlh"], Quaternion(row["global_quaternion"])))
    center_m = _columns(table, "global_center", 3)
    boxes = BoxTable(
        sample=sample,
        class_id=table["class_id"].to_numpy().astype(np.int64),
        center_m=center_m,
        size_wlh_m=_columns(table, "size_wlh", 3),
        quaternion_wxyz=_columns(table, "global_quaternion", 4),
        velocity_mps=_columns(table, "global_velocity", 3)[:, :2],
        attribute=np.array(table["attribute"].to_pylist(), dtype="U32"),
        score=np.full(len(sample), -1.0),
        ego_distance_m=np.linalg.norm(center_m[:, :2] - ego_origins_m(index, tokens)[sample, :2], axis=1),
        num_points=_points(table),
    )
    return DetectionTruth(boxes.select(boxes.class_id >= 0), racks)


def ego_origins_m(index: Index, tokens: Sequence[str]) -> FloatArray:
    """Global positions (len(tokens),3) of the BEV frames' origins."""
    rows = pc.index_in(pa.array(list(tokens), pa.string()), value_set=index.samples["token"].combine_chunks())
    return matrices(index.samples["ego2global"].take(rows), 4)[:, :3, 3]


def _columns(table: pa.Table, name: str, length: int) -> FloatArray:
    return np.array(table[name].to_pylist(), dtype=np.float64).reshape(-1, length)


def _points(table: pa.Table) -> np.ndarray:
    """Lidar and radar points inside each box (N,), of the sensors that are known; -1 where neither is."""
    counts = np.stack([table[name].to_numpy() for name in ("num_lidar_pts", "num_radar_pts")], axis=1).astype(np.int64)
    known = counts >= 0
    return np.where(known.any(axis=1), np.where(known, counts, 0).sum(axis=1), -1)
