from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from pipeline.errors import ModelError
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
    for path in (cut, text, tmp_path / "absent.onnx"):
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


def test_models_inside_the_onnx_package_compile_or_are_refused_with_a_reason(j6m):
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data"
    light = sorted((folder / "light").glob("light_*.onnx"))
    assert len(light) == 9
    for path in light:
        assert compile_graph(fuse(import_onnx(path)), j6m, CompileOptions()).schedule.makespan_ms > 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = collect_testcases(None)
    outcome: Counter[str] = Counter()
    for case in cases:
        try:
            plan = compile_graph(fuse(import_model(case.model, Path(case.name), "hash")), j6m, CompileOptions())
            outcome["compiled"] += 1
            assert plan.schedule.makespan_ms >= 0
        except ModelError as error:
            assert case.name in str(error)
            outcome["refused"] += 1
    assert sum(outcome.values()) == len(cases)
    assert outcome["compiled"] > 0.75 * len(cases)


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
