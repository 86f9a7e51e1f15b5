"""The QDQ file: standard ONNX, the chip's scales, integers that an integer-only machine can use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, numpy_helper

from pipeline.config import QuantizationConfig
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.convention import quantize
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, make_plan
from pipeline.quantization.qdq import readable_name, write_qdq
from pipeline.quantization.sessions import Runner
from tests.quantization.networks import deformable_batches, image_batches

Build = Callable[..., QuantizationConfig]


def constants(proto: ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def test_is_valid_onnx_with_the_same_interface(
    conv_model: FloatModel,
    conv_calibration: Calibration,
    deformable_model: FloatModel,
    deformable_calibration: Calibration,
    config: QuantizationConfig,
) -> None:
    for model, calibration in ((conv_model, conv_calibration), (deformable_model, deformable_calibration)):
        proto = write_qdq(model, make_plan(model, config, calibration.statistics))
        onnx.checker.check_model(proto, full_check=True)
        assert [value.name for value in proto.graph.input] == list(model.inputs)
        assert [value.name for value in proto.graph.output] == list(model.outputs)
        # What a reader does who knows nothing of this project: default session options, all of onnxruntime's optimizations.
        onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def test_same_bytes_twice(deformable_model: FloatModel, deformable_calibration: Calibration, config: QuantizationConfig) -> None:
    files = [
        write_qdq(deformable_model, make_plan(deformable_model, config, deformable_calibration.statistics)).SerializeToString(deterministic=True)
        for _ in range(2)
    ]
    assert files[0] == files[1]


def test_every_zero_point_is_zero(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    proto = write_qdq(conv_model, make_plan(conv_model, config, conv_calibration.statistics))
    values = constants(proto)
    pairs = [node for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert pairs and all(not values[node.input[2]].any() for node in pairs)
    assert {str(values[node.input[2]].dtype) for node in pairs} == {"int8", "int16", "int32"}


def test_weights_are_int8_per_channel_and_bias_int32_in_accumulator_scale(
    conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig
) -> None:
    plan = make_plan(conv_model, config, conv_calibration.statistics)
    values = constants(write_qdq(conv_model, plan))
    weight, scale = values["stem.weight__int8"], values["stem.weight__int8__scale"]
    assert weight.dtype == np.int8 and scale.shape == (8,)
    np.testing.assert_allclose(weight * scale[:, None, None, None], conv_model.constants["stem.weight"], atol=0.51 * scale.max())
    bias_name = next(name for name in values if name.startswith("stem.bias__int32") and name.endswith("/stem/Conv"))
    bias_scale = values[f"{bias_name}__scale"]
    np.testing.assert_allclose(bias_scale, plan.tensors["images"].scale * scale, rtol=1e-6)
    np.testing.assert_allclose(values[bias_name] * bias_scale, conv_model.constants["stem.bias"], atol=bias_scale.max())


def test_product_equals_integer_arithmetic(deformable_model: FloatModel, deformable_calibration: Calibration, config: QuantizationConfig) -> None:
    """int8 x int8 -> int32 (+ int32 bias) -> requantize, in integers, gives the tensor that the QDQ file gives in onnxruntime."""
    plan = make_plan(deformable_model, config, deformable_calibration.statistics)
    proto = write_qdq(deformable_model, plan)
    values = constants(proto)
    batch = deformable_batches(1, seed=5)[0]
    product = next(node for node in proto.graph.node if node.name == "/query/MatMul")
    weight = product.input[1].removesuffix("__dq")
    bias = next(name for name in values if name.startswith("query.bias__int32") and not name.endswith(("__scale", "__zero")))
    features = quantize(batch["features"], plan.tensors["features"].scale, "int8").astype(np.int64)
    accumulator = features @ values[weight].astype(np.int64) + values[bias]
    expected = quantize(accumulator * values[f"{bias}__scale"].astype(np.float64), plan.tensors["/query/Add_output_0"].scale, "int8")
    name = readable_name(deformable_model, plan, "/query/Add_output_0")
    computed = Runner(proto, [name], 1).run(batch)[name] / np.float32(plan.tensors["/query/Add_output_0"].scale)
    assert np.abs(np.rint(computed) - expected).max() <= 1  # float accumulation may fall on the other side of a half
    assert np.mean(np.rint(computed) != expected) < 0.01


def test_large_bias_fits_the_accumulator(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    """A bias far beyond the products' range raises the weight scale instead of overflowing int32."""
    plan = make_plan(conv_model, config, conv_calibration.statistics)
    images = replace(plan.tensors["images"], dtype="int16", threshold=1e-6)
    plan = replace(plan, tensors=plan.tensors | {"images": images})
    values = constants(write_qdq(conv_model, plan))
    bias = next(name for name in values if name.startswith("stem.bias__int32") and not name.endswith(("__scale", "__zero")))
    stored = values[bias] * values[f"{bias}__scale"].astype(np.float64)
    np.testing.assert_allclose(stored, conv_model.constants["stem.bias"], rtol=1e-4)


def test_power_of_two_scales(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    plan = make_plan(conv_model, with_config(power_of_two_scales=True), conv_calibration.statistics)
    scales = np.concatenate([value.ravel() for name, value in constants(write_qdq(conv_model, plan)).items() if name.endswith("__scale")])
    assert np.array_equal(np.exp2(np.rint(np.log2(scales))).astype(np.float32), scales)


def test_float32_plan_computes_the_float_model(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    """With every activation left in float only the weights are rounded: the outputs stay close."""
    plan = make_plan(conv_model, with_config(rules=[{"pattern": "*", "dtype": "float32"}]), conv_calibration.statistics)
    batch = image_batches(1, seed=9)[0]
    exact, rounded = (Runner(proto, ["logits"], 1).run(batch)["logits"] for proto in (conv_model.proto, write_qdq(conv_model, plan)))
    np.testing.assert_allclose(rounded, exact, atol=0.01)
    assert isinstance(plan, QuantPlan) and not plan.quantized()


def test_j6_compiler_reads_the_dtypes(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig, tmp_path: object) -> None:
    from pathlib import Path

    from pipeline.j6.graph import import_onnx

    plan = make_plan(conv_model, config, conv_calibration.statistics)
    path = Path(str(tmp_path)) / "q.onnx"
    path.write_bytes(write_qdq(conv_model, plan).SerializeToString())
    graph = import_onnx(path)
    assert graph.quantized
    for name in ("images", "/Relu_output_0", "/depthwise/Conv_output_0"):
        assert graph.tensors[name].dtype == plan.tensors[name].dtype
