from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.models.export import example_inputs, export
from pipeline.models.multitask import MultitaskModel
from pipeline.models.predictor import onnx_session, torch_session
from pipeline.models.weights import SavedModel

# What the accelerator or its host side can run with static shapes; no scatter, no NonZero, no Where, no dynamic shape arithmetic.
OPERATORS = {
    "Add", "AveragePool", "Clip", "Concat", "Constant", "Conv", "Exp", "Gather", "Gelu", "GridSample", "Identity", "LayerNormalization",
    "MatMul", "Mul",     "Reciprocal", "ReduceSum", "Relu", "Reshape", "Resize", "Slice", "Softmax", "Split", "Squeeze", "Sub", "Transpose",
    "Unsqueeze",
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(model: MultitaskModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    export(SavedModel(model, ("detection", "map")), folder / "model.onnx", folder / "contract.json")
    return folder


def test_onnxruntime_gives_what_torch_gives(exported: Path, model: MultitaskModel) -> None:
    example = example_inputs(model)
    example["images"] = np.random.default_rng(7).normal(size=example["images"].shape).astype(np.float32)
    expected, found = torch_session(model)(example), onnx_session(exported / "model.onnx", 1)(example)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-4, rtol=1e-4)


def test_graph_is_static_and_uses_operators_of_the_chip(exported: Path) -> None:
    graph = onnx.load(exported / "model.onnx").graph
    assert {node.op_type for node in graph.node} <= OPERATORS
    assert all(dimension.dim_value > 0 for value in (*graph.input, *graph.output) for dimension in value.type.tensor_type.shape.dim)


def test_every_node_with_work_belongs_to_one_head(exported: Path) -> None:
    heads = json.loads((exported / "contract.json").read_text())["heads"]
    prefixes = [prefix for names in heads.values() for prefix in names]
    graph = onnx.load(exported / "model.onnx").graph
    work = [node.name for node in graph.node if node.op_type in ("Conv", "MatMul", "GridSample", "Softmax", "Gelu")]
    assert work
    assert all(sum(name.startswith(prefix) for prefix in prefixes) == 1 for name in work)


def test_contract_describes_inputs_outputs_and_anchors(exported: Path, model: MultitaskModel) -> None:
    contract = json.loads((exported / "contract.json").read_text())
    assert {value["name"]: tuple(value["shape"]) for value in contract["inputs"]} == {
        name: value.shape for name, value in example_inputs(model).items()
    }
    np.testing.assert_array_equal(np.float32(contract["anchors"]["boxes"]), model.box_anchors.numpy())
    assert contract["trained_tasks"] == ["detection", "map"]


def test_training_only_parts_stay_behind(exported: Path) -> None:
    graph = onnx.load(exported / "model.onnx").graph
    assert [value.name for value in graph.output] == ["det_logits", "det_boxes", "det_features_out", "map_logits", "map_states", "occupancy_logits"]
    assert not any("auxiliary" in node.name for node in graph.node)


def test_export_is_deterministic(exported: Path, model: MultitaskModel, tmp_path: Path) -> None:
    export(SavedModel(model, ("detection", "map")), tmp_path / "model.onnx", tmp_path / "contract.json")
    for name in ("model.onnx", "contract.json"):
        assert (tmp_path / name).read_bytes() == (exported / name).read_bytes()
