"""Which rule decides about which tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.config import QuantizationConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.quantization.calibrate import Calibration, calibrate
from pipeline.quantization.fusion import fused_tensors
from pipeline.quantization.model import FloatModel, load_float_model
from pipeline.quantization.plan import make_plan
from pipeline.quantization.qdq import weight_choice

Build = Callable[..., QuantizationConfig]


def test_path_into_a_grid_is_int16_back_to_gemm_and_inputs(
    deformable_model: FloatModel, deformable_calibration: Calibration, config: QuantizationConfig
) -> None:
    plan = make_plan(deformable_model, config, deformable_calibration.statistics)
    for name in ("ego2img", "anchors", "/offset/Add_output_0", "/MatMul_output_0", "/Div_output_0", "/Sub_output_0", "/Unsqueeze_output_0"):
        assert plan.tensors[name].dtype == "int16", plan.explain(name)
        assert "GridSample grid" in plan.tensors[name].rule
    for name in ("images", "features", "/GridSample_output_0", "/value/Add_output_0"):
        assert plan.tensors[name].dtype == "int8", plan.explain(name)


def test_grid_range_is_fixed(deformable_model: FloatModel, deformable_calibration: Calibration, config: QuantizationConfig) -> None:
    plan = make_plan(deformable_model, config, deformable_calibration.statistics)
    assert plan.tensors["/Unsqueeze_output_0"].scale == 2.0 / 32768
    assert "fixed for a sampling grid" in plan.explain("/Unsqueeze_output_0")


def test_views_share_the_storage_of_their_source(
    deformable_model: FloatModel, deformable_calibration: Calibration, config: QuantizationConfig
) -> None:
    plan = make_plan(deformable_model, config, deformable_calibration.statistics)
    assert plan.tensors["/Transpose_output_0"].root == "ego2img"
    assert plan.tensors["/Transpose_output_0"].scale == plan.tensors["ego2img"].scale


def test_fused_tensors_have_no_quantizer(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    fused = fused_tensors(conv_model)
    assert fused["/stem/Conv_output_0"] == "/Relu_output_0"
    assert fused["/Sigmoid_output_0"] == "/Mul_output_0"  # SiLU
    plan = make_plan(conv_model, config, conv_calibration.statistics)
    assert plan.tensors["/stem/Conv_output_0"].threshold is None
    assert "never stored" in plan.explain("/stem/Conv_output_0")


def test_bias_of_a_linear_layer_is_fused(deformable_model: FloatModel) -> None:
    assert fused_tensors(deformable_model)["/query/MatMul_output_0"] == "/query/Add_output_0"


def test_fixed_threshold_by_operator(deformable_model: FloatModel, deformable_calibration: Calibration, config: QuantizationConfig) -> None:
    plan = make_plan(deformable_model, config, deformable_calibration.statistics)
    assert plan.tensors["/Softmax_output_0"].scale == 1 / 32768
    assert plan.explain("/Softmax_output_0").endswith("int16 for operator type Softmax; range 1 fixed for Softmax")


def test_rules_override_and_are_named(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    rules = [
        {"pattern": "depthwise", "dtype": "int16"},  # module path
        {"pattern": "/point/*", "threshold": 3.0},  # node name
        {"pattern": "images", "observer": "minmax"},  # tensor name
        {"pattern": "/stem/Conv", "dtype": "float32"},  # a fused tensor stands for its block
    ]
    plan = make_plan(conv_model, with_config(rules=rules), conv_calibration.statistics)
    assert "int16" in plan.explain("/depthwise/Conv_output_0") and "rule 'depthwise'" in plan.explain("/depthwise/Conv_output_0")
    assert plan.tensors["/point/Conv_output_0"].threshold == 3.0
    assert "range by minmax, rule 'images'" in plan.explain("images")
    assert plan.tensors["/Relu_output_0"].threshold is None


def test_pattern_without_match_is_an_error(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    with pytest.raises(ConfigError, match="pattern 'haed\\*' matches no node"):
        make_plan(conv_model, with_config(rules=[{"pattern": "haed*", "dtype": "int16"}]), conv_calibration.statistics)


def test_contradicting_rules_are_an_error(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    rules = [{"pattern": "depth*", "dtype": "int16"}, {"pattern": "*wise", "dtype": "float32"}]
    with pytest.raises(ConfigError, match=r"dtype of tensor '/depthwise/Conv_output_0'.*'depth\*' says int16 and '\*wise' says float32"):
        make_plan(conv_model, with_config(rules=rules), conv_calibration.statistics)


def test_agreeing_rules_are_fine(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    rules = [{"pattern": "depth*", "dtype": "int16"}, {"pattern": "*wise", "dtype": "int16"}]
    assert make_plan(conv_model, with_config(rules=rules), conv_calibration.statistics).tensors["/depthwise/Conv_output_0"].dtype == "int16"


def test_every_tensor_can_be_explained(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    plan = make_plan(conv_model, config, conv_calibration.statistics)
    assert all(plan.explain(name).startswith(name) for name in conv_model.activations)
    with pytest.raises(ModelError, match="'nothing': not a float activation"):
        plan.explain("nothing")


def test_missing_statistics_are_named(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    partial = {name: value for name, value in conv_calibration.statistics.items() if name != "images"}
    with pytest.raises(ModelError, match="calibration holds no tensor 'images'"):
        make_plan(conv_model, config, partial)


def test_constant_matrix_on_the_left_is_geometry(tmp_path: Path) -> None:
    """`norm @ projection` changes units: the path into the grid goes through it, and the constant gets the grid's dtype."""
    value = helper.make_tensor_value_info
    nodes = [helper.make_node("MatMul", ["norm", "projection"], ["m"], name="scale"), helper.make_node("GridSample", ["map", "m4"], ["y"])]
    nodes.insert(1, helper.make_node("Reshape", ["m", "shape"], ["m4"]))
    constants = [numpy_helper.from_array(np.float32([[0.005, -1], [0, 1]]), "norm"), numpy_helper.from_array(np.int64([1, 1, 2, 2]), "shape")]
    inputs = [value("projection", TensorProto.FLOAT, [2, 2]), value("map", TensorProto.FLOAT, [1, 1, 4, 4])]
    graph = helper.make_graph(nodes, "geometry", inputs, [value("y", TensorProto.FLOAT, None)], constants)
    path = tmp_path / "geometry.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString())
    model, config = load_float_model(path), QuantizationConfig(calibration_batches=1, threads=1)
    batch = {"projection": np.float32([[100, 0], [0, 1]]), "map": np.ones((1, 1, 4, 4), np.float32)}
    plan = make_plan(model, config, calibrate(model, [batch], config).statistics)
    assert plan.tensors["projection"].dtype == "int16"
    choice = weight_choice(model, plan, model.nodes[0], 0)
    assert choice is not None and choice.dtype == "int16"


