from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from pipeline.errors import ModelError
from pipeline.j6.chip import ChipProfile
from pipeline.j6.compiler import CompileOptions, compile_graph
from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_model, import_onnx
from pipeline.j6.ir import macs
from tests.j6.conftest import Net, add_qdq


def test_macs_of_matrix_operators_by_hand(tmp_path: Path):
    net = Net()
    x = net.input("x", (1, 8, 10, 12))
    conv = net.conv(x, "c", 8, 6, kernel=3, group=2)
    flat = net.op("Reshape", [conv, _constant(net, "shape", [6, 120])], "r")
    net.op("MatMul", [flat, net.weight("m", (120, 5))], "mm")
    graph = import_onnx(net.save(tmp_path / "m.onnx", "mm"))
    by_kind = {op.kind: macs(op, graph.tensors) for op in graph.ops}
    assert by_kind["Conv"] == 10 * 12 * 6 * 4 * 9
    assert by_kind["MatMul"] == 6 * 5 * 120


def _constant(net: Net, name: str, values: list[int]) -> str:
    net.weights.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
    return name


def test_constant_of_shape_counts_as_weight(tmp_path: Path):
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    fill = net.op("ConstantOfShape", [_constant(net, "s", [4, 3, 1, 1])], "w")
    net.op("Conv", [x, fill], "c")
    graph = import_onnx(net.save(tmp_path / "m.onnx", "c"))
    assert [op.kind for op in graph.ops] == ["Conv"]
    assert graph.ops[0].weights == ("w",)
    assert graph.tensors["w"].constant and graph.tensors["w"].bytes == 12


def test_qdq_is_folded_into_dtypes_and_rescaling_is_an_operator(tmp_path: Path):
    net = Net(opset=21)
    x = net.input("x", (1, 4, 8, 8))
    first = net.conv(add_qdq(net, x, "a"), "c1", 4, 4)
    wide = add_qdq(net, first, "b", np.int16)
    narrow = add_qdq(net, first, "c")
    net.op("Add", [wide, net.conv(narrow, "c2", 4, 4)], "sum")
    graph = import_onnx(net.save(tmp_path / "m.onnx", "sum"))
    assert graph.quantized
    assert [op.kind for op in graph.ops] == ["Conv", "Requantize", "Conv", "Add"]
    assert graph.tensors["x"].dtype == "int8"
    assert graph.tensors["c1"].dtype == "int16"
    assert graph.tensors["c.q"].dtype == "int8"


def test_float_model_takes_the_assumed_dtype(tmp_path: Path):
    net = Net()
    net.conv(net.input("x", (1, 4, 8, 8)), "c", 4, 4)
    path = net.save(tmp_path / "m.onnx", "c")
    assert import_onnx(path).tensors["c"].dtype == "int8"
    assert import_onnx(path, assume_dtype="int16").tensors["c"].bytes == 2 * 4 * 64


def test_dynamic_dimension_names_it_and_the_flag(tmp_path: Path):
    net = Net()
    net.conv(net.input("images", ("batch", 3, 16, 16)), "c", 3, 8)
    path = net.save(tmp_path / "m.onnx", "c")
    with pytest.raises(ModelError, match=r"'images' has a dynamic dimension \(batch of \?x3x16x16\).*--shape images=Nx3x16x16"):
        import_onnx(path)
    graph = import_onnx(path, {"images": (2, 3, 16, 16)})
    assert graph.tensors["c"].shape == (2, 8, 16, 16)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"img": (1, 3, 16, 16)}, "--shape names input 'img'"),
        ({"images": (1, 3, 16)}, "has 3 dimensions"),
        ({"images": (1, 4, 16, 16)}, "gives 4 for axis 1"),
    ],
)
def test_wrong_shape_flag(tmp_path: Path, shapes, message):
    net = Net()
    net.conv(net.input("images", ("n", 3, 16, 16)), "c", 3, 8)
    with pytest.raises(ModelError, match=message):
        import_onnx(net.save(tmp_path / "m.onnx", "c"), shapes)


def test_shape_arithmetic_is_evaluated(tmp_path: Path):
    net = Net()
    x = net.input("x", (2, 6, 4, 4))
    shape = net.op("Shape", [x], "sh")
    batch = net.op("Gather", [shape, _constant(net, "zero", [0])], "b")
    target = net.op("Concat", [batch, _constant(net, "rest", [-1])], "t", axis=0)
    net.op("Reshape", [x, target], "flat")
    graph = import_onnx(net.save(tmp_path / "m.onnx", "flat"))
    assert graph.tensors["flat"].shape == (2, 96)
    assert [op.kind for op in graph.ops] == ["Reshape"]


def test_bad_files_are_named(tmp_path: Path, multitask: Path):
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(multitask.read_bytes()[:500])
    text = tmp_path / "text.onnx"
    text.write_text("not a model")
    empty = tmp_path / "empty.onnx"
    empty.write_bytes(b"")
    for path in (cut, text, empty, tmp_path / "absent.onnx"):
        with pytest.raises(ModelError, match=str(path)):
            import_onnx(path)


