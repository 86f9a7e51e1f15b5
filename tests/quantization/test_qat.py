"""Quantization-aware training: what it wins, that it is the same graph, and that it repeats itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pipeline.config import QuantizationConfig
from pipeline.errors import ModelError
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.model import FloatModel, load_float_model
from pipeline.quantization.plan import QuantPlan, make_plan
from pipeline.quantization.qat import Trained, train
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.sessions import Runner, output_noise
from pipeline.quantization.torch_graph import TorchGraph
from tests.quantization.networks import deformable_batches, image_batches

Build = Callable[..., QuantizationConfig]


def noise(model: FloatModel, plan: QuantPlan, batches: list[dict[str, np.ndarray]]) -> float:
    names = list(model.outputs)
    exact, rounded = Runner(model.proto, names, 1), Runner(write_qdq(model, plan), names, 1)
    pairs = [(exact.run(batch), rounded.run(batch)) for batch in batches]
    return output_noise([a[name] for a, _ in pairs for name in names], [b[name] for _, b in pairs for name in names])


@pytest.fixture(scope="module")
def crude(with_config: Build) -> QuantizationConfig:
    """Ranges that cost accuracy: what training is for."""
    return with_config(observer="percentile", percentile=97.0, qat={"epochs": 4, "samples": 12, "learning_rate": 0.05})


@pytest.fixture(scope="module")
def trained(conv_model: FloatModel, conv_calibration: Calibration, crude: QuantizationConfig) -> Trained:
    plan = make_plan(conv_model, crude, conv_calibration.statistics)
    return train(conv_model, plan, {}, image_batches(12, seed=5), conv_calibration.statistics, crude)


def test_torch_graph_is_the_float_model(conv_model: FloatModel, deformable_model: FloatModel) -> None:
    TorchGraph(conv_model).check(image_batches(1, seed=4)[0])
    TorchGraph(deformable_model).check(deformable_batches(1, seed=4)[0])


def test_training_wins_accuracy_on_unseen_data(
    conv_model: FloatModel, conv_calibration: Calibration, crude: QuantizationConfig, trained: Trained
) -> None:
    plan = make_plan(conv_model, crude, conv_calibration.statistics)
    unseen = image_batches(6, seed=99)
    assert noise(conv_model, trained.plan, unseen) < 0.7 * noise(conv_model, plan, unseen)


def test_ranges_are_frozen_after_the_warm_up(trained: Trained) -> None:
    assert [epoch.frozen for epoch in trained.log] == [False, True, True, True]


def test_same_graph_and_same_bytes_again(
    conv_model: FloatModel, conv_calibration: Calibration, crude: QuantizationConfig, trained: Trained
) -> None:
    plan = make_plan(conv_model, crude, conv_calibration.statistics)
    again = train(conv_model, plan, {}, image_batches(12, seed=5), conv_calibration.statistics, crude)
    before, after = write_qdq(conv_model, plan), write_qdq(conv_model, trained.plan)
    assert after.SerializeToString(deterministic=True) == write_qdq(conv_model, again.plan).SerializeToString(deterministic=True)
    assert [(node.op_type, list(node.input), list(node.output)) for node in before.graph.node] == [
        (node.op_type, list(node.input), list(node.output)) for node in after.graph.node
    ]
    assert {tensor.name: tensor.data_type for tensor in before.graph.initializer} == {
        tensor.name: tensor.data_type for tensor in after.graph.initializer
    }


def test_what_is_trained_is_what_is_written(conv_model: FloatModel, trained: Trained) -> None:
    """The integers of the plan are in the file: no scale was recomputed behind their back."""
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in write_qdq(conv_model, trained.plan).graph.initializer}
    for constant, weight in trained.plan.weights.items():
        np.testing.assert_array_equal(stored[f"{constant}__int8"], weight.integers)


def test_unknown_operator_is_named(tmp_path: Path) -> None:
    node = helper.make_node("CumSum", ["x", "axis"], ["y"], name="running_sum")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    axis = helper.make_tensor("axis", TensorProto.INT64, [], [1])
    path = tmp_path / "cumsum.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", values[:1], values[1:], [axis]), opset_imports=[helper.make_opsetid("", 21)]), path)
    with pytest.raises(ModelError, match=r"'running_sum'.*CumSum"):
        TorchGraph(load_float_model(path))
