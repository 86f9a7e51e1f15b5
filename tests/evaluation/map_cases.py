"""Small map labels and predictions."""

from __future__ import annotations

import numpy as np

from pipeline.evaluation.chamfer import resample
from pipeline.maps.store import MapLabel
from pipeline.models.prediction import MapPrediction

DIVIDER, CROSSING, BOUNDARY = 0, 1, 2


def line_at(y_m: float) -> np.ndarray:
    return np.array([[0.0, y_m], [5.0, y_m], [20.0, y_m]])


def label(elements: list[tuple[np.ndarray, int]], labelled: tuple[bool, bool, bool] = (True, True, True)) -> MapLabel:
    classes = np.array([class_id for _, class_id in elements], dtype=np.int64)
    return MapLabel(
        line_segments=np.zeros((0, 2, 2), np.float32),
        polygons=np.zeros((0, 4, 2), np.float32),
        topology_matrix=np.zeros((0, 0), np.uint8),
        polylines=[line.astype(np.float32) for line, _ in elements],
        polyline_class=classes,
        resampled=np.zeros((len(elements), 20, 2), np.float32),
        closed=classes == CROSSING,
        lanes=np.zeros((0, 4, 2), np.float32),
        lane_adjacency=np.zeros((0, 2), np.int32),
        labelled=np.array(labelled),
    )


def prediction(elements: list[tuple[np.ndarray, int, float]]) -> MapPrediction:
    return MapPrediction(
        polylines=np.array([resample(line, 20) for line, _, _ in elements], np.float32).reshape(-1, 20, 2),
        class_id=np.array([class_id for _, class_id, _ in elements], dtype=np.int64),
        score=np.array([score for _, _, score in elements], np.float32),
        line_segments=np.zeros((0, 2, 2), np.float32),
        polygons=np.zeros((0, 4, 2), np.float32),
        topology_matrix=np.zeros((0, 0), np.uint8),
        segment_line=np.zeros(0, np.int64),
        polygon_line=np.zeros(0, np.int64),
    )
