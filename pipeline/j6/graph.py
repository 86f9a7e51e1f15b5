"""ONNX (float or QDQ, static shapes) to the intermediate representation.

The import keeps one rule per concern: shapes come from ONNX's own inference; everything computed from constants alone is a weight;
QuantizeLinear/DequantizeLinear pairs become tensor dtypes. Files without weights work: a ConstantOfShape node is a weight like any other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from pipeline.errors import ModelError
from pipeline.j6.ir import DTYPE_BYTES, Graph, Op, Tensor
from pipeline.j6.shapes import infer_static_shapes

MIN_OPSET = 6  # the chip's own tools take 11-22; outside that window the costs hold, because they rest on shapes alone
TOOLCHAIN_OPSETS = range(11, 23)
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
SHAPE_KINDS = frozenset({"Shape", "Size"})  # shapes are static, so their values are known at compile time
QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
QUANTIZED_DTYPES = frozenset({"int8", "uint8", "int16", "uint16", "int32"})
FLOAT_DTYPES = frozenset({"float32", "float16", "float64"})


def import_onnx(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None, assume_dtype: str = "int8") -> Graph:
    """Read an ONNX file.

    `shapes` fixes dynamic inputs and outputs of custom operators (name -> full shape). In a float model every activation and
    weight is taken as `assume_dtype`; in a QDQ model the recorded dtypes count and only tensors without a quantizer on either side are assumed.
    Raises `ModelError` for a file that is not ONNX, a dynamic dimension, an unknown shape or control flow.
    """
    content = _read_bytes(path)
    return import_model(_parse(path, content), path, hashlib.sha256(content).hexdigest(), shapes, assume_dtype)


def import_model(
    model: ModelProto, path: Path, model_hash: str, shapes: Mapping[str, tuple[int, ...]] | None = None, assume_dtype: str = "int8"
) -> Graph:
    """`import_onnx` for a model in memory; `path` names it in messages. `model` is changed where `shapes` fixes inputs."""
    opset = _check_model(path, model)
    inferred = infer_static_shapes(path, model, dict(shapes or {}))
    return _Importer(path, model_hash, opset, inferred, assume_dtype).graph()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error


def _parse(path: Path, content: bytes) -> ModelProto:
    model = ModelProto()
    try:
        model.ParseFromString(content)
    except Exception as error:  # protobuf raises its own DecodeError type, whose module differs between its back ends
        raise ModelError(f"{path}: not an ONNX file, or cut short ({error})") from error
    if not content:
        raise ModelError(f"{path}: the file is empty")
    if not model.graph.node:
        raise ModelError(f"{path}: the graph has no node")
    return model


def _check_model(path: Path, model: ModelProto) -> int:
    """Return the opset of the default domain; refuse what has no static cost."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if not MIN_OPSET <= opset <= onnx.defs.onnx_opset_version():
        raise ModelError(f"{path}: opset {opset} is outside {MIN_OPSET}-{onnx.defs.onnx_opset_version()}; re-export the model")
    for node in model.graph.node:
        if node.op_type in CONTROL_FLOW:
            raise ModelError(f"{path}: node {node.name or node.output[0]!r} is {node.op_type}: control flow has no static cost; export without it")
    _check_order(path, model)
    return opset


def _check_order(path: Path, model: ModelProto) -> None:
    """Every node reads what the graph holds or a node before it made: no cycle, no dangling name."""
    graph = model.graph
    known = {"", *(value.name for value in graph.input), *(weight.name for weight in graph.initializer)}
    known.update(weight.values.name for weight in graph.sparse_initializer)
    for node in graph.node:
        missing = next((name for name in node.input if name not in known), None)
        if missing is not None:
            raise ModelError(
                f"{path}: node {node.name or node.output[0]!r} ({node.op_type}) reads tensor {missing!r}, which no node before it makes; "
                "the graph has a cycle, a missing node or an order that ONNX forbids"
            )
        known.update(node.output)


