"""From calibration to the INT8 model: accuracy, sensitivity, promotion, reports."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable

import numpy as np
import pytest

from pipeline.config import PromotionConfig, QatConfig, QuantizationConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.j6.chip import ChipProfile
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.compare import to_csv
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import make_plan
from pipeline.quantization.promotion import output_targets_db
from pipeline.quantization.qdq import readable_name, write_qdq
from pipeline.quantization.quantize import Quantized, needs_training, quantize_network
from pipeline.quantization.reports import sensitivity_report
from pipeline.quantization.sensitivity import measure
from pipeline.quantization.sessions import Runner
from tests.quantization.networks import deformable_batches, image_batches

Build = Callable[..., QuantizationConfig]


@pytest.fixture(scope="module")
def conv_int8(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig, chip: ChipProfile) -> Quantized:
    return quantize_network(conv_model, conv_calibration, config, chip)


@pytest.fixture(scope="module")
def deformable_int8(deformable_model: FloatModel, deformable_calibration: Calibration, with_config: Build, chip: ChipProfile) -> Quantized:
    return quantize_network(deformable_model, deformable_calibration, with_config(promotion={"method": "top", "top": 2}), chip)


def test_outputs_stay_close_on_unseen_data(conv_model: FloatModel, conv_int8: Quantized) -> None:
    for batch in image_batches(4, seed=77):
        exact, rounded = (Runner(proto, ["logits"], 1).run(batch)["logits"] for proto in (conv_model.proto, conv_int8.proto))
        assert np.abs(rounded - exact).max() < 0.02 * np.abs(exact).max()


def test_fused_kernels_agree_with_unfused(conv_int8: Quantized) -> None:
    """What onnxruntime makes of the file with all its optimisations stays within rounding of the exact reading."""
    import onnxruntime

    batch = image_batches(1, seed=3)[0]
    fused = onnxruntime.InferenceSession(conv_int8.proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(["logits"], batch)[0]
    exact = Runner(conv_int8.proto, ["logits"], 1).run(batch)["logits"]
    np.testing.assert_allclose(fused, exact, atol=0.02 * np.abs(exact).max())


def position_error(model: FloatModel, calibration: Calibration, config: QuantizationConfig) -> tuple[float, float]:
    """(error of the sampling positions in pixels of a 32 pixel wide feature map, relative error of the sampled features)."""
    plan = make_plan(model, config, calibration.statistics)
    tensors = ["/Unsqueeze_output_0", "/GridSample_output_0"]
    batch = deformable_batches(1, seed=11)[0]
    exact = Runner(model.proto, tensors, 1).run(batch)
    names = [readable_name(model, plan, name) for name in tensors]
    rounded = Runner(write_qdq(model, plan), names, 1).run(batch)
    inside = np.abs(exact[tensors[0]]).max(axis=-1) < 1.0
    grid = np.abs(rounded[names[0]] - exact[tensors[0]])[inside].max() * 16
    return float(grid), float(np.linalg.norm(rounded[names[1]] - exact[tensors[1]]) / np.linalg.norm(exact[tensors[1]]))


def test_sampling_grids_need_int16(deformable_model: FloatModel, deformable_calibration: Calibration, with_config: Build) -> None:
    wide = position_error(deformable_model, deformable_calibration, with_config())
    narrow = position_error(deformable_model, deformable_calibration, with_config(grid_dtype="int8"))
    assert wide[0] < 0.25 and narrow[0] > 2.0, (wide, narrow)
    assert narrow[1] > 5 * wide[1]


def test_sensitivity_measures_one_tensor_at_a_time(deformable_model: FloatModel, deformable_calibration: Calibration, with_config: Build) -> None:
    """A tensor forced to a ruinous range is found: nothing else explains the loss of its measurement."""
    rules = [{"pattern": "/value/*", "threshold": 60.0}]
    plan = make_plan(deformable_model, with_config(rules=rules), deformable_calibration.statistics)
    names = [name for name, decision in plan.roots().items() if decision.dtype == "int8"]
    ranked = measure(deformable_model, plan, names, deformable_calibration.analysis[:1], threads=1)
    assert ranked[0].tensor == "/value/Add_output_0"
    assert ranked[0].noise > 2 * ranked[1].noise


def test_promotions_are_int16_and_help(deformable_int8: Quantized) -> None:
    assert len(deformable_int8.promotion.reasons) == 2
    for name, reason in deformable_int8.promotion.reasons.items():
        assert deformable_int8.plan.tensors[name].dtype == "int16"
        assert reason in deformable_int8.plan.explain(name)
    assert sum(deformable_int8.noise.values()) < sum(deformable_int8.forms["planned"].values())


def test_promotion_can_be_switched_off(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build, chip: ChipProfile) -> None:
    result = quantize_network(conv_model, conv_calibration, with_config(promotion={"method": "none"}), chip)
    assert not result.promotion.reasons and result.promotion.extra_us == 0.0


def test_error_table(deformable_int8: Quantized) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(deformable_int8.errors))))
    assert {row["tensor"] for row in rows} == set(deformable_int8.plan.roots())
    assert [float(row["sqnr_db"]) for row in rows] == sorted(float(row["sqnr_db"]) for row in rows)
    first = next(row for row in rows if row["tensor"] == "images")
    assert first["sqnr_db"] == first["local_sqnr_db"]  # nothing is quantized before an input
    for row in rows:
        assert -1.0 <= float(row["cosine"]) <= 1.0000001
        assert 0.0 <= float(row["saturation"]) <= 1.0 and row["rule"]
    attention = next(row for row in rows if row["tensor"] == "/MatMul_1_output_0")
    assert float(attention["sqnr_db"]) < float(attention["local_sqnr_db"])  # part of its error comes from its inputs


def test_weights_are_in_the_error_table(conv_int8: Quantized) -> None:
    relu = next(row for row in conv_int8.errors if row.tensor == "/Relu_output_0")
    assert relu.weight_sqnr_db is not None and relu.weight_sqnr_db > 35.0  # the stem's convolution, fused in front of its ReLU


def test_report(deformable_int8: Quantized) -> None:
    report = sensitivity_report(deformable_int8)
    assert set(report["outputs"]) == {"refined", "out_features"}
    assert report["tensors"] == deformable_int8.counts()
    levels = [row["sqnr_db"] for row in report["ranking"]]
    assert levels == sorted(levels) and report["promoted"]
    assert {"tensor", "module", "op", "sqnr_db", "sqnr_by_output_db"} == set(report["ranking"][0])


def test_same_result_twice(
    conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig, conv_int8: Quantized, chip: ChipProfile
) -> None:
    again = quantize_network(conv_model, conv_calibration, config, chip)
    assert again.proto.SerializeToString(deterministic=True) == conv_int8.proto.SerializeToString(deterministic=True)
    assert to_csv(again.errors) == to_csv(conv_int8.errors)


def test_calibration_without_analysis_batches_is_refused(
    conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig, chip: ChipProfile
) -> None:
    bare = Calibration(conv_calibration.model_sha256, 8, conv_calibration.statistics, [], ())
    with pytest.raises(ModelError, match="keeps no analysis batch"):
        quantize_network(conv_model, bare, config, chip)


def test_training_starts_where_a_head_loses_too_much_or_without_a_task_where_a_target_is_missed(conv_int8: Quantized) -> None:
    proto, noise = conv_int8.proto, conv_int8.noise
    asked: list[object] = []

    def kept(model: object) -> dict[str, float | None]:
        asked.append(model)
        return {"detection": 0.97, "map": None}

    auto, never = QatConfig(), QatConfig(when="never")
    assert "logits reaches" in needs_training(noise, {"logits": 110.0}, proto, auto, None)[0]
    reason, shares = needs_training(noise, {"logits": 1.0}, proto, auto, kept)
    assert "detection keeps 97.00%" in reason and shares["detection"] == 0.97 and asked == [proto]
    assert needs_training(noise, {"logits": 110.0}, proto, auto, lambda model: {"detection": 0.995})[0] == ""  # the task has the say
    assert needs_training(noise, {"logits": 1.0}, proto, auto, None) == ("", {})
    assert needs_training(noise, {"logits": 110.0}, proto, never, kept) == ("", {})


def test_target_of_an_unknown_output_is_an_error(conv_model: FloatModel) -> None:
    with pytest.raises(ConfigError, match=r"'logit' is no float output.*did you mean 'logits'"):
        output_targets_db(conv_model, PromotionConfig(output_targets_db={"logit": 40.0}))
    assert output_targets_db(conv_model, PromotionConfig(output_targets_db={"logits": 40.0})) == {"logits": 40.0}


def test_training_is_used_automatically_and_explained(
    conv_model: FloatModel, conv_calibration: Calibration, with_config: Build, chip: ChipProfile
) -> None:
    qat = {"samples": 12, "epochs": 4, "learning_rate": 0.05}
    config = with_config(observer="percentile", percentile=97.0, promotion={"method": "none", "target_sqnr_db": 60.0}, qat=qat)
    result = quantize_network(conv_model, conv_calibration, config, chip, lambda: image_batches(12, seed=5))
    assert result.training.used and len(result.training.log) == 4
    assert sum(result.forms["trained"].values()) < sum(result.forms["promoted"].values())
    report = sensitivity_report(result)
    assert [row["form"] for row in report["forms"]] == ["activations", "planned", "repaired", "promoted", "trained"]
    assert report["first_lost"] == {"logits": "activations"}  # the crude ranges are to blame, not the weights
    assert report["training"]["used"] and "its target is 60 dB" in report["training"]["reason"]
