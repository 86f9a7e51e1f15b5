"""The headline metrics of one sample alone: what ranks samples. The mean over samples is not the metric of the set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.config import EvaluateConfig
from pipeline.dataset.index import Index
from pipeline.dataset.occupancy import load_labels
from pipeline.dataset.records import SampleRecord
from pipeline.evaluation.boxes import to_global
from pipeline.evaluation.detection import evaluate_detection
from pipeline.evaluation.ground_truth import detection_truth
from pipeline.evaluation.map import evaluate_map
from pipeline.evaluation.occupancy import OccupancyEvaluator
from pipeline.maps.store import MapStore
from pipeline.models.prediction import Prediction


class SampleScorer:
    """Scores predictions of single samples; the labels of all boxes are read once."""

    def __init__(self, index: Index, maps: MapStore, tokens: Sequence[str], config: EvaluateConfig) -> None:
        self._index, self._maps, self._config = index, maps, config
        self._positions = {token: position for position, token in enumerate(tokens)}
        self._truth = detection_truth(index, tokens)

    def scores(self, record: SampleRecord, prediction: Prediction) -> dict[str, float]:
        """mAP over the classes that occur, AP and mIoU by head; a head without prediction or label on this sample is left out."""
        measures = {"detection": self._detection, "map": self._map, "occupancy": self._occupancy}
        found = {head: measure(record, prediction) for head, measure in measures.items()}
        return {head: value for head, value in found.items() if value is not None}

    def _detection(self, record: SampleRecord, prediction: Prediction) -> float | None:
        position = self._positions[record.token]
        mine = self._truth.boxes.select(np.flatnonzero(self._truth.boxes.sample == position))
        if prediction.boxes is None or not len(mine):
            return None
        boxes = to_global(prediction.boxes, record.ego2global, position, record.token)
        return evaluate_detection(mine, boxes, self._truth.bike_racks, 1)["mAP_occurring"]

    def _map(self, record: SampleRecord, prediction: Prediction) -> float | None:
        label = self._maps.get(record.token)
        if prediction.map is None or label is None:
            return None
        return evaluate_map([label], [prediction.map], self._config.map_chamfer_thresholds_m)["AP"]

    def _occupancy(self, record: SampleRecord, prediction: Prediction) -> float | None:
        labels = load_labels(self._index.dataroot, record)
        if prediction.occupancy is None or labels is None:
            return None
        evaluator = OccupancyEvaluator()
        evaluator.add(labels.semantics, labels.mask_camera, prediction.occupancy)
        return evaluator.result()["mIoU"]
