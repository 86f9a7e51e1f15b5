"""models/float/model.pt: the weights, the model section of the parameters they belong to, and the tasks that had labels. Loads with weights_only."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.errors import ModelError
from pipeline.io import atomic_path
from pipeline.models import bspline
from pipeline.models.anchors import Anchors
from pipeline.models.heads.detection import BOX_STATE
from pipeline.models.multitask import MultitaskModel

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class SavedModel:
    """A model in evaluation mode and the tasks it was trained for; a head without labels exists but has learned nothing."""

    model: MultitaskModel
    trained_tasks: tuple[str, ...]


def channels_last(module: Module) -> Module:
    """The module with its kernels laid out channels-last, in place."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return module


def empty_anchors(config: ModelConfig) -> Anchors:
    """Anchors of the right shape, to be replaced by saved ones."""
    return Anchors(
        np.zeros((config.detection.anchors, BOX_STATE), dtype=np.float32),
        np.zeros((config.map.num_query, bspline.CONTROL_POINTS, 3), dtype=np.float32),
    )


def to_bytes(value: Any) -> bytes:
    """torch.save into memory: unlike saving to a path, the bytes do not depend on the file's name."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def save_model(path: Path, config: ModelConfig, state: dict[str, Tensor], trained_tasks: tuple[str, ...]) -> None:
    """Write the file atomically; equal weights give equal bytes."""
    content = {"state": dict(state), "model": json.dumps(config.model_dump(mode="json"), sort_keys=True), "trained_tasks": list(trained_tasks)}
    with atomic_path(path) as temporary:
        temporary.write_bytes(to_bytes(content))


def load_model(path: Path) -> SavedModel:
    """Read what `save_model` wrote.

    Raises:
        ModelError: the file is missing, damaged, or does not fit this version of the network.
    """
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        config = ModelConfig.model_validate_json(content["model"])
        model = MultitaskModel(config, empty_anchors(config))
        model.load_state_dict(content["state"])
    except FileNotFoundError:
        raise ModelError(f"{path}: file not found. Run the stage 'train' first") from None
    except (RuntimeError, EOFError, KeyError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise ModelError(f"{path}: not a model of this program ({str(error).splitlines()[0] if str(error) else type(error).__name__})") from error
    return SavedModel(model.eval(), tuple(content["trained_tasks"]))
