"""Detection metrics of the nuScenes benchmark, computed by nuscenes-devkit's own functions under its official configuration.

Definition (configuration detection_cvpr_2019). Predictions of a class are matched to ground truth in order of falling score: each takes
the nearest free ground-truth box of its sample and class when the centres are closer than a threshold in the ground plane (0.5, 1, 2
and 4 m). AP is the area under the precision-recall curve above 10 % recall and precision; mAP is its mean over the thresholds and all
ten classes. The true-positive errors (ATE m, ASE 1-IoU, AOE rad, AVE m/s, AAE 1-accuracy) are measured on the matches at 2 m; NDS = (5
mAP + sum of max(0, 1 - error)) / 10.

Before matching, boxes beyond the class's range (30, 40 or 50 m from the ego), ground truth without lidar and radar points, and cycles
inside bicycle racks are removed. A class without ground truth counts as AP 0, as in the benchmark; `mAP_occurring` is the mean over the
classes that do occur.

This module replaces only the loading: boxes come from the index and from predictions in the BEV frame, not from a NuScenes object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from nuscenes.eval.common.config import config_factory
from nuscenes.eval.common.data_classes import EvalBoxes
from nuscenes.eval.detection.algo import accumulate, calc_ap, calc_tp
from nuscenes.eval.detection.constants import TP_METRICS
from nuscenes.eval.detection.data_classes import DetectionBox, DetectionConfig, DetectionMetrics
from nuscenes.utils.data_classes import Box
from nuscenes.utils.geometry_utils import points_in_box
from scipy.spatial.transform import Rotation

from pipeline.dataset.geometry import FloatArray, transform
from pipeline.errors import ModelError
from pipeline.models.prediction import BoxPrediction
from pipeline.taxonomy import DETECTION_CLASSES

# Names of the true-positive errors in published tables, in the devkit's order of TP_METRICS.
ERROR_NAMES = dict(zip(TP_METRICS, ("ATE", "ASE", "AOE", "AVE", "AAE"), strict=True))
# What the benchmark leaves undefined: cones have no heading, cones and barriers do not move and have no attribute.
UNDEFINED_ERRORS = {"traffic_cone": ("orient_err", "vel_err", "attr_err"), "barrier": ("vel_err", "attr_err")}
# Distance of a box from the ego in the ground plane, m: [lower, upper).
RANGES_M: dict[str, tuple[float, float]] = {"0-20m": (0.0, 20.0), "20-40m": (20.0, 40.0), "40m+": (40.0, np.inf)}

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


def detection_config() -> DetectionConfig:
    """The official settings of the nuScenes detection benchmark."""
    return config_factory("detection_cvpr_2019")


def predict_attribute(class_name: str, speed_mps: float) -> str:
    """Attribute of a predicted box by the rule of `ATTRIBUTES`; "" for classes without attributes."""
    if class_name not in ATTRIBUTES:
        return ""
    moving, standing = ATTRIBUTES[class_name]
    return moving if speed_mps > MOVING_SPEED_MPS else standing


def to_devkit_boxes(sample_token: str, boxes: BoxPrediction, ego2global: FloatArray) -> list[DetectionBox]:
    """Predictions of one sample as devkit boxes in the global frame, best score first, at most 500 (the benchmark's limit).

    Args:
        sample_token: the sample the boxes belong to.
        boxes: boxes in the BEV frame.
        ego2global: (4,4) BEV frame to global.

    Raises:
        ModelError: a box has a value that is not finite or a size that is not positive.
    """
    _require_valid(sample_token, boxes)
    order = np.argsort(-boxes.score, kind="stable")[: detection_config().max_boxes_per_sample]
    rotation = np.asarray(ego2global[:3, :3], dtype=np.float64)
    centers = transform(ego2global, boxes.center_m[order].astype(np.float64))
    about_z = np.zeros((len(order), 3))
    about_z[:, 2] = boxes.yaw_rad[order]
    headings = Rotation.from_matrix(rotation) * Rotation.from_rotvec(about_z)
    quaternions_wxyz = headings.as_quat()[:, [3, 0, 1, 2]]
    velocities = boxes.velocity_mps[order].astype(np.float64) @ rotation[:2, :2].T
    offsets = centers - ego2global[:3, 3]
    result = []
    for row, i in enumerate(order):
        name = DETECTION_CLASSES[boxes.class_id[i]]
        result.append(
            DetectionBox(
                sample_token=sample_token,
                translation=tuple(centers[row].tolist()),
                size=tuple(boxes.size_wlh_m[i].astype(np.float64).tolist()),
                rotation=tuple(quaternions_wxyz[row].tolist()),
                velocity=tuple(velocities[row].tolist()),
                ego_translation=tuple(offsets[row].tolist()),
                detection_name=name,
                detection_score=float(boxes.score[i]),
                attribute_name=predict_attribute(name, float(np.hypot(*velocities[row]))),
            )
        )
    return result


def _require_valid(sample_token: str, boxes: BoxPrediction) -> None:
    for field in ("center_m", "size_wlh_m", "yaw_rad", "velocity_mps", "score"):
        values = getattr(boxes, field)
        if not np.isfinite(values).all():
            raise ModelError(f"sample {sample_token}: predicted boxes.{field} holds a value that is not finite")
    if (boxes.size_wlh_m <= 0).any():
        raise ModelError(f"sample {sample_token}: predicted boxes.size_wlh_m = {boxes.size_wlh_m.min()}: sizes must be positive")


def submission(predictions: EvalBoxes) -> dict[str, Any]:
    """Content of a nuScenes results file (camera only), which the devkit's DetectionEval loads."""
    fields = ("sample_token", "translation", "size", "rotation", "velocity", "detection_name", "detection_score", "attribute_name")
    meta = {"use_camera": True, "use_lidar": False, "use_radar": False, "use_map": False, "use_external": False}
    results = {token: [{name: getattr(box, name) for name in fields} for box in predictions[token]] for token in predictions.sample_tokens}
    return {"meta": meta, "results": results}


def evaluate_detection(ground_truth: EvalBoxes, predictions: EvalBoxes, bike_racks: Mapping[str, Sequence[Box]]) -> dict[str, Any]:
    """Official metrics, per class and per range.

    Args:
        ground_truth: boxes in the global frame with `ego_translation` and `num_pts` (lidar plus radar, -1 unknown) set; every evaluated
            sample is a key, also when it has no box.
        predictions: boxes in the global frame for the same samples.
        bike_racks: annotated bicycle racks by sample, global frame; samples without racks may be missing.

    Returns:
        mAP, NDS, mATE, mASE, mAOE, mAVE, mAAE, mAP_occurring, samples, per_class, per_range; None where a value is undefined.

    Raises:
        ModelError: predictions and ground truth are about different samples.
    """
    if set(predictions.sample_tokens) != set(ground_truth.sample_tokens):
        raise ModelError("detection: predictions and ground truth are about different samples")
    config = detection_config()
    ground_truth, predictions = (_filtered(boxes, bike_racks, config) for boxes in (ground_truth, predictions))
    metrics = _devkit_metrics(ground_truth, predictions, config)
    counts = {name: (_count(ground_truth, name), _count(predictions, name)) for name in DETECTION_CLASSES}
    per_class = {name: _class_row(metrics, name, *counts[name]) for name in DETECTION_CLASSES}
    occurring = [row["AP"] for row in per_class.values() if row["ground_truth"] > 0]
    return {
        "mAP": metrics.mean_ap,
        "NDS": metrics.nd_score,
        **{f"m{ERROR_NAMES[key]}": value for key, value in metrics.tp_errors.items()},
        "mAP_occurring": float(np.mean(occurring)) if occurring else None,
        "samples": len(ground_truth.sample_tokens),
        "per_class": per_class,
        "per_range": {name: _range_row(ground_truth, predictions, limits, config) for name, limits in RANGES_M.items()},
    }


def _filtered(boxes: EvalBoxes, bike_racks: Mapping[str, Sequence[Box]], config: DetectionConfig) -> EvalBoxes:
    """The devkit's filter_eval_boxes: class range, no points, inside a bicycle rack."""
    kept = EvalBoxes()
    for token in boxes.sample_tokens:
        racks = bike_racks.get(token, ())
        inside_range = [box for box in boxes[token] if box.ego_dist < config.class_range[box.detection_name] and box.num_pts != 0]
        kept.add_boxes(token, [box for box in inside_range if not _in_bike_rack(box, racks)])
    return kept


def _in_bike_rack(box: DetectionBox, racks: Sequence[Box]) -> bool:
    if box.detection_name not in ("bicycle", "motorcycle"):
        return False
    center = np.array(box.translation)[:, None]
    return any(bool(points_in_box(rack, center).any()) for rack in racks)


def _devkit_metrics(ground_truth: EvalBoxes, predictions: EvalBoxes, config: DetectionConfig) -> DetectionMetrics:
    metrics = DetectionMetrics(config)
    for name in config.class_names:
        for threshold_m in config.dist_ths:
            data = accumulate(ground_truth, predictions, name, config.dist_fcn_callable, threshold_m)
            metrics.add_label_ap(name, threshold_m, calc_ap(data, config.min_recall, config.min_precision))
            if threshold_m == config.dist_th_tp:
                for error in TP_METRICS:
                    defined = error not in UNDEFINED_ERRORS.get(name, ())
                    metrics.add_label_tp(name, error, calc_tp(data, config.min_recall, error) if defined else np.nan)
    return metrics


def _class_row(metrics: DetectionMetrics, name: str, ground_truth: int, predictions: int) -> dict[str, Any]:
    thresholds = metrics.cfg.dist_ths
    errors = {short: metrics.get_label_tp(name, key) for key, short in ERROR_NAMES.items()}
    return {
        "AP": float(metrics.mean_dist_aps[name]),
        "AP_at_m": [{"distance_m": threshold_m, "AP": metrics.get_label_ap(name, threshold_m)} for threshold_m in thresholds],
        **{short: None if np.isnan(value) else value for short, value in errors.items()},
        "ground_truth": ground_truth,
        "predictions": predictions,
    }


def _range_row(ground_truth: EvalBoxes, predictions: EvalBoxes, limits_m: tuple[float, float], config: DetectionConfig) -> dict[str, Any]:
    """AP inside one range of distance; both sides of a match must lie in it. mAP is over the classes that occur in the range."""
    truth, found = (_in_range(boxes, limits_m) for boxes in (ground_truth, predictions))
    per_class = {}
    for name in DETECTION_CLASSES:
        if _count(truth, name) > 0:
            curves = [accumulate(truth, found, name, config.dist_fcn_callable, threshold_m) for threshold_m in config.dist_ths]
            per_class[name] = float(np.mean([calc_ap(curve, config.min_recall, config.min_precision) for curve in curves]))
    mean = float(np.mean(list(per_class.values()))) if per_class else None
    return {"mAP": mean, "per_class": per_class, "ground_truth": len(truth.all), "predictions": len(found.all)}


def _in_range(boxes: EvalBoxes, limits_m: tuple[float, float]) -> EvalBoxes:
    kept = EvalBoxes()
    for token in boxes.sample_tokens:
        kept.add_boxes(token, [box for box in boxes[token] if limits_m[0] <= box.ego_dist < limits_m[1]])
    return kept


def _count(boxes: EvalBoxes, name: str) -> int:
    return sum(box.detection_name == name for box in boxes.all)