def _dtype_name(elem_type: int) -> str:
    name = TensorProto.DataType.Name(elem_type).lower()
    return {"float": "float32", "double": "float64", "bfloat16": "float16"}.get(name, name)


def _shape_of(info: ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)


def _attributes(node: NodeProto) -> dict[str, Any]:
    """Numbers, strings and lists of them; tensors and graphs carry no cost information and are left out."""
    plain = {AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT, AttributeProto.FLOATS, AttributeProto.STRING}
    values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute if attribute.type in plain}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def module_path(node: NodeProto) -> str:
    """Dotted path of the torch module that made a node, "" when the exporter left none.

    The dynamo exporter writes `pkg.torch.onnx.name_scopes` (a list, innermost last but one); the script exporter names a node "/a/b/Op".
    """
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = [part.strip(" '\"") for part in entry.value.strip("[]").split(",")]
            return next((scope for scope in reversed(scopes[:-1]) if scope), "")
    parts = [part for part in node.name.split("/") if part]
    return ".".join(_without_repeats(parts[:-1]))


def _without_repeats(parts: list[str]) -> list[str]:
    """["cv1", "cv1.conv"] -> ["cv1", "conv"]: the script exporter repeats the parent inside a sequential child's name."""
    result: list[str] = []
    for part in parts:
        head = result[-1] + "." if result else ""
        result.append(part[len(head) :] if head and part.startswith(head) else part)
    return result


