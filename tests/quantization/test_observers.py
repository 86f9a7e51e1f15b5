"""Streaming statistics and the thresholds that follow from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.errors import ModelError
from pipeline.quantization.observers import (
    OBSERVERS,
    SAMPLES,
    TensorStatistics,
    automatic_threshold,
    expected_squared_errors,
    threshold_of,
)

FLOATS = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False))


def observe(*batches: np.ndarray) -> TensorStatistics:
    statistics = TensorStatistics.empty()
    for batch in batches:
        statistics.update(batch)
    return statistics


def same(left: TensorStatistics, right: TensorStatistics) -> bool:
    fields = ("minimum", "maximum", "count", "zeros", "nonfinite")
    return all(getattr(left, name) == getattr(right, name) for name in fields) and np.array_equal(left.histogram, right.histogram)


@given(st.lists(FLOATS, min_size=1, max_size=5), st.integers(0, 5))
def test_shards_add_up_to_one_pass(batches: list[np.ndarray], cut: int) -> None:
    merged = observe(*batches[cut:]).merge(observe(*batches[:cut]))
    assert same(merged, observe(*batches))
    assert same(observe(np.concatenate(batches)), merged)


@given(FLOATS)
def test_every_value_is_counted_once(values: np.ndarray) -> None:
    statistics = observe(values)
    assert statistics.count == values.size
    assert statistics.zeros + statistics.histogram.sum() == values.size
    assert statistics.zeros == np.count_nonzero(values == 0.0)


def test_large_tensors_are_sampled_evenly_but_their_extremes_are_exact() -> None:
    values = np.random.default_rng(0).normal(size=(6, 64, 64, 88)).astype(np.float32)
    values[3, 2, 1, 0] = 9.5
    statistics = observe(values)
    assert statistics.maximum == 9.5 and SAMPLES / 2 < statistics.count <= 2 * SAMPLES
    assert threshold_of(statistics, "percentile", "int8", 99.9) == pytest.approx(np.quantile(np.abs(values), 0.999), rel=0.02)


def test_nonfinite_values_are_counted_apart() -> None:
    statistics = observe(np.float32([1.0, np.nan, np.inf, -2.0]))
    assert (statistics.nonfinite, statistics.count, statistics.minimum, statistics.maximum) == (2, 2, -2.0, 1.0)


def test_minmax_covers_both_ends() -> None:
    assert threshold_of(observe(np.float32([-2.0, 1.0])), "minmax", "int8") == 2.0
    assert threshold_of(observe(np.float32([-1.0, 2.0])), "minmax", "int8") == pytest.approx(2.0 * 128 / 127)


def test_percentile_agrees_with_numpy() -> None:
    values = np.random.default_rng(0).normal(size=200_000).astype(np.float32)
    expected = np.quantile(np.abs(values), 0.999)
    assert threshold_of(observe(values), "percentile", "int8", 99.9) == pytest.approx(expected, rel=0.01)


def test_mse_agrees_with_a_search_over_the_real_values() -> None:
    values = np.random.default_rng(0).laplace(size=100_000).astype(np.float32)
    candidates = np.linspace(2.0, np.abs(values).max(), 200)
    errors = [np.square(np.clip(np.rint(values / (t / 128)), -128, 127) * (t / 128) - values).mean() for t in candidates]
    chosen = threshold_of(observe(values), "mse", "int8")
    at_chosen = np.square(np.clip(np.rint(values / (chosen / 128)), -128, 127) * (chosen / 128) - values).mean()
    assert at_chosen <= 1.02 * min(errors)


def test_an_outlier_moves_minmax_but_not_percentile_or_kl() -> None:
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    clean, dirty = observe(values), observe(np.append(values, np.float32(40.0)))
    assert threshold_of(dirty, "minmax", "int8") > 40.0
    for observer in ("percentile", "kl"):
        assert threshold_of(dirty, observer, "int8") < 2.0 * threshold_of(clean, observer, "int8")


@pytest.mark.parametrize("observer", OBSERVERS)
def test_int16_always_covers_the_range(observer: str) -> None:
    values = np.random.default_rng(0).standard_cauchy(10_000).astype(np.float32)
    assert threshold_of(observe(values), observer, "int16") >= np.abs(values).max()


@pytest.mark.parametrize("observer", OBSERVERS)
def test_threshold_scales_with_the_data(observer: str) -> None:
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    assert threshold_of(observe(values * 8), observer, "int8") == pytest.approx(8 * threshold_of(observe(values), observer, "int8"), rel=1e-6)


def test_dead_tensor_has_threshold_zero() -> None:
    assert threshold_of(observe(np.zeros(5, np.float32)), "mse", "int8") == 0.0
    assert threshold_of(TensorStatistics.empty(), "kl", "int8") == 0.0


def test_unknown_observer_is_named() -> None:
    with pytest.raises(ModelError, match=r"'entropy'.*minmax, percentile, mse, kl, auto"):
        threshold_of(observe(np.ones(3, np.float32)), "entropy", "int8")


@settings(deadline=None, max_examples=30)
@given(FLOATS.filter(lambda values: bool(np.abs(values).max(initial=0.0) > 1e-3)))
def test_automatic_choice_is_never_worse_than_any_observer(values: np.ndarray) -> None:
    statistics = observe(values)
    name, threshold = automatic_threshold(statistics, "int8")
    assert threshold == threshold_of(statistics, "auto", "int8") == threshold_of(statistics, name, "int8")
    errors = expected_squared_errors(statistics, np.array([threshold, *(threshold_of(statistics, each, "int8") for each in OBSERVERS)]), "int8")
    assert errors[0] == errors.min()


def test_share_beyond() -> None:
    statistics = observe(np.float32([0.0, 1.0, 2.0, 4.0, -8.0]))
    assert [statistics.share_beyond(t) for t in (0.5, 1.5, 3.0, 9.0)] == [1.0, 0.75, 0.5, 0.0]
