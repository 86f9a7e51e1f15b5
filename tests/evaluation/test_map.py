"""Chamfer AP on worked cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from pipeline.errors import ModelError
from pipeline.evaluation.chamfer import chamfer_matrix, close, resample
from pipeline.evaluation.map import evaluate_map
from tests.evaluation.map_cases import BOUNDARY, CROSSING, DIVIDER, label, line_at, prediction

THRESHOLDS_M = (0.5, 1.0, 1.5)
SQUARE = np.array([[0.0, 0], [4, 0], [4, 3], [0, 3]])


def test_identity_scores_one() -> None:
    elements = [(line_at(0), DIVIDER), (line_at(4), BOUNDARY), (close(SQUARE), CROSSING)]
    result = evaluate_map([label(elements)], [prediction([(line, class_id, 0.7) for line, class_id in elements])], THRESHOLDS_M)
    assert result["AP"] == pytest.approx(1.0)
    assert all(row["AP"] == pytest.approx(1.0) for row in result["per_class"].values())


def test_a_line_1_2_m_away_counts_at_the_widest_threshold_only() -> None:
    result = evaluate_map([label([(line_at(0), DIVIDER)])], [prediction([(line_at(1.2), DIVIDER, 0.5)])], THRESHOLDS_M)
    assert [row["AP"] for row in result["per_class"]["divider"]["AP_at_m"]] == [0.0, 0.0, 1.0]
    assert result["AP"] == pytest.approx(1 / 3)


def test_area_under_the_curve() -> None:
    # Right, wrong, right in order of score, two elements: recall 1/2 at precision 1, recall 1 at precision 2/3.
    truth = label([(line_at(0), DIVIDER), (line_at(10), DIVIDER)])
    found = prediction([(line_at(0), DIVIDER, 0.9), (line_at(-10), DIVIDER, 0.8), (line_at(10), DIVIDER, 0.7)])
    result = evaluate_map([truth], [found], (0.5,))
    assert result["AP"] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


def test_an_element_is_found_once_and_the_better_score_takes_it() -> None:
    truth = label([(line_at(0), DIVIDER)])
    found = prediction([(line_at(0.3), DIVIDER, 0.4), (line_at(0.4), DIVIDER, 0.9)])
    assert evaluate_map([truth], [found], (0.5,))["AP"] == pytest.approx(1.0)
    # Twice the same element does not make up for a missing one.
    truth = label([(line_at(0), DIVIDER), (line_at(10), DIVIDER)])
    assert evaluate_map([truth], [found], (0.5,))["AP"] == pytest.approx(0.5)


def test_scores_are_compared_across_samples() -> None:
    truth = [label([(line_at(0), DIVIDER)]), label([])]
    found = [prediction([(line_at(0), DIVIDER, 0.4)]), prediction([(line_at(0), DIVIDER, 0.9)])]
    assert evaluate_map(truth, found, (0.5,))["AP"] == pytest.approx(0.5)


def test_a_crossing_is_closed_before_it_is_compared() -> None:
    # The open prediction lacks the side from the last corner to the first, 3 m of 14 m: without closing, its Chamfer distance is not 0.
    truth = label([(close(SQUARE), CROSSING)])
    found = prediction([(SQUARE, CROSSING, 0.9)])
    assert evaluate_map([truth], [found], (0.2,))["AP"] == pytest.approx(1.0)
    as_divider = evaluate_map([label([(close(SQUARE), DIVIDER)])], [prediction([(SQUARE, DIVIDER, 0.9)])], (0.1,))
    assert as_divider["AP"] == 0.0


def test_nothing_to_find() -> None:
    found = prediction([(line_at(0), DIVIDER, 0.9), (line_at(0), BOUNDARY, 0.9)])
    nothing = evaluate_map([label([])], [found], THRESHOLDS_M)
    assert nothing["AP"] is None
    one_class = evaluate_map([label([(line_at(0), DIVIDER)])], [found], THRESHOLDS_M)
    assert one_class["AP"] == pytest.approx(1.0)
    assert one_class["per_class"]["boundary"] == {"AP": None, "AP_at_m": [], "ground_truth": 0, "predictions": 1}
    missed = evaluate_map([label([(line_at(0), DIVIDER)])], [prediction([])], THRESHOLDS_M)
    assert missed["AP"] == 0.0


def test_a_class_that_the_map_does_not_hold_is_not_judged() -> None:
    truth = [label([(line_at(0), BOUNDARY)]), label([], labelled=(True, True, False))]
    found = [prediction([(line_at(0), BOUNDARY, 0.5)]), prediction([(line_at(0), BOUNDARY, 0.9)])]
    assert evaluate_map(truth, found, (0.5,))["AP"] == pytest.approx(1.0)


def test_a_prediction_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ModelError, match="not finite"):
        evaluate_map([label([])], [prediction([(line_at(np.nan), DIVIDER, 0.5)])], THRESHOLDS_M)


points = st.lists(st.tuples(st.floats(-30, 30), st.floats(-15, 15)), min_size=2, max_size=6).map(np.array)


@settings(max_examples=40, deadline=None)
@given(points, points)
def test_chamfer_is_the_symmetric_mean_of_nearest_distances(a: np.ndarray, b: np.ndarray) -> None:
    a, b = resample(a, 30), resample(b, 30)
    distances = cdist(a, b)
    expected = (distances.min(axis=1).mean() + distances.min(axis=0).mean()) / 2
    assert chamfer_matrix(a[None], b[None])[0, 0] == pytest.approx(expected, abs=1e-9)
    assert chamfer_matrix(b[None], a[None])[0, 0] == pytest.approx(expected, abs=1e-9)
    limited = chamfer_matrix(a[None], b[None], limit_m=1.5)[0, 0]
    assert limited == pytest.approx(expected) or (np.isinf(limited) and expected > 1.5)


@settings(max_examples=40, deadline=None)
@given(points)
def test_resampling_keeps_the_ends_and_even_steps_along_the_line(line: np.ndarray) -> None:
    even = resample(line, 15)
    assert np.allclose(even[[0, -1]], line[[0, -1]])
    steps = np.linalg.norm(np.diff(even, axis=0), axis=1)
    length = np.linalg.norm(np.diff(line, axis=0), axis=1).sum()
    assert (steps <= length / 14 + 1e-6).all()
