"""Detection metrics of the nuScenes benchmark under its official configuration.

Definition (configuration detection_cvpr_2019). Predictions of a class are matched to ground truth in order of falling score: each takes
the nearest free ground-truth box of its sample and class when the centres are closer than a threshold in the ground plane (0.5, 1, 2
and 4 m). AP is the area under the precision-recall curve above 10 % recall and precision; mAP is its mean over the thresholds and all
ten classes. The true-positive errors (ATE m, ASE 1-IoU, AOE rad, AVE m/s, AAE 1-accuracy) are measured on the matches at 2 m; NDS = (5
mAP + sum of max(0, 1 - error)) / 10.

Before matching, boxes beyond the class's range (30, 40 or 50 m from the ego), ground truth without lidar and radar points, and cycles
inside bicycle racks are removed. A class without ground truth counts as AP 0, as in the benchmark; `mAP_occurring` is the mean over the
classes that do occur.

Configuration, AP, errors and NDS are nuscenes-devkit's own functions. Loading and matching are ours, on arrays instead of box objects;
tests hold them to the devkit's results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nuscenes.eval.common.config import config_factory
from nuscenes.eval.common.utils import cummean
from nuscenes.eval.detection.algo import calc_ap, calc_tp
from nuscenes.eval.detection.constants import TP_METRICS
from nuscenes.eval.detection.data_classes import DetectionConfig, DetectionMetricData, DetectionMetrics
from nuscenes.utils.data_classes import Box
from nuscenes.utils.geometry_utils import points_in_box

from pipeline.dataset.geometry import FloatArray
from pipeline.evaluation.boxes import BoxTable
from pipeline.taxonomy import DETECTION_CLASSES

# Names of the true-positive errors in published tables, in the devkit's order of TP_METRICS.
ERROR_NAMES = dict(zip(TP_METRICS, ("ATE", "ASE", "AOE", "AVE", "AAE"), strict=True))
# What the benchmark leaves undefined: cones have no heading, cones and barriers do not move and have no attribute.
UNDEFINED_ERRORS = {"traffic_cone": ("orient_err", "vel_err", "attr_err"), "barrier": ("vel_err", "attr_err")}
# Distance of a box from the ego in the ground plane, m: [lower, upper).
RANGES_M: dict[str, tuple[float, float]] = {"0-20m": (0.0, 20.0), "20-40m": (20.0, 40.0), "40m+": (40.0, np.inf)}
# Classes by the size of their objects in the BEV plane: longest side below about 2.5 m, that of a car, more.
SIZES: dict[str, tuple[str, ...]] = {
    "small": ("pedestrian", "bicycle", "motorcycle", "traffic_cone", "barrier"),
    "medium": ("car",),
    "large": ("truck", "bus", "trailer", "construction_vehicle"),
}
BARRIER = DETECTION_CLASSES.index("barrier")
CYCLES = (DETECTION_CLASSES.index("bicycle"), DETECTION_CLASSES.index("motorcycle"))


def evaluate_detection(ground_truth: BoxTable, predictions: BoxTable, bike_racks: Mapping[int, Sequence[Box]], samples: int) -> dict[str, Any]:
    """Official metrics, per class, size and range.

    Args:
        ground_truth: annotated boxes of the evaluated samples.
        predictions: predicted boxes of the same samples.
        bike_racks: annotated bicycle racks by sample, global frame.
        samples: number of evaluated samples, with and without boxes.

    Returns:
        mAP, NDS, mATE, mASE, mAOE, mAVE, mAAE, mAP_occurring, samples, per_class, per_size, per_range; None where a value is undefined.
    """
    config = config_factory("detection_cvpr_2019")
    truth, found = (filter_boxes(boxes, bike_racks, config) for boxes in (ground_truth, predictions))
    metrics = _metrics(truth, found, config)
    per_class = {name: _class_row(metrics, truth, found, name) for name in DETECTION_CLASSES}
    occurring = [row["AP"] for row in per_class.values() if row["ground_truth"] > 0]
    return {
        "mAP": metrics.mean_ap,
        "NDS": metrics.nd_score,
        **{f"m{ERROR_NAMES[key]}": value for key, value in metrics.tp_errors.items()},
        "mAP_occurring": float(np.mean(occurring)) if occurring else None,
        "samples": samples,
        "per_class": per_class,
        "per_size": {name: _size_row(per_class, classes) for name, classes in SIZES.items()},
        "per_range": {name: _range_row(truth, found, limits, config) for name, limits in RANGES_M.items()},
    }


def filter_boxes(boxes: BoxTable, bike_racks: Mapping[int, Sequence[Box]], config: DetectionConfig) -> BoxTable:
    """What the devkit's filter_eval_boxes leaves: inside the class range, not without points, not in a bicycle rack."""
    range_m = np.array([config.class_range[name] for name in DETECTION_CLASSES], dtype=np.float64)
    kept = (boxes.ego_distance_m < range_m[boxes.class_id]) & (boxes.num_points != 0)
    for row in np.flatnonzero(kept & np.isin(boxes.class_id, CYCLES) & np.isin(boxes.sample, list(bike_racks))):
        center = boxes.center_m[row][:, None]
        kept[row] = not any(points_in_box(rack, center).any() for rack in bike_racks[int(boxes.sample[row])])
    return boxes.select(kept)


