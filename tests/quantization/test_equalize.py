"""Channels of an activation brought to similar ranges without changing the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.config import QuantizationConfig
from pipeline.j6.chip import ChipProfile
from pipeline.quantization.calibrate import calibrate, load_calibration, save_calibration
from pipeline.quantization.equalize import channel_shifts, equalized, find_pairs
from pipeline.quantization.model import FloatModel, load_float_model
from pipeline.quantization.quantize import quantize_network
from pipeline.quantization.sessions import Runner
from tests.quantization.networks import export, image_batches

Build = Callable[..., QuantizationConfig]


class Uneven(nn.Module):
    """Convolutions whose channels differ a thousandfold in range, behind ReLU, depthwise, and before a linear layer behind LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.c, self.norm, self.fc = nn.Conv2d(8, 8, 1), nn.LayerNorm(8), nn.Linear(8, 4)
        spread = 2.0 ** torch.linspace(-5, 5, 8)
        with torch.no_grad():
            self.a.weight *= spread[:, None, None, None]
            self.b.weight /= spread[:, None, None, None]
            self.norm.weight *= spread
            self.fc.weight /= spread

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.c(self.b(torch.relu(self.a(images))))
        return self.fc(self.norm(x.mean((2, 3))[:, None]))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> FloatModel:
    torch.manual_seed(0)
    sample = {"images": torch.from_numpy(image_batches(1)[0]["images"])}
    return load_float_model(export(Uneven(), sample, ["logits"], tmp_path_factory.mktemp("uneven") / "uneven.onnx"))


def test_pairs_are_those_whose_readers_all_have_weights(uneven: FloatModel) -> None:
    found = {pair.tensor for pair in find_pairs(uneven)}
    assert {"/Relu_output_0", "/b/Conv_output_0"} <= found
    assert "images" not in found and "/c/Conv_output_0" not in found  # no maker; read by a mean


def test_outputs_stay_bit_for_bit(uneven: FloatModel) -> None:
    batches = image_batches(2)
    shifts = channel_shifts(uneven, batches, 1)
    assert shifts and all(np.array_equal(np.exp2(np.rint(np.log2(s))), s) for s in shifts.values())
    other = equalized(uneven, shifts)
    assert not np.array_equal(other.constants["a.weight"], uneven.constants["a.weight"])
    for batch in image_batches(2, seed=8):
        left, right = (Runner(model.proto, ["logits"], 1).run(batch)["logits"] for model in (uneven, other))
        np.testing.assert_array_equal(left, right)


def test_uneven_channels_gain(uneven: FloatModel, with_config: Build, chip: ChipProfile, tmp_path: Path) -> None:
    noise = {}
    for switch in (False, True):
        config = with_config(repair={"equalize": switch}, promotion={"method": "none"})
        calibration = calibrate(uneven, image_batches(8), config)
        save_calibration(tmp_path / "c.npz", calibration)
        noise[switch] = quantize_network(uneven, load_calibration(tmp_path / "c.npz", uneven), config, chip).noise["logits"]
    assert noise[True] < 0.1 * noise[False]
