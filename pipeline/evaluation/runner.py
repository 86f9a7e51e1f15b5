"""Accuracy of a predictor on the held-out scenes: one implementation for torch, onnxruntime and the constant prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.config import EvaluateConfig
from pipeline.dataset.index import Index
from pipeline.dataset.occupancy import OccupancyLabels, load_labels
from pipeline.dataset.records import SampleRecord
from pipeline.errors import DataError
from pipeline.evaluation.boxes import BoxTable, submission, to_global
from pipeline.evaluation.detection import evaluate_detection
from pipeline.evaluation.ground_truth import detection_truth
from pipeline.evaluation.map import evaluate_map
from pipeline.evaluation.occupancy import OccupancyEvaluator
from pipeline.maps.store import MapLabel, MapStore
from pipeline.models.prediction import MapPrediction, Prediction
from pipeline.progress import track
from pipeline.taxonomy import TASKS

# The one number of each head that gates and tables are about.
HEADLINES: dict[str, str] = {"detection": "mAP", "map": "AP", "occupancy": "mIoU"}
HELD_OUT = "val"


class Predictor(Protocol):
    """Steps through the samples of a scene in time order and carries its own temporal state."""

    def reset(self) -> None:
        """Forget the temporal state: a new scene begins."""

    def step(self, record: SampleRecord) -> Prediction:
        """Predict the next sample of the scene."""


@dataclass
class Evaluation:
    """What was measured: the report, all predicted boxes and the samples that were asked for as examples."""

    report: dict[str, Any]
    tokens: list[str]
    detections: BoxTable | None
    examples: list[tuple[SampleRecord, Prediction]]

    def submission(self) -> dict[str, Any]:
        """The boxes as content of a nuScenes results file."""
        return submission(self.detections, self.tokens) if self.detections is not None else {}


@dataclass
class _Collected:
    """Predictions and labels of the samples seen so far. Occupancy is counted at once because its grids are large."""

    boxes: list[BoxTable] = field(default_factory=list)
    map_labels: list[MapLabel] = field(default_factory=list)
    map_predictions: list[MapPrediction] = field(default_factory=list)
    occupancy: OccupancyEvaluator = field(default_factory=OccupancyEvaluator)
    heads: set[str] = field(default_factory=set)  # heads that predict
    labelled: set[str] = field(default_factory=set)  # heads with a label on some sample

    def add(self, sample: int, record: SampleRecord, prediction: Prediction, map_label: MapLabel | None, occupancy: OccupancyLabels | None) -> None:
        """Take in the sample at position `sample`; a head without a label for it is not judged on it."""
        outputs = {"detection": prediction.boxes, "map": prediction.map, "occupancy": prediction.occupancy}
        self.heads |= {head for head, output in outputs.items() if output is not None}
        if (record.boxes.class_id >= 0).any():
            self.labelled.add("detection")
        if prediction.boxes is not None:
            self.boxes.append(to_global(prediction.boxes, record.ego2global, sample, record.token))
        if map_label is not None:
            self.labelled.add("map")
            if prediction.map is not None:
                self.map_labels.append(map_label)
                self.map_predictions.append(prediction.map)
        if occupancy is not None:
            self.labelled.add("occupancy")
            if prediction.occupancy is not None:
                self.occupancy.add(occupancy.semantics, occupancy.mask_camera, prediction.occupancy)


def held_out_scenes(index: Index, max_samples: int | None, split: str = HELD_OUT) -> dict[str, list[str]]:
    """Sample tokens of the held-out split (or of another one) by scene in time order, cut after `max_samples`.

    Raises:
        DataError: no sample is held out.
    """
    scenes: dict[str, list[str]] = {}
    left = max_samples
    for name, tokens in index.scenes(split).items():
        chosen = tokens if left is None else tokens[:left]
        if chosen:
            scenes[name] = chosen
        left = None if left is None else left - len(chosen)
    if not scenes:
        raise DataError(f"{index.directory}: no usable sample is held out (split {split!r}): set dataset.val_scenes")
    return scenes


def evaluate(
    predictor: Predictor, index: Index, maps: MapStore, config: EvaluateConfig, examples: int = 0, split: str = HELD_OUT
) -> Evaluation:
    """Run a predictor over the held-out scenes, scene by scene in time order, and measure every head that has labels.

    Args:
        predictor: the model.
        index: samples and boxes.
        maps: map labels.
        config: thresholds and the number of samples.
        examples: number of samples, evenly spread, whose predictions are kept.
        split: which scenes; the held-out ones unless a model is to be judged on what it has seen.

    Returns:
        The report: `samples`, `scenes`; detection, map, occupancy as their modules define them, where they could be evaluated; and
        `skipped` with the reason for each head that could not.

    Raises:
        DataError: nothing is held out, or a label file is damaged.
        ModelError: a prediction is not finite or of another form than agreed.
    """
    scenes = held_out_scenes(index, config.max_samples, split)
    tokens = [token for scene in scenes.values() for token in scene]
    wanted = set(tokens[:: max(1, len(tokens) // examples)][:examples]) if examples else set()
    collected, kept = _Collected(), []
    first_of_scene = {scene[0] for scene in scenes.values()}
    for sample, token in enumerate(track(tokens, "evaluate")):
        if token in first_of_scene or not index.paired:
            predictor.reset()
        record = index.sample(token)
        prediction = predictor.step(record)
        collected.add(sample, record, prediction, maps.get(token), load_labels(index.dataroot, record))
        if token in wanted:
            kept.append((record, prediction))
    report = {"scenes": len(scenes), "samples": len(tokens), **_measure(collected, index, tokens, config)}
    detections = BoxTable.concatenate(collected.boxes) if collected.boxes else None
    return Evaluation(report, tokens, detections, kept)


def _measure(collected: _Collected, index: Index, tokens: Sequence[str], config: EvaluateConfig) -> dict[str, Any]:
    """Metrics of the heads that predict and have labels, and `skipped` with the reason for the others."""
    results: dict[str, Any] = {}
    ready = collected.heads & collected.labelled
    if "detection" in ready:
        truth = detection_truth(index, tokens)
        results["detection"] = evaluate_detection(truth.boxes, BoxTable.concatenate(collected.boxes), truth.bike_racks, len(tokens))
    if "map" in ready:
        results["map"] = evaluate_map(collected.map_labels, collected.map_predictions, config.map_chamfer_thresholds_m)
    if "occupancy" in ready:
        results["occupancy"] = collected.occupancy.result()
    # Labels that hold nothing (a map without elements, a grid without occupied voxels) leave the headline undefined.
    measured = {head: result for head, result in results.items() if result[HEADLINES[head]] is not None}
    skipped = {head: _why_skipped(head, collected) for head in TASKS if head not in measured}
    return {**measured, "skipped": skipped}


def _why_skipped(head: str, collected: _Collected) -> dict[str, Any]:
    if head not in collected.labelled:
        return {"has_labels": False, "reason": "no held-out sample has a label"}
    if head not in collected.heads:
        return {"has_labels": True, "reason": "the model does not predict it"}
    return {"has_labels": False, "reason": "the labels of the held-out samples hold nothing to find"}


def headlines(report: dict[str, Any]) -> dict[str, float]:
    """The headline metric of each head that was evaluated."""
    return {head: report[head][HEADLINES[head]] for head in TASKS if head in report}


def with_prior(report: dict[str, Any], prior: dict[str, Any]) -> dict[str, Any]:
    """A report with that of the constant prior: `prior` holds its heads, `times_prior` headline ratios (None: prior is 0)."""
    values, references = headlines(report), headlines(prior)
    ratios = {head: values[head] / references[head] if references[head] else None for head in values if head in references}
    return {**report, "prior": {head: prior[head] for head in ratios}, "times_prior": ratios}
