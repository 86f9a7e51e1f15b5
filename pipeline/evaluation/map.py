"""Vector map metrics: Chamfer AP as MapTR defines it; correctness of the topology is `topology`'s.

Definition of the AP. Every element is resampled to the same number of points, evenly along its length; pedestrian crossings are closed
first. Within a sample and class, predictions in order of falling score look at the ground-truth element nearest by symmetric Chamfer
distance: the prediction is right when the distance is at most the threshold and no better prediction took that element, else it is
wrong. (It does not look at the second nearest.) AP is the area under the monotone precision-recall curve over all samples; a class's AP
is its mean over the thresholds; the headline AP is the mean over the classes that occur in the ground truth.

Where there is nothing to find: a sample whose map does not hold a class at all (`labelled`) is left out for that class; a sample without
elements makes its predictions wrong; a class without elements in the whole set has no AP (None) and does not enter the mean; without any
element there is no headline (None). A class that occurs and is never predicted has AP 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray
from pipeline.errors import ModelError
from pipeline.evaluation.chamfer import Points, chamfer_matrix, close, resample_all
from pipeline.evaluation.topology import evaluate_topology
from pipeline.maps.store import MapLabel
from pipeline.models.prediction import MapPrediction
from pipeline.taxonomy import MAP_CLASSES

POINTS_PER_ELEMENT = 100  # MapTR's num_sample
CLOSED_CLASSES = (MAP_CLASSES.index("ped_crossing"),)


@dataclass(frozen=True)
class Matches:
    """Predictions of one class over all samples, in no particular order."""

    score: FloatArray  # (N,)
    right: NDArray[np.bool_]  # (T,N) per threshold
    ground_truth: int


def evaluate_map(ground_truth: Sequence[MapLabel], predictions: Sequence[MapPrediction], thresholds_m: Sequence[float]) -> dict[str, Any]:
    """Chamfer AP per class and threshold, and topology correctness.

    Args:
        ground_truth: labels of N samples, BEV frame.
        predictions: predictions of the same samples, same order.
        thresholds_m: Chamfer distances at which an element counts as found.

    Returns:
        AP (None without ground truth), samples, per_class {name: AP, AP_at_m, ground_truth, predictions}, and topology
        {precision, recall, F1, score_threshold, relations} where the labels hold relations.

    Raises:
        ModelError: a predicted point or score is not finite.
    """
    for sample, prediction in enumerate(predictions):
        if not (np.isfinite(prediction.polylines).all() and np.isfinite(prediction.score).all()):
            raise ModelError(f"map prediction {sample}: polylines or scores hold a value that is not finite")
    per_class = {name: _class_row(ground_truth, predictions, class_id, thresholds_m) for class_id, name in enumerate(MAP_CLASSES)}
    occurring = [row["AP"] for row in per_class.values() if row["AP"] is not None]
    result: dict[str, Any] = {"AP": float(np.mean(occurring)) if occurring else None, "samples": len(ground_truth), "per_class": per_class}
    topology = evaluate_topology(ground_truth, predictions)
    return result if topology is None else {**result, "topology": topology}


def _class_row(
    ground_truth: Sequence[MapLabel], predictions: Sequence[MapPrediction], class_id: int, thresholds_m: Sequence[float]
) -> dict[str, Any]:
    matches = match_class(ground_truth, predictions, class_id, thresholds_m)
    at_m: list[dict[str, float]] = []
    if matches.ground_truth:
        at_m = [{"distance_m": d, "AP": average_precision(matches, t)} for t, d in enumerate(thresholds_m)]
    mean = float(np.mean([row["AP"] for row in at_m])) if at_m else None
    return {"AP": mean, "AP_at_m": at_m, "ground_truth": matches.ground_truth, "predictions": len(matches.score)}


def match_class(ground_truth: Sequence[MapLabel], predictions: Sequence[MapPrediction], class_id: int, thresholds_m: Sequence[float]) -> Matches:
    """Match one class sample by sample; see the module's definition."""
    scores, rights, count = [np.zeros(0)], [np.zeros((len(thresholds_m), 0), dtype=bool)], 0
    for label, prediction in zip(ground_truth, predictions, strict=True):
        if not label.labelled[class_id]:
            continue
        truth = label_elements(label, class_id)
        chosen = np.flatnonzero(prediction.class_id == class_id)
        chosen = chosen[np.argsort(-prediction.score[chosen], kind="stable")]
        found = _elements([prediction.polylines[i] for i in chosen], [class_id in CLOSED_CLASSES] * len(chosen))
        scores.append(prediction.score[chosen].astype(np.float64))
        rights.append(_match_sample(chamfer_matrix(found, truth, max(thresholds_m)), thresholds_m))
        count += len(truth)
    return Matches(np.concatenate(scores), np.concatenate(rights, axis=1), count)


def label_elements(label: MapLabel, class_id: int) -> FloatArray:
    """Ground-truth elements (L,100,2) of one class, resampled, closed where the label says so."""
    chosen = np.flatnonzero(label.polyline_class == class_id)
    return _elements([label.polylines[i] for i in chosen], [bool(label.closed[i]) for i in chosen])


def _elements(polylines_m: Sequence[Points], closed: Sequence[bool]) -> FloatArray:
    lines = [close(line) if is_closed else line for line, is_closed in zip(polylines_m, closed, strict=True)]
    return resample_all(lines, POINTS_PER_ELEMENT)


def _match_sample(distances_m: FloatArray, thresholds_m: Sequence[float]) -> NDArray[np.bool_]:
    """Right or wrong (T,P) for predictions in order of falling score, from distances (P,G)."""
    right = np.zeros((len(thresholds_m), distances_m.shape[0]), dtype=bool)
    if distances_m.size == 0:
        return right
    nearest = distances_m.argmin(axis=1)
    nearest_m = distances_m.min(axis=1)
    for t, threshold_m in enumerate(thresholds_m):
        close_enough = np.flatnonzero(nearest_m <= threshold_m)
        # The first of the predictions that share a nearest element has the best score and takes it.
        _, first = np.unique(nearest[close_enough], return_index=True)
        right[t, close_enough[first]] = True
    return right


def average_precision(matches: Matches, threshold: int) -> float:
    """Area under the monotone precision-recall curve at one threshold (its index); 0 without predictions."""
    order = np.argsort(-matches.score, kind="stable")
    true_positives = np.cumsum(matches.right[threshold, order])
    recall = true_positives / matches.ground_truth
    precision = true_positives / np.arange(1, len(order) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * envelope))
