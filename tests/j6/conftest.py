"""Small ONNX graphs for the tests of the hardware model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.j6.chip import ChipProfile, load_chip


class Net:
    """Builds an ONNX graph node by node; weights are zeros, only shapes matter."""

    def __init__(self, opset: int = 17) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: tuple[int | str, ...]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))
        return name

    def weight(self, name: str, shape: tuple[int, ...], dtype: type = np.float32) -> str:
        self.weights.append(numpy_helper.from_array(np.zeros(shape, dtype), name))
        return name

    def op(self, kind: str, inputs: list[str], name: str, outputs: int = 1, **attributes: object) -> str:
        names = [name] if outputs == 1 else [f"{name}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=name, **attributes))
        return names[0]

    def conv(self, source: str, name: str, channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1, group: int = 1) -> str:
        weight = self.weight(f"{name}.w", (channels_out, channels_in // group, kernel, kernel))
        pad = kernel // 2
        return self.op("Conv", [source, weight], name, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, group=group)

    def model(self, *outputs: str) -> onnx.ModelProto:
        values = [helper.make_empty_tensor_value_info(name) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, values, self.weights)
        inferred = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9))
        return inferred

    def save(self, path: Path, *outputs: str) -> Path:
        onnx.save(self.model(*outputs), str(path))
        return path


def add_qdq(net: Net, source: str, name: str, dtype: type = np.int8) -> str:
    """Quantize and dequantize a tensor; returns the dequantized name."""
    scale = net.weight(f"{name}.scale", (), np.float32)
    zero = net.weight(f"{name}.zero", (), dtype)
    quantized = net.op("QuantizeLinear", [source, scale, zero], f"{name}.q")
    return net.op("DequantizeLinear", [quantized, scale, zero], f"{name}.dq")


@pytest.fixture(scope="session")
def j6m() -> ChipProfile:
    return load_chip("j6m")


@pytest.fixture
def multitask(tmp_path: Path) -> Path:
    """Two camera images, a backbone and three heads with module names like the real export; QDQ on the trunk."""
    net = Net(opset=21)
    images = net.input("images", (2, 3, 32, 64))
    first = net.op("Relu", [net.conv(add_qdq(net, images, "in"), "/backbone/stem/Conv", 3, 16, stride=2)], "/backbone/stem/Relu")
    trunk = net.op("Relu", [net.conv(add_qdq(net, first, "a"), "/backbone/stage/Conv", 16, 32, stride=2)], "/backbone/stage/Relu")
    shared = add_qdq(net, trunk, "b")
    for head, channels in (("det_head", 10), ("map_head", 3), ("occ_head", 18)):
        net.conv(shared, f"/{head}/out/Conv", 32, channels, kernel=1)
    return net.save(tmp_path / "multitask_int8.onnx", "/det_head/out/Conv", "/map_head/out/Conv", "/occ_head/out/Conv")
