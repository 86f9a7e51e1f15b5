"""`bevj6 quantize` and the stage: files in, files out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from pipeline.cli import main
from pipeline.config import Config, QuantizationConfig
from pipeline.errors import BevError, ChipError, ConfigError, DataError
from pipeline.paths import Paths
from pipeline.quantization.calibrate import Calibration, save_calibration
from pipeline.quantization.command import quantize_model, read_quantization
from pipeline.quantization.model import FloatModel
from pipeline.quantization.reports import read_plan
from pipeline.stages import quantize as stage
from tests.quantization.networks import deformable_batches, export, image_batches


def write_npy(folder: Path, count: int) -> Path:
    folder.mkdir()
    for index, batch in enumerate(image_batches(count)):
        np.save(folder / f"{index:03}.npy", batch["images"])
    return folder


def test_any_model_with_a_folder_of_arrays(tmp_path: Path, conv_path: Path) -> None:
    out = tmp_path / "q.onnx"
    result = quantize_model(conv_path, write_npy(tmp_path / "calib", 4), "j6m", out)
    onnx.checker.check_model(str(out))
    assert (tmp_path / "q_layer_wise_error.csv").read_text().startswith("tensor,node,module,op,dtype")
    assert json.loads((tmp_path / "q_sensitivity.json").read_text())["tensors"] == result.counts()


def test_one_folder_for_each_input_or_archives(tmp_path: Path, deformable_model: FloatModel) -> None:
    config = QuantizationConfig(calibration_batches=3, analysis_batches=1, threads=1)
    for index, batch in enumerate(deformable_batches(3)):
        for name, value in batch.items():
            (tmp_path / "folders" / name).mkdir(parents=True, exist_ok=True)
            np.save(tmp_path / "folders" / name / f"{index}.npy", value)
        (tmp_path / "archives").mkdir(exist_ok=True)
        np.savez(tmp_path / "archives" / f"{index}.npz", **batch)
    for kind in ("folders", "archives"):
        quantize_model(deformable_model.path, tmp_path / kind, "j6m", tmp_path / f"{kind}.onnx", config)
    assert (tmp_path / "folders.onnx").read_bytes() == (tmp_path / "archives.onnx").read_bytes()


def test_bad_folders(tmp_path: Path, deformable_model: FloatModel, conv_path: Path) -> None:
    out = tmp_path / "q.onnx"
    with pytest.raises(DataError, match="calibration folder not found"):
        quantize_model(conv_path, tmp_path / "none", "j6m", out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no calibration data for input 'images'"):
        quantize_model(deformable_model.path, tmp_path / "empty", "j6m", out)
    broken = write_npy(tmp_path / "broken", 2)
    (broken / "001.npy").write_bytes((broken / "001.npy").read_bytes()[:200])
    with pytest.raises(DataError, match=r"001\.npy: not a NumPy array file, or cut short"):
        quantize_model(conv_path, broken, "j6m", out)
    (tmp_path / "partial").mkdir()
    np.savez(tmp_path / "partial" / "0.npz", images=np.zeros(1))
    with pytest.raises(DataError, match=r"0\.npz: holds no array for input 'ego2img'; it has images"):
        quantize_model(deformable_model.path, tmp_path / "partial", "j6m", out)
    assert not out.exists()


def test_inputs_with_different_batches(tmp_path: Path, deformable_model: FloatModel) -> None:
    for name, value in deformable_batches(1)[0].items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / ("1.npy" if name == "anchors" else "0.npy"), value)
    with pytest.raises(DataError, match="inputs 'images' and 'anchors' have different batches"):
        quantize_model(deformable_model.path, tmp_path, "j6m", tmp_path / "q.onnx")


def test_pickled_arrays_are_refused(tmp_path: Path, conv_path: Path) -> None:
    folder = tmp_path / "calib"
    folder.mkdir()
    np.save(folder / "0.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"0\.npy"):
        quantize_model(conv_path, folder, "j6m", tmp_path / "q.onnx")


def test_unknown_chip(tmp_path: Path, conv_path: Path) -> None:
    with pytest.raises(ChipError):
        quantize_model(conv_path, tmp_path, "j7", tmp_path / "q.onnx")


def test_stage(tmp_path: Path, conv_path: Path, conv_calibration: Calibration) -> None:
    paths = Paths(tmp_path)
    paths.onnx.parent.mkdir()
    paths.onnx.write_bytes(conv_path.read_bytes())
    save_calibration(paths.calibration, conv_calibration)
    config = Config.model_validate({"quantization": {"qat": {"when": "never"}}})  # the task cannot judge a model that is not the product's
    stage.run(config, paths)
    first = {path: path.read_bytes() for path in (paths.int8_onnx, paths.report("layer_wise_error.csv"), paths.report("sensitivity.json"))}
    stage.run(config, paths)
    assert all(path.read_bytes() == content for path, content in first.items())


def test_failed_stage_keeps_the_last_result(tmp_path: Path, conv_path: Path, conv_calibration: Calibration) -> None:
    paths = Paths(tmp_path)
    paths.onnx.parent.mkdir()
    paths.onnx.write_bytes(conv_path.read_bytes())
    paths.int8_onnx.write_bytes(b"last good one")
    save_calibration(paths.calibration, conv_calibration)
    paths.calibration.write_bytes(paths.calibration.read_bytes()[:1000])
    with pytest.raises(BevError, match="cut short"):
        stage.run(Config(), paths)
    assert paths.int8_onnx.read_bytes() == b"last good one"


def test_explain_and_config_on_the_command_line(tmp_path: Path, conv_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "q.yaml"
    config.write_text("quantization:\n  calibration_batches: 4\n  rules: [{pattern: /depthwise/Conv, dtype: int16}]\n")
    calib = write_npy(tmp_path / "calib", 4)
    command = ["quantize", str(conv_path), "--calib", str(calib), "--out", str(tmp_path / "q.onnx"), "--config", str(config)]
    tensors = ["/depthwise/Conv_output_0", "stem.weight", "stem.bias", "/stem/Conv_output_0"]
    assert main([*command, *(part for tensor in tensors for part in ("--explain", tensor))]) == 0
    text = capsys.readouterr().out
    assert "/depthwise/Conv_output_0 (depthwise): activation, int16" in text and "rule '/depthwise/Conv'" in text
    assert "stem.weight (stem): weight, int8" in text and "8 scales" in text and "repair.rounding" in text
    assert "stem.bias (stem): bias, int32" in text and "never stored" in text
    assert main(["explain", "images", "--plan", str(tmp_path / "q_quant_plan.csv")]) == 0
    assert "images: activation, int8" in capsys.readouterr().out
    assert main(["explain", "image", "--plan", str(tmp_path / "q_quant_plan.csv")]) == 1
    assert "did you mean 'images'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("observer: entropy", "quantization.observer = 'entropy'"),
        ("obsrever: mse", "quantization.obsrever"),
        ("promotion: {top: 2.5}", "quantization.promotion"),
        ("rules: [{pattern: a}]", "quantization.rules.0"),
        ("{", "not a readable YAML file"),
        ("- 1", "quantization"),
    ],
)
def test_wrong_config_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "q.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_quantization(path)


def test_plan_as_applied_is_what_the_file_holds(tmp_path: Path, conv_path: Path) -> None:
    result = quantize_model(conv_path, write_npy(tmp_path / "calib", 4), "j6m", tmp_path / "q.onnx")
    rows = read_plan(tmp_path / "q_quant_plan.csv")
    stored = {tensor.name: tensor for tensor in result.proto.graph.initializer}
    for row in rows:
        if row.kind == "activation" and row.scale is not None:
            assert numpy_helper.to_array(stored[f"{row.tensor}__scale"]) == pytest.approx(row.scale, rel=1e-5)
    assert {row.kind for row in rows} == {"activation", "weight", "bias"}
    assert len({(row.tensor, row.node) for row in rows}) == len(rows)


def test_damaged_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    path.write_text("tensor,kind\na,b\n")
    with pytest.raises(DataError, match="not a quantization plan"):
        read_plan(path)
    with pytest.raises(DataError, match="file not found"):
        read_plan(tmp_path / "none.csv")


class Reciprocal(torch.nn.Module):
    """1 / |x|: int8 rounds small divisors to 0."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.reciprocal(images.abs().clamp(min=1e-6))


def test_reciprocal_that_becomes_infinite_is_named_and_reported(tmp_path: Path) -> None:
    network = torch.nn.Sequential(Reciprocal(), torch.nn.Conv2d(3, 3, 1))
    model = export(network, {"images": torch.ones(2, 3, 32, 64)}, ["y"], tmp_path / "reciprocal.onnx")
    calib = write_npy(tmp_path / "calib", 4)
    np.save(calib / "003.npy", np.where(np.arange(64) == 0, np.float32(0.0), np.load(calib / "003.npy")))
    config = QuantizationConfig.model_validate({"calibration_batches": 4, "analysis_batches": 4, "threads": 1, "qat": {"when": "never"}})
    quantize_model(model, calib, "j6m", tmp_path / "q.onnx", config)
    report = json.loads((tmp_path / "q_sensitivity.json").read_text())
    assert any("exploding: reaches 1e+06" in text and "clamp the divisor" in text for text in report["findings"])
    assert min(row["sqnr_db"] for row in report["ranking"]) == -200.0  # the divisor alone in int8: its reciprocal is infinite
