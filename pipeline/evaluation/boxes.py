"""Boxes of many samples in the global frame as one struct of arrays: the form in which detection is judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from pipeline.dataset.geometry import FloatArray, transform
from pipeline.errors import ModelError, file_error
from pipeline.io import read_json
from pipeline.models.prediction import BoxPrediction
from pipeline.taxonomy import DETECTION_CLASSES

# The benchmark's limit of boxes a sample.
MAX_BOXES_PER_SAMPLE = 500
MOVING_SPEED_MPS = 0.2
# Attribute by class: (moving, standing). No head predicts attributes; class and speed decide, with the more frequent state of the training
# set for the slow ones (as usual among nuScenes baselines). Cones and barriers have none.
ATTRIBUTES: dict[str, tuple[str, str]] = {
    "car": ("vehicle.moving", "vehicle.parked"),
    "truck": ("vehicle.moving", "vehicle.parked"),
    "bus": ("vehicle.moving", "vehicle.stopped"),
    "trailer": ("vehicle.moving", "vehicle.parked"),
    "construction_vehicle": ("vehicle.moving", "vehicle.parked"),
    "pedestrian": ("pedestrian.moving", "pedestrian.standing"),
    "motorcycle": ("cycle.with_rider", "cycle.without_rider"),
    "bicycle": ("cycle.with_rider", "cycle.without_rider"),
}


@dataclass(frozen=True)
class BoxTable:
    """N boxes in the global frame, sample by sample."""

    sample: NDArray[np.int64]  # (N,) position in the list of evaluated samples
    class_id: NDArray[np.int64]  # (N,) index into DETECTION_CLASSES
    center_m: FloatArray  # (N,3)
    size_wlh_m: FloatArray  # (N,3)
    quaternion_wxyz: FloatArray  # (N,4)
    velocity_mps: FloatArray  # (N,2) NaN where unknown
    attribute: NDArray[np.str_]  # (N,) "" for none
    score: FloatArray  # (N,) -1 for ground truth
    ego_distance_m: FloatArray  # (N,) from the ego in the ground plane
    num_points: NDArray[np.int64]  # (N,) lidar and radar points inside, -1 where unknown or predicted

    def __len__(self) -> int:
        return len(self.sample)

    def select(self, rows: NDArray[Any]) -> BoxTable:
        """Some of the boxes, by mask or position."""
        return BoxTable(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def yaw_rad(self) -> FloatArray:
        """Heading (N,) of the boxes' x axes, seen from above."""
        w, x, y, z = self.quaternion_wxyz.T
        return np.arctan2(2 * (x * y + w * z), w * w + x * x - y * y - z * z)

    @classmethod
    def concatenate(cls, tables: Sequence[BoxTable]) -> BoxTable:
        """All boxes of at least one table, in order."""
        return cls(**{field.name: np.concatenate([getattr(table, field.name) for table in tables]) for field in fields(cls)})


def predict_attribute(class_name: str, speed_mps: float) -> str:
    """Attribute of a predicted box by the rule of `ATTRIBUTES`; "" for classes without attributes."""
    if class_name not in ATTRIBUTES:
        return ""
    moving, standing = ATTRIBUTES[class_name]
    return moving if speed_mps > MOVING_SPEED_MPS else standing


def to_global(boxes: BoxPrediction, ego2global: FloatArray, sample: int, token: str) -> BoxTable:
    """Predictions of one sample in the global frame, best score first, at most `MAX_BOXES_PER_SAMPLE`.

    Args:
        boxes: boxes in the BEV frame.
        ego2global: (4,4) BEV frame to global.
        sample: position of the sample in the list of evaluated samples.
        token: its token, for messages.

    Raises:
        ModelError: a box has a value that is not finite or a size that is not positive.
    """
    _require_valid(boxes, token)
    order = np.argsort(-boxes.score, kind="stable")[:MAX_BOXES_PER_SAMPLE]
    n = len(order)
    rotation = np.asarray(ego2global[:3, :3], dtype=np.float64)
    center_m = boxes.center_m[order].astype(np.float64)
    about_z = np.zeros((n, 3))
    about_z[:, 2] = boxes.yaw_rad[order]
    headings = Rotation.from_matrix(rotation) * Rotation.from_rotvec(about_z)
    velocity = boxes.velocity_mps[order].astype(np.float64) @ rotation[:2, :2].T
    class_id = boxes.class_id[order].astype(np.int64)
    speeds = np.linalg.norm(velocity, axis=1)
    attributes = [predict_attribute(DETECTION_CLASSES[i], speed) for i, speed in zip(class_id, speeds, strict=True)]
    moved = transform(ego2global, center_m)
    return BoxTable(
        sample=np.full(n, sample, dtype=np.int64),
        class_id=class_id,
        center_m=moved,
        size_wlh_m=boxes.size_wlh_m[order].astype(np.float64),
        quaternion_wxyz=headings.as_quat()[:, [3, 0, 1, 2]],
        velocity_mps=velocity,
        attribute=np.array(attributes, dtype="U32"),
        score=boxes.score[order].astype(np.float64),
        ego_distance_m=np.linalg.norm(moved[:, :2] - ego2global[:2, 3], axis=1),
        num_points=np.full(n, -1, dtype=np.int64),
    )


