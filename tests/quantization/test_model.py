"""What is refused before quantization, and with which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from pipeline.errors import ModelError
from pipeline.quantization.model import FloatModel, load_float_model
from tests.quantization.networks import ConvNet, export, image_batches


def tiny(shape: tuple[int | str, ...] = (1, 4), dtype: int = TensorProto.FLOAT, opset: int = 21) -> ModelProto:
    """y = x @ w."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weight = numpy_helper.from_array(np.eye(4).astype(kind), "w")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "tiny", [value("x", dtype, shape)], [value("y", dtype, None)], [weight]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def with_nan(model: ModelProto) -> ModelProto:
    weight = numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight[0, 0], weight[1, 1] = np.nan, np.inf
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "w"))
    return model


def quantized() -> ModelProto:
    model = tiny()
    model.graph.initializer.extend([numpy_helper.from_array(np.float32(0.1), "s"), numpy_helper.from_array(np.int8(0), "z")])
    model.graph.node.insert(0, helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantizer"))
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: with_nan(tiny()), "weight 'w' of node 'MatMul_0' holds 2 NaN or infinite values of 16"),
        (lambda: tiny(opset=12), "opset 12 is outside 13-23"),
        (lambda: tiny(opset=99), "opset 99 is outside 13-23"),
        (lambda: tiny(shape=("batch", 4)), "input 'x' dimension 0 is dynamic \\(batch\\)"),
        (lambda: tiny(dtype=TensorProto.FLOAT16), "tensor 'x' is FLOAT16"),
        (quantized, "already quantized: node 'quantizer' is QuantizeLinear"),
        (lambda: tiny(shape=(1, 5)), "shapes contradict"),
    ],
)
def test_refused_with_reason(build: Callable[[], ModelProto], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(build().SerializeToString())
    with pytest.raises(ModelError, match=message) as caught:
        load_float_model(path)
    assert str(path) in str(caught.value)


def test_missing_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.onnx"
    onnx.save(tiny(), str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert load_float_model(path).constants["w"].shape == (4, 4)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match="external weight data is missing"):
        load_float_model(path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="external weight data is missing"):
        load_float_model(Path(path.name))


@pytest.mark.parametrize("content", [b"", b"not a model", tiny().SerializeToString()[:40]])
def test_broken_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.onnx: (not an ONNX file|the graph has no node)"):
        load_float_model(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        load_float_model(tmp_path / "none.onnx")


def test_normal_form(conv_model: FloatModel) -> None:
    opset = next(entry.version for entry in conv_model.proto.opset_import if entry.domain == "")
    assert opset >= 21
    assert not any(node.op_type == "Constant" for node in conv_model.nodes)
    assert len({node.name for node in conv_model.nodes}) == len(conv_model.nodes)
    assert conv_model.inputs == ("images",) and conv_model.outputs == ("logits",)
    assert conv_model.module_of("/stem/Conv_output_0") == "stem"


def test_older_opset_is_raised_and_computes_the_same(tmp_path: Path, conv_path: Path) -> None:
    import torch

    from pipeline.quantization.sessions import Runner

    torch.manual_seed(0)
    batch = image_batches(1)[0]
    old = export(ConvNet(), {"images": torch.from_numpy(batch["images"])}, ["logits"], tmp_path / "old.onnx", opset=17)
    values = [Runner(load_float_model(path).proto, ["logits"], 1).run(batch)["logits"] for path in (old, conv_path)]
    np.testing.assert_allclose(*values, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet18", "yolo11n", "dinov2_vits14"])
def test_public_graphs_load(shared: Path, name: str) -> None:
    model = load_float_model(shared / "zoo" / f"{name}.onnx")
    assert model.inputs == ("images",)
    assert all(len(model.shapes[tensor]) > 0 for tensor in model.activations)
