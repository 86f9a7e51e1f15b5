"""One export and one calibration for each small network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.config import QuantizationConfig
from pipeline.j6.chip import ChipProfile, load_chip
from pipeline.quantization.calibrate import Calibration, calibrate
from pipeline.quantization.model import FloatModel, load_float_model
from tests.quantization.networks import ConvNet, DeformableBlock, deformable_batches, export, image_batches

BATCHES = 8


@pytest.fixture(scope="session")
def config() -> QuantizationConfig:
    return QuantizationConfig(calibration_batches=BATCHES, analysis_batches=2, threads=1)


@pytest.fixture(scope="session")
def chip() -> ChipProfile:
    return load_chip("j6m")


@pytest.fixture(scope="session")
def conv_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sample = {name: torch.from_numpy(value) for name, value in image_batches(1)[0].items()}
    return export(ConvNet(), sample, ["logits"], tmp_path_factory.mktemp("conv") / "conv.onnx")


@pytest.fixture(scope="session")
def conv_model(conv_path: Path) -> FloatModel:
    return load_float_model(conv_path)


@pytest.fixture(scope="session")
def conv_calibration(conv_model: FloatModel, config: QuantizationConfig) -> Calibration:
    return calibrate(conv_model, image_batches(BATCHES), config)


@pytest.fixture(scope="session")
def deformable_model(tmp_path_factory: pytest.TempPathFactory) -> FloatModel:
    torch.manual_seed(0)
    sample = {name: torch.from_numpy(value) for name, value in deformable_batches(1)[0].items()}
    return load_float_model(export(DeformableBlock(), sample, ["refined", "out_features"], tmp_path_factory.mktemp("def") / "deformable.onnx"))


@pytest.fixture(scope="session")
def deformable_calibration(deformable_model: FloatModel, config: QuantizationConfig) -> Calibration:
    return calibrate(deformable_model, deformable_batches(BATCHES), config)


@pytest.fixture(scope="session")
def with_config(config: QuantizationConfig) -> Callable[..., QuantizationConfig]:
    """The session's configuration with some fields replaced, checked like a parameter file."""

    def build(**changes: object) -> QuantizationConfig:
        return QuantizationConfig.model_validate(config.model_dump() | changes)

    return build