class _Importer:
    """State of one import: tensor table, aliases left by folded nodes, and operators so far."""

    def __init__(self, path: Path, model_hash: str, opset: int, model: ModelProto, assume_dtype: str) -> None:
        self.path, self.model_hash, self.opset, self.proto, self.assume = path, model_hash, opset, model.graph, assume_dtype
        self.tensors: dict[str, Tensor] = {}
        self.alias: dict[str, str] = {}
        self.quantizer: dict[str, str] = {}  # float tensor -> dtype its QuantizeLinear gives it
        self.ops: list[Op] = []
        self.assumed: frozenset[str] = frozenset()
        self.notes: list[str] = []
        if opset not in TOOLCHAIN_OPSETS:
            self.notes.append(f"opset {opset} is outside the chip toolchain's {TOOLCHAIN_OPSETS.start}-{TOOLCHAIN_OPSETS.stop - 1}")
        self.quantized = any(node.op_type == DEQUANTIZE for node in model.graph.node)

    def graph(self) -> Graph:
        self._read_tensors()
        for index, node in enumerate(self.proto.node):
            self._read_node(index, node)
        self._assign_dtypes()
        initializers = {tensor.name for tensor in self.proto.initializer}
        inputs = tuple(value.name for value in self.proto.input if value.name not in initializers)
        outputs = tuple(dict.fromkeys(self._resolve(value.name) for value in self.proto.output))
        used = {name for op in self.ops for name in op.operands + op.outputs} | set(inputs) | set(outputs)
        tensors = {name: tensor for name, tensor in self.tensors.items() if name in used}
        self._check_dtypes(tensors)
        self._check_channels()
        return Graph(
            self.path.stem, self.model_hash, self.opset, tensors, tuple(self.ops), inputs, outputs, self.quantized, self.assumed, tuple(self.notes)
        )

    def _check_dtypes(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPE_BYTES:
                raise ModelError(f"{self.path}: tensor {name!r} has dtype {tensor.dtype}, which the hardware model does not know")

    def _check_channels(self) -> None:
        """ONNX's inference lets a convolution pass whose weight does not fit its input when the output's shape is declared."""
        for op in self.ops:
            if op.kind not in ("Conv", "ConvTranspose"):
                continue
            given, weight = (self.tensors[name].shape for name in op.operands[:2])
            wanted = weight[1] * int(op.attrs.get("group", 1)) if op.kind == "Conv" else weight[0]
            if given[1] != wanted:
                raise ModelError(f"{self.path}: node {op.name!r} ({op.kind}) gets {given[1]} channels; its weight {list(weight)} takes {wanted}")

    def _read_tensors(self) -> None:
        for info in (*self.proto.input, *self.proto.value_info, *self.proto.output):
            if info.type.HasField("tensor_type"):
                self.tensors[info.name] = Tensor(info.name, _shape_of(info), _dtype_name(info.type.tensor_type.elem_type))
        for weight in self.proto.initializer:
            self.tensors[weight.name] = Tensor(weight.name, tuple(weight.dims), _dtype_name(weight.data_type), constant=True)

    def _resolve(self, name: str) -> str:
        while name in self.alias:
            name = self.alias[name]
        return name

    def _read_node(self, index: int, node: NodeProto) -> None:
        operands = tuple(self._resolve(name) for name in node.input if name)
        outputs = tuple(name for name in node.output if name and name in self.tensors)
        if node.op_type in SHAPE_KINDS or all(self.tensors[name].constant for name in operands):
            self._fold_constant(node, operands, outputs)
        elif node.op_type == QUANTIZE:
            self._fold_quantizer(index, node, operands, outputs)
        elif node.op_type == DEQUANTIZE:
            self.alias[outputs[0]] = operands[0]
        else:
            self._append(node.name or f"{node.op_type}_{index}", node, operands, outputs)

    def _fold_constant(self, node: NodeProto, operands: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        """A node fed by constants only runs at compile time; a dequantized weight keeps its stored integer dtype."""
        if node.op_type == DEQUANTIZE:
            stored = self.tensors[operands[0]].dtype
        else:
            stored = next((self.tensors[name].dtype for name in operands if self.tensors[name].dtype in ("int8", "int16")), "")
        for name in outputs:
            dtype = stored if stored and self.tensors[name].dtype in FLOAT_DTYPES else self.tensors[name].dtype
            self.tensors[name] = Tensor(name, self.tensors[name].shape, dtype, constant=True)

    def _fold_quantizer(self, index: int, node: NodeProto, operands: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        """The first quantizer of a tensor sets its dtype; a second one with another dtype is a requantization operator."""
        source, target = operands[0], outputs[0]
        dtype = self.tensors[target].dtype
        known = self.quantizer.setdefault(source, dtype)
        if known == dtype:
            self.alias[target] = source
        else:
            self._append(node.name or f"Requantize_{index}", node, (source,), outputs, kind="Requantize")
            self.quantizer[target] = dtype

    def _append(self, name: str, node: NodeProto, operands: tuple[str, ...], outputs: tuple[str, ...], kind: str = "") -> None:
        inputs = tuple(operand for operand in operands if not self.tensors[operand].constant)
        weights = tuple(operand for operand in operands if self.tensors[operand].constant)
        domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
        self.ops.append(Op(name, kind or domain + node.op_type, operands, inputs, weights, outputs, _attributes(node), module=module_path(node)))

    def _assign_dtypes(self) -> None:
        """Give every floating tensor the dtype it has on the chip."""
        for name, dtype in self.quantizer.items():
            self._set_dtype(name, dtype)
        self.assumed = frozenset(self._float_names(constant=False))
        for name in self.assumed:
            self._set_dtype(name, self.assume)
        wide = {weight for op in self.ops for weight in op.weights[:1] if self._is_wide(op)}
        for name in self._float_names(constant=True):
            self._set_dtype(name, "int16" if name in wide else "int8")

    def _is_wide(self, op: Op) -> bool:
        """Element-wise constants follow the dtype of the activation they meet; matrix weights stay int8."""
        return op.kind not in ("Conv", "ConvTranspose", "Gemm", "MatMul") and any(self.tensors[i].dtype == "int16" for i in op.inputs)

    def _float_names(self, constant: bool) -> list[str]:
        return [name for name, tensor in self.tensors.items() if tensor.dtype in FLOAT_DTYPES and tensor.constant is constant]

    def _set_dtype(self, name: str, dtype: str) -> None:
        tensor = self.tensors[name]
        self.tensors[name] = Tensor(name, tensor.shape, dtype, tensor.constant)