@pytest.mark.parametrize(
    ("threshold", "reason"),
    [
        (1e-38, "no normal float32 number"),
        (1e39, "no normal float32 number"),
        (1e5, "all becomes 0"),
        (1e-3, "% of the calibrated values lie beyond"),
    ],
)
def test_impossible_scale_names_the_rule(
    conv_model: FloatModel, conv_calibration: Calibration, with_config: Build, threshold: float, reason: str
) -> None:
    rules = [{"pattern": "/stem/Conv", "threshold": threshold}]
    with pytest.raises(ConfigError, match=rf"rule '/stem/Conv': threshold \S+ of tensor '/Relu_output_0' is impossible: .*{reason}"):
        make_plan(conv_model, with_config(rules=rules), conv_calibration.statistics)


def test_impossible_fixed_range_names_the_operator(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    with pytest.raises(ConfigError, match=r"fixed_thresholds: MaxPool|fixed_thresholds: ConvTranspose"):
        make_plan(conv_model, with_config(fixed_thresholds={"ConvTranspose": 1e-4}), conv_calibration.statistics)


@pytest.mark.parametrize("option", ["op_dtypes", "fixed_thresholds"])
def test_operator_type_that_does_not_exist(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"quantization\.{option}: 'Sofmax' is no ONNX operator type; did you mean 'Softmax'"):
        make_plan(conv_model, with_config(**{option: {"Sofmax": "int16" if option == "op_dtypes" else 1.0}}), conv_calibration.statistics)


def test_automatic_observer_names_its_choice(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    plan = make_plan(conv_model, with_config(observer="auto"), conv_calibration.statistics)
    assert "range by auto (" in plan.explain("images")


def test_unknown_tensor_gets_a_hint(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    with pytest.raises(ModelError, match="did you mean '/Relu_output_0'"):
        make_plan(conv_model, config, conv_calibration.statistics).explain("/Relu_output")