@dataclass(frozen=True)
class Matching:
    """Predictions of one class in order of falling score, and the ground-truth box that each took by threshold."""

    truth: BoxTable
    found: BoxTable
    partner: NDArray[np.int64]  # (T,P) row of `truth`, -1 without a match


def match(ground_truth: BoxTable, predictions: BoxTable, class_id: int, thresholds_m: Sequence[float]) -> Matching:
    """Match the boxes of one class; see the module's definition."""
    truth = ground_truth.select(ground_truth.class_id == class_id)
    found = predictions.select(predictions.class_id == class_id)
    # The devkit's order: by score, and the later of two equal ones first.
    found = found.select(np.lexsort((np.arange(len(found)), found.score))[::-1])
    partner = np.full((len(thresholds_m), len(found)), -1, dtype=np.int64)
    rows_of, columns_of = _by_sample(found), _by_sample(truth)
    for sample in rows_of.keys() & columns_of.keys():
        rows, columns = rows_of[sample], columns_of[sample]
        offsets = found.center_m[rows, None, :2] - truth.center_m[None, columns, :2]
        distances_m = np.sqrt((offsets**2).sum(axis=2))
        for t, threshold_m in enumerate(thresholds_m):
            taken = _take_nearest(distances_m, threshold_m)
            partner[t, rows] = np.where(taken >= 0, columns[taken], -1)
    return Matching(truth, found, partner)


def _by_sample(boxes: BoxTable) -> dict[int, NDArray[np.int64]]:
    """Rows of each sample that has boxes, in order."""
    order = np.argsort(boxes.sample, kind="stable")
    samples, starts, counts = np.unique(boxes.sample[order], return_index=True, return_counts=True)
    return {int(sample): order[start : start + count] for sample, start, count in zip(samples, starts, counts, strict=True)}


def _take_nearest(distances_m: FloatArray, threshold_m: float) -> NDArray[np.int64]:
    """Column (P,) that each row of distances (P,G) takes, first row first: its nearest free one if that is closer than the threshold, else -1."""
    taken = np.full(len(distances_m), -1, dtype=np.int64)
    free = distances_m.copy()
    for row in np.flatnonzero(distances_m.min(axis=1) < threshold_m):
        column = int(free[row].argmin())
        if free[row, column] < threshold_m:
            taken[row] = column
            free[:, column] = np.inf
    return taken


def curve(matching: Matching, threshold: int) -> DetectionMetricData:
    """Precision, confidence and cumulative errors over 101 steps of recall, at one threshold (its index), as the devkit's accumulate gives them."""
    rows = np.flatnonzero(matching.partner[threshold] >= 0)
    if len(rows) == 0:
        return DetectionMetricData.no_predictions()
    hits = matching.partner[threshold] >= 0
    true_positives, false_positives = np.cumsum(hits).astype(float), np.cumsum(~hits).astype(float)
    recall_steps = np.linspace(0, 1, DetectionMetricData.nelem)
    recall = true_positives / len(matching.truth)
    precision = np.interp(recall_steps, recall, true_positives / (false_positives + true_positives), right=0)
    confidence = np.interp(recall_steps, recall, matching.found.score, right=0)
    errors = _errors(matching.truth.select(matching.partner[threshold, rows]), matching.found.select(rows))
    # np.interp needs rising arguments, confidence falls.
    at_confidence = {
        name: np.interp(confidence[::-1], matching.found.score[rows][::-1], cummean(values)[::-1])[::-1] for name, values in errors.items()
    }
    return DetectionMetricData(recall=recall_steps, precision=precision, confidence=confidence, **at_confidence)