def _require_valid(boxes: BoxPrediction, token: str) -> None:
    for field in ("center_m", "size_wlh_m", "yaw_rad", "velocity_mps", "score"):
        values = getattr(boxes, field)
        if not np.isfinite(values).all():
            raise ModelError(f"sample {token}: predicted boxes.{field} holds a value that is not finite")
    if (boxes.size_wlh_m <= 0).any():
        raise ModelError(f"sample {token}: predicted boxes.size_wlh_m = {boxes.size_wlh_m.min()}: sizes must be positive")


def submission(predictions: BoxTable, tokens: Sequence[str]) -> dict[str, Any]:
    """Content of a nuScenes results file (camera only), which the devkit's DetectionEval loads; every sample is a key."""
    results: dict[str, list[dict[str, Any]]] = {token: [] for token in tokens}
    for row, sample in enumerate(predictions.sample):
        token = tokens[sample]
        results[token].append(
            {
                "sample_token": token,
                "translation": predictions.center_m[row].tolist(),
                "size": predictions.size_wlh_m[row].tolist(),
                "rotation": predictions.quaternion_wxyz[row].tolist(),
                "velocity": predictions.velocity_mps[row].tolist(),
                "detection_name": DETECTION_CLASSES[predictions.class_id[row]],
                "detection_score": float(predictions.score[row]),
                "attribute_name": str(predictions.attribute[row]),
            }
        )
    meta = {"use_camera": True, "use_lidar": False, "use_radar": False, "use_map": False, "use_external": False}
    return {"meta": meta, "results": results}


def read_submission(path: Path, tokens: Sequence[str], ego_origins_m: FloatArray) -> BoxTable:
    """Boxes of a nuScenes results file.

    Args:
        path: the file; it must hold every sample of `tokens`.
        tokens: the evaluated samples.
        ego_origins_m: (len(tokens),3) global position of the ego at each.

    Raises:
        DataError: the file is damaged, lacks a sample or a field, or names an unknown class.
    """
    content = read_json(path)
    try:
        rows = [(sample, row) for sample, token in enumerate(tokens) for row in content["results"][token]]
        sample = np.array([sample for sample, _ in rows], dtype=np.int64)
        center_m = _vectors(rows, "translation", 3)
        return BoxTable(
            sample=sample,
            class_id=np.array([DETECTION_CLASSES.index(row["detection_name"]) for _, row in rows], dtype=np.int64),
            center_m=center_m,
            size_wlh_m=_vectors(rows, "size", 3),
            quaternion_wxyz=_vectors(rows, "rotation", 4),
            velocity_mps=_vectors(rows, "velocity", 2),
            attribute=np.array([row["attribute_name"] for _, row in rows], dtype="U32"),
            score=np.array([row["detection_score"] for _, row in rows], dtype=np.float64),
            ego_distance_m=np.linalg.norm(center_m[:, :2] - ego_origins_m[sample, :2], axis=1),
            num_points=np.full(len(rows), -1, dtype=np.int64),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise file_error(path, f"not a nuScenes results file of these samples ({type(error).__name__}: {error})") from error


def _vectors(rows: Sequence[tuple[int, dict[str, Any]]], name: str, length: int) -> FloatArray:
    return np.array([row[name] for _, row in rows], dtype=np.float64).reshape(len(rows), length)
