"""Ranks as real processes on this machine; every call of `run_ranks` starts one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.errors import DataError, ModelError
from pipeline.training.batches import Batch, collate
from pipeline.training.checkpoint import CheckpointFile
from pipeline.training.muon import share_of_work
from pipeline.training.ranks import ALONE, Ranks, run_ranks
from tests.training.test_trainer import make_config, new_trainer, random_sample


def exchange(ranks: Ranks, offset: float) -> tuple[list[float], list[int], float, float]:
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    only_first = nn.Parameter(torch.zeros(1))
    (used.sum() * (ranks.rank + 1) + (only_first.sum() * 8 if ranks.rank == 0 else 0)).backward()
    statistics = torch.tensor([float(ranks.rank)])
    ranks.average_gradients([used, unused, only_first], [statistics])
    assert used.grad is not None
    assert only_first.grad is not None
    assert unused.grad is None
    total = torch.tensor([offset + ranks.rank])
    ranks.sum_(total)
    return [*used.grad.tolist(), float(only_first.grad)], ranks.gather(ranks.rank), float(statistics), float(total)


def fail_in_the_second(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise DataError("samples/CAM_FRONT/a.jpg: cut")
    ranks.gather(0)


def die_in_the_second(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather(0)


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


class RandomSlots:
    """The batches of one rank: its own slots of those that a single process would see."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.config = ranks, make_config()

    def steps(self, first: int = 0) -> Iterator[Batch]:
        step = first
        while True:
            yield collate([random_sample(self.config, 10 * step + self.ranks.rank, step % 3 == 0)])
            step += 1


def weights_after(ranks: Ranks, directory: Path, stop_at: int | None) -> dict[str, Tensor]:
    """Averaged weights after six steps, alike on all ranks; with `stop_at`, the run goes on from a checkpoint of that step in a new trainer."""
    config = make_config(processes=2)

    def new() -> object:
        trainer = new_trainer(config, ranks=ranks)
        trainer.loader = RandomSlots(ranks)  # type: ignore[assignment]
        return trainer

    trainer, file = new(), CheckpointFile(directory, "run")
    if stop_at is not None:
        for step, batch in zip(range(stop_at), trainer.loader.steps(), strict=False):  # type: ignore[attr-defined]
            trainer.train_step(batch)  # type: ignore[attr-defined]
            trainer.step = step + 1  # type: ignore[attr-defined]
        file.save(trainer)  # type: ignore[arg-type]
        ranks.gather(0)  # the file is whole before the other rank reads it
        trainer = new()
    trainer.run(file)  # type: ignore[attr-defined]
    state: dict[str, Tensor] = trainer.averaged_state()  # type: ignore[attr-defined]
    for other in ranks.gather({name: value.numpy() for name, value in state.items()}):
        assert all((other[name] == value.numpy()).all() for name, value in state.items())
    return state


def whole_and_resumed(ranks: Ranks, directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.set_num_threads(1)
    return weights_after(ranks, directory / "whole", None), weights_after(ranks, directory / "resumed", 3)


def test_ranks_stay_alike_and_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, resumed = run_ranks(whole_and_resumed, 2, tmp_path)
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 512)), max_size=40), st.integers(1, 5))
def test_every_matrix_has_one_rank(shapes: list[tuple[int, int]], size: int) -> None:
    own = [share_of_work(shapes, Ranks(rank, size)) for rank in range(size)]
    assert sorted(number for numbers in own for number in numbers) == list(range(len(shapes)))
