"""The calibration pass, its linter and its file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import QuantizationConfig
from pipeline.errors import DataError, ModelError
from pipeline.quantization.calibrate import Calibration, calibrate, load_calibration, save_calibration
from pipeline.quantization.lint import lint_model, lint_statistics
from pipeline.quantization.model import FloatModel, load_float_model
from pipeline.quantization.observers import TensorStatistics
from tests.quantization.networks import deformable_batches, export, image_batches

Build = Callable[..., QuantizationConfig]


def test_statistics_are_those_of_the_tensors(conv_model: FloatModel, conv_calibration: Calibration) -> None:
    images = np.concatenate([batch["images"] for batch in image_batches(8)])
    statistics = conv_calibration.statistics["images"]
    assert (statistics.minimum, statistics.maximum, statistics.count) == (images.min(), images.max(), images.size)
    assert conv_calibration.statistics["/Relu_output_0"].minimum == 0.0
    assert "/stem/Conv_output_0" not in conv_calibration.statistics  # fused away


def test_memory_budget_does_not_change_the_result(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    small = calibrate(conv_model, image_batches(8), config, budget_bytes=20_000)
    for name, value in small.statistics.items():
        assert np.array_equal(value.histogram, conv_calibration.statistics[name].histogram)


def test_file_round_trip_is_exact_and_repeatable(tmp_path: Path, conv_model: FloatModel, conv_calibration: Calibration) -> None:
    save_calibration(tmp_path / "a.npz", conv_calibration)
    loaded = load_calibration(tmp_path / "a.npz", conv_model)
    save_calibration(tmp_path / "b.npz", loaded)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert len(loaded.analysis) == 2 and np.array_equal(loaded.analysis[0]["images"], conv_calibration.analysis[0]["images"])


def test_calibration_of_another_model_is_refused(tmp_path: Path, conv_calibration: Calibration, deformable_model: FloatModel) -> None:
    save_calibration(tmp_path / "c.npz", conv_calibration)
    with pytest.raises(ModelError, match="made with another model"):
        load_calibration(tmp_path / "c.npz", deformable_model)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"text"])
def test_broken_calibration_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "calibration.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"calibration\.npz: not a calibration file"):
        load_calibration(path)


def test_too_few_batches(conv_model: FloatModel, config: QuantizationConfig, with_config: Build) -> None:
    with pytest.raises(DataError, match=r"3 batches, quantization\.calibration_batches = 8.*allow_fewer_batches"):
        calibrate(conv_model, image_batches(3), config)
    assert calibrate(conv_model, image_batches(3), with_config(allow_fewer_batches=True)).batches == 3


def test_no_batch_at_all_is_an_error_even_with_the_override(conv_model: FloatModel, with_config: Build) -> None:
    with pytest.raises(DataError, match="no batch was given"):
        calibrate(conv_model, [], with_config(allow_fewer_batches=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda image: np.clip(image * 60 + 120, 0, 255), "pixels that were not normalised"),
        (lambda image: image[:, :, :-1], r"has shape \(2, 3, 31, 64\), the model reads \(2, 3, 32, 64\)"),
        (lambda image: image.astype(np.float64), "is float64, the model reads FLOAT"),
        (lambda image: (image * 60 + 120).clip(0, 255).astype(np.uint8), "is uint8, the model reads FLOAT"),
        (lambda image: np.where(image == image.max(), np.nan, image), "holds 1 NaN or infinite"),
    ],
)
def test_linter_refuses(conv_model: FloatModel, config: QuantizationConfig, change: Callable[[np.ndarray], np.ndarray], message: str) -> None:
    batches = image_batches(8)
    batches[2] = {"images": change(batches[2]["images"])}
    with pytest.raises(DataError, match=f"calibration batch 2: input 'images' .*{message}"):
        calibrate(conv_model, batches, config)


def test_linter_names_a_missing_input(deformable_model: FloatModel, config: QuantizationConfig) -> None:
    batch = {name: value for name, value in deformable_batches(1)[0].items() if name != "ego2img"}
    with pytest.raises(DataError, match="calibration batch 0: input 'ego2img' is missing; the model reads images, ego2img"):
        calibrate(deformable_model, [batch], config)


def test_repeated_batches_are_reported(conv_model: FloatModel, config: QuantizationConfig) -> None:
    findings = calibrate(conv_model, image_batches(2) * 4, config).findings
    assert any("6 of 8 batches repeat" in str(finding) for finding in findings)


def test_exploding_quotient_is_named_with_a_clamp(deformable_model: FloatModel) -> None:
    statistics = TensorStatistics.empty()
    statistics.update(np.append(np.linspace(0.01, 1.0, 9999), 1.3e5).astype(np.float32))
    (finding,) = lint_statistics(deformable_model, {"/Div_output_0": statistics})
    assert "exploding: reaches 1.3e+05" in finding.message and "clamp the divisor '/Clip_output_0'" in finding.message


def test_dead_tensor_is_reported(conv_model: FloatModel) -> None:
    statistics = TensorStatistics.empty()
    statistics.update(np.zeros(10, np.float32))
    (finding,) = lint_statistics(conv_model, {"/Relu_output_0": statistics})
    assert finding.message == "dead: zero in every batch"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda image: (image + 3.0).clip(0.0, 6.0) / 6.0, "looks divided by 255 but not standardised"),
        (lambda image: image * 0.01, "was another mean or standard deviation used in training"),
        (lambda image: image + 2.5, "was another mean or standard deviation used in training"),
    ],
)
def test_oddly_normalised_images_are_reported(
    conv_model: FloatModel, config: QuantizationConfig, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    batches = [{"images": change(batch["images"])} for batch in image_batches(8)]
    assert any(finding.tensor == "images" and message in finding.message for finding in calibrate(conv_model, batches, config).findings)


def test_standardised_images_are_not_reported(conv_calibration: Calibration) -> None:
    assert not [finding for finding in conv_calibration.findings if finding.tensor == "images"]


def test_shared_weights_are_reported(tmp_path: Path) -> None:
    layer = torch.nn.Conv2d(3, 3, 3, padding=1)
    path = export(torch.nn.Sequential(layer, torch.nn.ReLU(), layer), {"images": torch.zeros(1, 3, 16, 16)}, ["y"], tmp_path / "twice.onnx")
    findings = lint_model(load_float_model(path))
    assert len(findings) == 1 and "weight shared by" in findings[0].message