def test_control_flow_is_refused(tmp_path: Path):
    body = helper.make_graph([helper.make_node("Identity", ["k"], ["v"])], "b", [], [helper.make_empty_tensor_value_info("v")])
    net = Net()
    x = net.input("k", (1,))
    net.nodes.append(helper.make_node("If", [x], ["y"], name="branch", then_branch=body, else_branch=body))
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph(net.nodes, "g", net.inputs, [helper.make_empty_tensor_value_info("y")])), str(path))
    with pytest.raises(ModelError, match="'branch' is If: control flow has no static cost"):
        import_onnx(path)


def test_cycles_and_dangling_names_are_refused(tmp_path: Path):
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    net.op("Add", [x, "back"], "sum")
    net.op("Relu", ["sum"], "back")
    with pytest.raises(ModelError, match=r"\(Add\) reads tensor 'back', which no node before it makes"):
        import_onnx(net.save(tmp_path / "m.onnx", "sum"))


def test_weight_that_does_not_fit_its_input_is_refused(tmp_path: Path):
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    net.op("Conv", [x, net.weight("w", (6, 3, 1, 1))], "c")
    output = helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, [1, 6, 8, 8])
    graph = helper.make_graph(net.nodes, "g", net.inputs, [output], net.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(tmp_path / "m.onnx"))
    with pytest.raises(ModelError, match=r"\(Conv\) gets 4 channels; its weight \[6, 3, 1, 1\] takes 3"):
        import_onnx(tmp_path / "m.onnx")


def test_custom_operator_runs_on_the_cpu_once_its_output_shape_is_given(tmp_path: Path, j6m: ChipProfile):
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    net.nodes.append(helper.make_node("Nms", [net.conv(x, "c", 4, 4)], ["kept"], domain="acme", name="nms"))
    net.op("Relu", ["kept"], "y")
    graph = helper.make_graph(net.nodes, "g", net.inputs, [helper.make_empty_tensor_value_info("y")], net.weights)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)]), str(path))
    with pytest.raises(ModelError, match=r"'kept', made by node 'nms' \(acme.Nms\), cannot be inferred; give it with --shape kept="):
        import_onnx(path)
    with pytest.raises(ModelError, match="--shape names c, whose shape follows from the graph"):
        import_onnx(path, {"kept": (1, 4, 8, 8), "c": (1, 5, 8, 8)})
    plan = compile_graph(fuse(import_onnx(path, {"kept": (1, 4, 8, 8)})), j6m, CompileOptions())
    assert [(block.kind, block.unit) for block in plan.blocks] == [("Conv", "TAE"), ("acme.Nms", "CPU"), ("Relu", "VAE")]


@pytest.mark.parametrize(("plane", "unit"), [((512, 512), "VAE"), ((1, 70000), "CPU")])
def test_limit_of_a_reduction_holds_for_each_axis(tmp_path: Path, j6m: ChipProfile, plane: tuple[int, int], unit: str):
    net = Net(opset=18)
    x = net.input("x", (1, 4, *plane))
    net.op("ReduceMean", [x, _constant(net, "axes", [2, 3])], "mean", keepdims=1)
    plan = compile_graph(fuse(import_onnx(net.save(tmp_path / "m.onnx", "mean"))), j6m, CompileOptions())
    assert [block.unit for block in plan.blocks] == [unit]


REASONS = (
    "opset",
    "cannot be inferred",
    "which the hardware model does not know",
    "control flow has no static cost",
    "is not a tensor",
    "has a dynamic dimension",
    "the graph has no node",
    "shape inference failed",
    "which no node before it makes",
)


def outcome_of(model: onnx.ModelProto, name: str, chip: ChipProfile) -> str:
    """ "compiled", or the reason of the refusal."""
    try:
        plan = compile_graph(fuse(import_model(model, Path(name), "hash")), chip, CompileOptions())
    except ModelError as error:
        assert name in str(error)
        return next((reason for reason in REASONS if reason in str(error)), f"unexpected: {error}")
    assert plan.schedule.makespan_ms >= 0
    return "compiled"


def test_models_inside_the_onnx_package_compile_or_are_refused_with_a_reason(j6m):
    """The light models, the other model files, and the node tests that the package generates: every one is counted."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data"
    light = sorted((folder / "light").glob("light_*.onnx"))
    assert Counter(outcome_of(onnx.load(path), path.name, j6m) for path in light) == {"compiled": 9}

    files = sorted(path for path in folder.rglob("*.onnx") if path not in light)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = [(case.model, case.name) for case in collect_testcases(None)]
    outcomes = Counter(outcome_of(model, name, j6m) for model, name in cases)
    outcomes_of_files = Counter(outcome_of(onnx.load(path), path.parent.name, j6m) for path in files)
    assert set(outcomes) | set(outcomes_of_files) <= {"compiled", *REASONS}
    assert sum(outcomes.values()) == len(cases) and sum(outcomes_of_files.values()) == len(files)
    assert outcomes["compiled"] >= 0.77 * len(cases)
    assert outcomes_of_files["compiled"] >= 0.77 * len(files)


def test_zoo_macs_agree_with_the_published_count(shared: Path):
    import csv

    table = {
        row["graph"]: float(row["gflops_graph"])
        for row in csv.DictReader((shared / "latency" / "measured.csv").open())
        if row["graph"] and row["gflops_graph"]
    }
    assert table
    for name, gflops in table.items():
        graph = import_onnx(shared / "zoo" / name)
        assert 2e-9 * sum(macs(op, graph.tensors) for op in graph.ops) == pytest.approx(gflops, abs=6e-4), name
