from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.config import ModelConfig
from pipeline.models.anchors import build_anchors
from pipeline.models.multitask import MultitaskModel
from tests.models.tiny import tiny_config


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return tiny_config()


@pytest.fixture(scope="session")
def model(config: ModelConfig) -> MultitaskModel:
    torch.manual_seed(0)
    centers_m = np.random.default_rng(0).uniform(-15, 15, (100, 3)).astype(np.float32)
    lines_m = [np.array([[-15.0, y], [15.0, y + 1]], dtype=np.float32) for y in np.linspace(-10, 10, 30)]
    return MultitaskModel(config, build_anchors(config, centers_m, lines_m, seed=0)).eval()
