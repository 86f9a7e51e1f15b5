"""The chip's number format. Golden values: horizon_plugin_pytorch documents scale = threshold / 128 with the example 1/128, integers -128..127."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from pipeline.quantization.convention import channel_scales, covering_threshold, dequantize, fake_quantize, quantize, scale_of


def test_scale_is_threshold_over_128() -> None:
    assert scale_of(1.0, "int8") == 1 / 128
    assert scale_of(1.0, "int16") == 1 / 32768
    assert scale_of(6.0, "int8") == 0.046875


def test_threshold_itself_saturates_to_127() -> None:
    scale = scale_of(1.0, "int8")
    assert quantize(np.float32([1.0, 127 / 128, -1.0, -2.0, 2.0, 0.0]), scale, "int8").tolist() == [127, 127, -128, -128, 127, 0]
    assert quantize(np.float32([1.0, -1.0]), scale_of(1.0, "int16"), "int16").tolist() == [32767, -32768]


def test_halves_round_to_even() -> None:
    assert quantize(np.float32([0.5, 1.5, 2.5, -0.5, -1.5]), 1.0, "int8").tolist() == [0, 2, 2, 0, -2]


def test_power_of_two_scale_is_rounded_up() -> None:
    assert scale_of(1.0, "int8", power_of_two=True) == 2.0**-7
    assert scale_of(1.001, "int8", power_of_two=True) == 2.0**-6


def test_zero_threshold_gives_a_usable_scale() -> None:
    assert np.isfinite(fake_quantize(np.float32([0.0, 1e-20]), scale_of(0.0, "int8"), "int8")).all()


@given(st.floats(1e-3, 1e3), st.floats(-1e3, -1e-3), st.sampled_from(["int8", "int16"]))
def test_covering_threshold_saturates_neither_end(high: float, low: float, dtype: str) -> None:
    scale = scale_of(covering_threshold(low, high, dtype), dtype)
    values = np.float32([low, high])
    assert np.abs(dequantize(quantize(values, scale, dtype), scale) - values).max() <= 0.5001 * scale


def test_weights_have_one_scale_for_each_output_channel() -> None:
    weight = np.float32([[[1.0, -0.5]], [[-2.0, 0.1]], [[0.0, 0.0]]])
    scales = channel_scales(weight, 0)
    assert scales.tolist() == pytest.approx([1 / 127, 2 / 128, 1 / 128])


def test_same_integers_as_onnxruntime() -> None:
    """QuantizeLinear of onnxruntime is the reference for rounding and saturation."""
    import onnxruntime

    values = np.linspace(-3.1, 3.1, 4001, dtype=np.float32)
    scale = scale_of(2.7, "int8")
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])
    parameters = [numpy_helper.from_array(np.float32(scale), "s"), numpy_helper.from_array(np.int8(0), "z")]
    graph = helper.make_graph(
        [node],
        "q",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4001])],
        [helper.make_tensor_value_info("q", TensorProto.INT8, [4001])],
        parameters,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert np.array_equal(session.run(None, {"x": values})[0], quantize(values, scale, "int8"))
