"""Resumable state of a run, in models/checkpoints/<key>.pt: weights, optimizer, averaged weights, task weights, instance banks and curves.

The key is a hash of everything the result depends on, so a checkpoint is never resumed under other parameters or data. Batches and augmentation
depend on the step number alone and
the network uses no random numbers in training, so there is no generator state to keep.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.config import Config
from pipeline.io import atomic_path, canonical_hash
from pipeline.models.weights import to_bytes

if TYPE_CHECKING:
    from pipeline.training.trainer import Trainer


def run_key(config: Config, data_fingerprint: str) -> str:
    """Hash of the parameters that training reads and of the data."""
    parts = {
        "model": config.model.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "maps": config.maps.topology.model_dump(mode="json"),
    }
    return canonical_hash({**parts, "data": data_fingerprint})[:20]


class CheckpointFile:
    """One run's file."""

    def __init__(self, directory: Path, key: str) -> None:
        self.path = directory / f"{key}.pt"

    def save(self, trainer: Trainer) -> None:
        """Write the state atomically: a run killed meanwhile keeps the checkpoint before. All ranks call it, the first one writes."""
        banks = [{name: torch.from_numpy(np.array(value)) for name, value in bank.state().items()} for bank in trainer.banks]
        banks = [bank for of_rank in trainer.ranks.gather(banks) for bank in of_rank]
        if trainer.ranks.rank > 0:
            return
        content = {
            "step": trainer.step,
            "rows": trainer.rows,
            "task_weights": trainer.task_weights,
            "model": trainer.model.state_dict(),
            "auxiliary": trainer.auxiliary.state_dict(),
            "average": trainer.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "banks": banks,
        }
        with atomic_path(self.path) as temporary:
            temporary.write_bytes(to_bytes(content))

    def load_into(self, trainer: Trainer) -> None:
        """Continue from the file if it exists and is whole; a damaged file is ignored and the run starts over."""
        content = self._read()
        if content is None:
            return
        trainer.step, trainer.rows, trainer.task_weights = content["step"], content["rows"], content["task_weights"]
        trainer.model.load_state_dict(content["model"])
        trainer.auxiliary.load_state_dict(content["auxiliary"])
        trainer.average.load_state_dict(content["average"])
        for optimizer, state in zip(trainer.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = trainer.ranks.rank * len(trainer.banks)
        for bank, state in zip(trainer.banks, content["banks"][first : first + len(trainer.banks)], strict=True):
            bank.restore({name: value.numpy() for name, value in state.items()})

    def remove(self) -> None:
        """The run is complete."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = torch.load(self.path, weights_only=True, map_location="cpu")
        except (FileNotFoundError, RuntimeError, EOFError, pickle.UnpicklingError):
            return None
        return content
