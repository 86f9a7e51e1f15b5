"""Ranks as real processes on this machine; every call of `run_ranks` starts one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DataError, ModelError
from pipeline.training.muon import share_of_work
from pipeline.training.ranks import ALONE, Ranks, run_ranks
from tests.training.rank_work import die_in_the_second, exchange, fail_in_the_second, whole_and_resumed


def test_gradients_and_statistics_are_means_and_sums_are_sums() -> None:
    gradients, order, statistics, total = run_ranks(exchange, 2, 0.5)
    assert gradients == [1.5, 1.5, 4.0]
    assert order == [0, 1]
    assert statistics == 0.5
    assert total == 2.0


def test_one_process_starts_nothing() -> None:
    assert run_ranks(lambda ranks: ranks, 1) == ALONE


def test_the_error_of_another_rank_is_the_one_that_is_reported() -> None:
    with pytest.raises(DataError, match=r"a\.jpg: cut"):
        run_ranks(fail_in_the_second, 2)


def test_a_killed_rank_ends_the_training() -> None:
    with pytest.raises(ModelError, match="connection between the processes"):
        run_ranks(die_in_the_second, 2)


def test_ranks_stay_alike_and_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, resumed = run_ranks(whole_and_resumed, 2, tmp_path)
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 512)), max_size=40), st.integers(1, 5))
def test_every_matrix_has_one_rank(shapes: list[tuple[int, int]], size: int) -> None:
    own = [share_of_work(shapes, Ranks(rank, size)) for rank in range(size)]
    assert sorted(number for numbers in own for number in numbers) == list(range(len(shapes)))
