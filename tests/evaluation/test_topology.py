"""Topology correctness on worked cases: a 4 m x 3 m crossing, its sides and a divider that ends on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.evaluation.topology import evaluate_topology
from pipeline.maps.store import MapLabel
from pipeline.maps.topology import to_segments, topology_matrix
from pipeline.models.decode import build_map
from pipeline.models.prediction import MapPrediction
from tests.evaluation.map_cases import CROSSING, DIVIDER, label

RING = np.array([[0.0, 0], [4, 0], [4, 3], [0, 3], [0, 0]])
DIVIDER_M = np.array([[4.0, 1], [10, 1]])
RELATED_M = 14.0 + 6.0  # outline and divider


def truth() -> MapLabel:
    elements = [(DIVIDER_M, DIVIDER), (RING, CROSSING)]
    segments = to_segments([DIVIDER_M, RING])
    matrix = topology_matrix(segments, [RING], 0.1)
    return replace(label(elements), line_segments=segments.astype(np.float32), polygons=RING[None, :4].astype(np.float32), topology_matrix=matrix)


def found(points: int = 13, shift_m: float = 0.0, scores: tuple[float, float] = (0.9, 0.8)) -> MapPrediction:
    """Divider and crossing, each of `points` points, as a network gives them."""
    share = np.linspace(0, 1, points)
    divider = DIVIDER_M[0] + share[:, None] * (DIVIDER_M[1] - DIVIDER_M[0])
    corner = np.linspace(0, 4, points)
    ring = np.stack([np.interp(corner, np.arange(5), RING[:, axis]) for axis in (0, 1)], axis=1)
    lines = (np.stack([divider, ring]) + shift_m).astype(np.float32)
    return build_map(lines, np.array([DIVIDER, CROSSING]), np.float32(scores), np.array([False, True]), polygon_corners=4)


@pytest.mark.parametrize("points", [5, 13, 41])
def test_sides_are_right_however_a_line_is_cut(points: int) -> None:
    result = evaluate_topology([truth()], [found(points)])
    assert result is not None
    assert (result["precision"], result["relations"]) == (pytest.approx(1.0), 5)
    # Of the divider only the pieces at the crossing belong to it: all of it as one piece, 1/12 of it as the first of twelve. Labelled
    # stretches up to 1.25 m from the last of these middles count as found.
    assert 14.0 / RELATED_M < result["recall"] <= 1.0


def test_a_relation_to_the_wrong_polygon_is_wrong() -> None:
    good = found(5)
    beside = good.polygons + np.float32([0, 20])
    wrong = replace(good, polygons=np.concatenate([good.polygons, beside]), polygon_line=np.array([1, 1]))
    relations = np.zeros((8, 2), np.uint8)
    relations[4:6, 0], relations[6:, 1] = 1, 1  # two sides (7 m) to the crossing, two to the polygon beside
    result = evaluate_topology([truth()], [replace(wrong, topology_matrix=relations)])
    assert result is not None
    assert result["precision"] == pytest.approx(7 / 14)
    assert result["recall"] == pytest.approx(7 / RELATED_M, abs=0.2)


def test_what_is_too_far_from_any_label_is_wrong() -> None:
    result = evaluate_topology([truth()], [found(shift_m=2.0)])
    assert result is not None
    assert result["F1"] == 0.0


def test_the_score_with_the_best_f1_is_named() -> None:
    false_alarm = found(scores=(0.3, 0.3))
    result = evaluate_topology([truth(), label([])], [found(), false_alarm])
    assert result is not None
    assert result["score_threshold"] == pytest.approx(0.35)
    assert result["precision"] == pytest.approx(1.0)


def test_without_relations_there_is_no_result() -> None:
    assert evaluate_topology([label([])], [found()]) is None
