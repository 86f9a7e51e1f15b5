"""Detection ground truth in the devkit's types, from the index alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from nuscenes.eval.common.data_classes import EvalBoxes
from nuscenes.eval.detection.data_classes import DetectionBox
from nuscenes.utils.data_classes import Box
from pyquaternion import Quaternion

from pipeline.dataset.geometry import FloatArray
from pipeline.dataset.index import Index
from pipeline.taxonomy import DETECTION_CLASSES

BICYCLE_RACK = "static_object.bicycle_rack"
_COLUMNS = [
    "sample_token", "category", "class_id", "global_center", "size_wlh", "global_quaternion", "global_velocity",
    "num_lidar_pts", "num_radar_pts", "attribute",
]  # fmt: skip


@dataclass(frozen=True)
class DetectionTruth:
    """Annotated boxes of the detection classes and the bicycle racks, global frame; every evaluated sample is a key of `boxes`."""

    boxes: EvalBoxes
    bike_racks: dict[str, list[Box]]


def detection_truth(index: Index, tokens: Sequence[str]) -> DetectionTruth:
    """Ground truth of some samples, exactly as the devkit loads it (load_gt and add_center_dist)."""
    origins = ego_origins_m(index, tokens)
    table = index.table("boxes", _COLUMNS)
    table = table.filter(pc.is_in(table["sample_token"], value_set=pa.array(list(tokens), pa.string())))
    truth = DetectionTruth(EvalBoxes(), {})
    for token in tokens:
        truth.boxes.add_boxes(token, [])
    for row in table.to_pylist():
        token = row["sample_token"]
        if row["category"] == BICYCLE_RACK:
            rack = Box(row["global_center"], row["size_wlh"], Quaternion(row["global_quaternion"]))
            truth.bike_racks.setdefault(token, []).append(rack)
        elif row["class_id"] >= 0:
            truth.boxes.add_boxes(token, [_devkit_box(row, origins[token])])
    return truth


def ego_origins_m(index: Index, tokens: Sequence[str]) -> dict[str, FloatArray]:
    """Global position (3,) of the BEV frame's origin by sample."""
    table = index.samples.select(["token", "ego2global"])
    table = table.filter(pc.is_in(table["token"], value_set=pa.array(list(tokens), pa.string())))
    poses = np.array(table["ego2global"].to_pylist(), dtype=np.float64).reshape(-1, 4, 4)
    return dict(zip(table["token"].to_pylist(), poses[:, :3, 3], strict=True))


def _devkit_box(row: dict[str, Any], ego_origin_m: FloatArray) -> DetectionBox:
    points = [count for count in (row["num_lidar_pts"], row["num_radar_pts"]) if count >= 0]
    return DetectionBox(
        sample_token=row["sample_token"],
        translation=tuple(row["global_center"]),
        size=tuple(row["size_wlh"]),
        rotation=tuple(row["global_quaternion"]),
        velocity=tuple(row["global_velocity"][:2]),
        ego_translation=tuple((np.array(row["global_center"]) - ego_origin_m).tolist()),
        num_pts=sum(points) if points else -1,  # -1: unknown, not filtered
        detection_name=DETECTION_CLASSES[row["class_id"]],
        detection_score=-1.0,
        attribute_name=row["attribute"],
    )
