from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import numpy_helper

from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_onnx
from tests.j6.conftest import Net


def kinds(net: Net, tmp_path: Path, *outputs: str, enable: bool = True) -> list[list[str]]:
    fused = fuse(import_onnx(net.save(tmp_path / "m.onnx", *outputs)), enable)
    return [[op.kind for op in block.ops] for block in fused.blocks]


def scalar(net: Net, name: str, value: float) -> str:
    net.weights.append(numpy_helper.from_array(np.array(value, np.float32), name))
    return name


def silu(net: Net, x: str, name: str) -> str:
    return net.op("Mul", [x, net.op("Sigmoid", [x], f"{name}.s")], name)


def test_conv_silu_and_residual_become_one_block(tmp_path: Path):
    net = Net()
    x = net.input("x", (1, 8, 8, 8))
    first = silu(net, net.conv(x, "c1", 8, 8), "a1")
    net.op("Add", [first, silu(net, net.conv(first, "c2", 8, 8), "a2")], "sum")
    assert kinds(net, tmp_path, "sum") == [["Conv", "Silu"], ["Conv", "Silu", "Add"]]
    assert len(kinds(net, tmp_path, "sum", enable=False)) == 7


def test_a_value_read_twice_is_not_swallowed(tmp_path: Path):
    net = Net()
    conv = net.conv(net.input("x", (1, 8, 8, 8)), "c", 8, 8)
    net.op("Relu", [conv], "r")
    net.op("Sigmoid", [conv], "s")
    assert kinds(net, tmp_path, "r", "s") == [["Conv"], ["Relu"], ["Sigmoid"]]


def test_gelu_in_both_spellings(tmp_path: Path):
    net = Net()
    x = net.input("x", (4, 16))
    erf = net.op("Erf", [net.op("Div", [x, scalar(net, "root", 1.4142)], "d")], "e")
    plus = net.op("Add", [erf, scalar(net, "one", 1.0)], "p")
    gelu = net.op("Mul", [net.op("Mul", [x, plus], "m"), scalar(net, "half", 0.5)], "g")
    half = net.op("Mul", [gelu, scalar(net, "half2", 0.5)], "h")
    plus = net.op("Add", [net.op("Erf", [net.op("Mul", [gelu, scalar(net, "inv", 0.7071)], "d2")], "e2"), scalar(net, "one2", 1.0)], "p2")
    net.op("Mul", [half, plus], "g2")
    assert kinds(net, tmp_path, "g2") == [["Gelu", "Gelu"]]


def test_decomposed_layer_norm_and_softmax(tmp_path: Path):
    net = Net()
    x = net.input("x", (4, 16))
    centred = net.op("Sub", [x, net.op("ReduceMean", [x], "mean", axes=[-1])], "sub")
    variance = net.op("ReduceMean", [net.op("Pow", [centred, scalar(net, "two", 2.0)], "sq")], "var", axes=[-1])
    root = net.op("Sqrt", [net.op("Add", [variance, scalar(net, "eps", 1e-5)], "plus")], "root")
    normal = net.op("Mul", [net.op("Div", [centred, root], "div"), net.weight("gamma", (16,))], "mul")
    normal = net.op("Add", [normal, net.weight("beta", (16,))], "ln")
    shifted = net.op("Sub", [normal, net.op("ReduceMax", [normal], "max", axes=[-1])], "shift")
    exp = net.op("Exp", [shifted], "exp")
    axis = net.weight("axis", (1,), np.int64)
    net.op("Div", [exp, net.op("ReduceSum", [exp, axis], "total")], "soft")
    assert kinds(net, tmp_path, "soft") == [["LayerNormalization"], ["Softmax"]]


def test_views_move_no_data(tmp_path: Path):
    net = Net()
    conv = net.conv(net.input("x", (1, 8, 4, 4)), "c", 8, 8)
    net.weights.append(numpy_helper.from_array(np.array([1, 128], np.int64), "shape"))
    flat = net.op("Reshape", [conv, "shape"], "flat")
    net.op("Gemm", [flat, net.weight("w", (128, 10))], "fc")
    fused = fuse(import_onnx(net.save(tmp_path / "m.onnx", "fc")))
    assert [block.kind for block in fused.blocks] == ["Conv", "Gemm"]
    assert fused.blocks[1].inputs == ("c",)


def test_layout_changes_around_maps_are_free_and_head_shuffles_are_not(tmp_path: Path):
    """The chip keeps maps channel-last: NHWC outputs cost nothing, a real transpose of attention heads does."""
    net = Net()
    conv = net.conv(net.input("x", (1, 8, 4, 4)), "c", 8, 8)
    net.op("Transpose", [conv], "nhwc", perm=[0, 2, 3, 1])
    tokens = net.op("Reshape", [conv, _shape(net, "s1", [1, 8, 16])], "tokens")
    rows = net.op("Transpose", [tokens], "rows", perm=[0, 2, 1])
    heads = net.op("Reshape", [rows, _shape(net, "s2", [1, 16, 2, 4])], "heads")
    net.op("Transpose", [heads], "split", perm=[0, 2, 1, 3])
    assert kinds(net, tmp_path, "nhwc", "split") == [["Conv"], ["Transpose"]]


def _shape(net: Net, name: str, values: list[int]) -> str:
    net.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
    return name
