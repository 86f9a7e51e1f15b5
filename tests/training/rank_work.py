"""What the ranks of test_ranks.py do: in a module of its own, which a new process can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.errors import DataError
from pipeline.training.batches import Batch, collate
from pipeline.training.checkpoint import CheckpointFile
from pipeline.training.ranks import Ranks
from pipeline.training.trainer import Trainer
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

    def new() -> Trainer:
        trainer = new_trainer(config, ranks=ranks)
        trainer.loader = RandomSlots(ranks)  # type: ignore[assignment]
        return trainer

    trainer, file = new(), CheckpointFile(directory, "run")
    if stop_at is not None:
        for step, batch in zip(range(stop_at), trainer.loader.steps(), strict=False):
            trainer.train_step(batch)
            trainer.step = step + 1
        file.save(trainer)
        ranks.gather(0)  # the file is whole before the other rank reads it
        trainer = new()
    trainer.run(file)
    state: dict[str, Tensor] = trainer.averaged_state()
    for other in ranks.gather({name: value.numpy() for name, value in state.items()}):
        assert all((other[name] == value.numpy()).all() for name, value in state.items())
    return state


def whole_and_resumed(ranks: Ranks, directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.set_num_threads(1)
    return weights_after(ranks, directory / "whole", None), weights_after(ranks, directory / "resumed", 3)