def _errors(truth: BoxTable, found: BoxTable) -> dict[str, FloatArray]:
    """True-positive errors (N,) of N matched pairs of one class; NaN where the ground truth says nothing."""
    overlap = np.minimum(truth.size_wlh_m, found.size_wlh_m).prod(axis=1)
    union = truth.size_wlh_m.prod(axis=1) + found.size_wlh_m.prod(axis=1) - overlap
    # A barrier looks the same from both sides.
    period = np.pi if truth.class_id[0] == BARRIER else 2 * np.pi
    turn = (truth.yaw_rad() - found.yaw_rad() + period / 2) % period - period / 2
    return {
        "trans_err": np.linalg.norm(found.center_m[:, :2] - truth.center_m[:, :2], axis=1),
        "vel_err": np.linalg.norm(found.velocity_mps - truth.velocity_mps, axis=1),
        "scale_err": 1 - overlap / union,
        "orient_err": np.abs(turn),
        "attr_err": np.where(truth.attribute == "", np.nan, (truth.attribute != found.attribute).astype(float)),
    }


def _metrics(truth: BoxTable, found: BoxTable, config: DetectionConfig) -> DetectionMetrics:
    metrics = DetectionMetrics(config)
    for class_id, name in enumerate(DETECTION_CLASSES):
        matching = match(truth, found, class_id, config.dist_ths)
        for t, threshold_m in enumerate(config.dist_ths):
            data = curve(matching, t)
            metrics.add_label_ap(name, threshold_m, calc_ap(data, config.min_recall, config.min_precision))
            if threshold_m == config.dist_th_tp:
                for error in TP_METRICS:
                    defined = error not in UNDEFINED_ERRORS.get(name, ())
                    metrics.add_label_tp(name, error, calc_tp(data, config.min_recall, error) if defined else np.nan)
    return metrics


def _class_row(metrics: DetectionMetrics, truth: BoxTable, found: BoxTable, name: str) -> dict[str, Any]:
    errors = {short: metrics.get_label_tp(name, key) for key, short in ERROR_NAMES.items()}
    return {
        "AP": float(metrics.mean_dist_aps[name]),
        "AP_at_m": [{"distance_m": threshold_m, "AP": metrics.get_label_ap(name, threshold_m)} for threshold_m in metrics.cfg.dist_ths],
        **{short: None if np.isnan(value) else value for short, value in errors.items()},
        "ground_truth": int((truth.class_id == DETECTION_CLASSES.index(name)).sum()),
        "predictions": int((found.class_id == DETECTION_CLASSES.index(name)).sum()),
    }


def _size_row(per_class: Mapping[str, Mapping[str, Any]], classes: Sequence[str]) -> dict[str, Any]:
    """Mean AP over the classes of one size that occur."""
    rows = [per_class[name] for name in classes if per_class[name]["ground_truth"] > 0]
    return {"mAP": float(np.mean([row["AP"] for row in rows])) if rows else None, "ground_truth": sum(row["ground_truth"] for row in rows)}


def _range_row(truth: BoxTable, found: BoxTable, limits_m: tuple[float, float], config: DetectionConfig) -> dict[str, Any]:
    """AP inside one range of distance; both sides of a match must lie in it. mAP is over the classes that occur in the range."""
    near, found_near = (boxes.select((boxes.ego_distance_m >= limits_m[0]) & (boxes.ego_distance_m < limits_m[1])) for boxes in (truth, found))
    per_class = {}
    for class_id in np.unique(near.class_id):
        matching = match(near, found_near, int(class_id), config.dist_ths)
        aps = [calc_ap(curve(matching, t), config.min_recall, config.min_precision) for t in range(len(config.dist_ths))]
        per_class[DETECTION_CLASSES[class_id]] = float(np.mean(aps))
    mean = float(np.mean(list(per_class.values()))) if per_class else None
    return {"mAP": mean, "per_class": per_class, "ground_truth": len(near), "predictions": len(found_near)}
