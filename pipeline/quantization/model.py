"""Reading the float ONNX model that is to be quantized: checks first, then one normal form.

Normal form: opset 21 or newer (16-bit QuantizeLinear), every node named, Constant nodes and constant sub-graphs turned into initializers,
static shapes known for every tensor. Whatever cannot be brought there is refused with a message that names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from pipeline.errors import ModelError
from pipeline.io import sha256_file
from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_model, module_path

OLDEST_OPSET, NEWEST_OPSET, WORKING_OPSET = 13, 23, 21
QUANTIZED_OPS = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger"}
)
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
STAND_IN = "__stand_in"
LARGE = 1024
"""Elements from which an initializer is left out of the skeleton."""
HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class FloatModel:
    """A checked float model in normal form.

    `light` is the model with stubs for its large weights, which are held once, in `constants` (all initializers by name). `shapes` covers every
    tensor.
    """

    path: Path
    sha256: str
    light: ModelProto
    shapes: dict[str, tuple[int, ...]]
    float_tensors: frozenset[str]
    constants: dict[str, NDArray] = field(repr=False)

    @property
    def proto(self) -> ModelProto:
        """The complete model, composed anew at every call."""
        complete = ModelProto()
        complete.CopyFrom(self.light)
        for tensor in complete.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL:
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(self.constants[tensor.name], order="C"), tensor.name))
        return complete

    @property
    def nodes(self) -> list[NodeProto]:
        """Nodes in topological order."""
        return list(self.light.graph.node)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the real graph inputs, in order."""
        return tuple(value.name for value in self.light.graph.input if value.name not in self.constants)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph outputs, in order."""
        return tuple(value.name for value in self.light.graph.output)

    @cached_property
    def producer(self) -> dict[str, NodeProto]:
        """Tensor name -> node that writes it."""
        return {name: node for node in self.light.graph.node for name in node.output if name}

    @cached_property
    def consumers(self) -> dict[str, list[tuple[NodeProto, int]]]:
        """Tensor name -> (node, operand position) of every read, in order."""
        table: dict[str, list[tuple[NodeProto, int]]] = {}
        for node in self.light.graph.node:
            for position, name in enumerate(node.input):
                table.setdefault(name, []).append((node, position))
        return table

    @cached_property
    def activations(self) -> tuple[str, ...]:
        """Float tensors that change from run to run: graph inputs, then node outputs, in order."""
        made = (name for node in self.light.graph.node for name in node.output)
        return tuple(name for name in (*self.inputs, *made) if name in self.float_tensors)

    @property
    def float_outputs(self) -> list[str]:
        """Outputs that hold float values: those whose noise is measured."""
        return [name for name in self.outputs if name in self.float_tensors]

    @cached_property
    def composites(self) -> tuple[tuple[str, ...], ...]:
        """Node names of every operator that the J6 compiler assembles from several nodes (GELU, SiLU, LayerNorm, Softmax)."""
        blocks = fuse(import_model(skeleton(self.light), self.path, self.sha256)).blocks
        return tuple(op.origin for block in blocks for op in block.ops if len(op.origin) > 1)

    def module_of(self, tensor: str) -> str:
        """Dotted path of the torch module that makes `tensor`; "" for graph inputs and where the exporter left none."""
        node = self.producer.get(tensor)
        return module_path(node) if node is not None else ""

    def op_type_of(self, tensor: str) -> str:
        """Operator type that makes `tensor`, "Input" for graph inputs."""
        node = self.producer.get(tensor)
        return node.op_type if node is not None else "Input"


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """Attributes of a node by name, as plain values."""
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def load_float_model(path: Path) -> FloatModel:
    """Read, check and normalise a float model.

    Raises `ModelError`: not ONNX, external data missing, opset outside 13-23, control flow, already quantized, half precision, dynamic
    dimensions, NaN or infinite weights, a graph that shape inference cannot follow.
    """
    proto, sha256 = _read(path)
    opset = _check_opset(path, proto)
    _check_operators(path, proto)
    _check_types(path, proto)
    _check_static(path, proto)
    proto = _to_working_opset(path, proto, opset)
    _name_nodes(proto)
    constants = _fold_constants(path, proto)
    _check_finite(path, proto, constants)
    shapes, float_tensors = _infer(path, proto, constants)
    return FloatModel(path, sha256, with_stubs(proto), shapes, float_tensors, constants)


def _read(path: Path) -> tuple[ModelProto, str]:
    try:
        sha256 = sha256_file(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        proto = onnx.load(str(path))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: external weight data is missing ({error})") from error
    except Exception as error:  # protobuf and onnx raise several unrelated types for a broken file
        external = any(words in str(error) for words in ("xternal", "doesn't exist", "should be stored in"))
        problem = "external weight data is missing" if external else "not an ONNX file, or cut short"
        raise ModelError(f"{path}: {problem} ({error})") from error
    if not proto.graph.node:
        raise ModelError(f"{path}: the graph has no node")
    return proto, sha256


def _check_opset(path: Path, proto: ModelProto) -> int:
    opset = max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ModelError(f"{path}: opset {opset} is outside {OLDEST_OPSET}-{NEWEST_OPSET}; export the model again with opset {WORKING_OPSET}")
    return opset


def _check_operators(path: Path, proto: ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type in QUANTIZED_OPS:
            raise ModelError(f"{path}: already quantized: node {node.name or node.output[0]!r} is {node.op_type}; give the float model")
        if node.op_type in CONTROL_FLOW:
            raise ModelError(f"{path}: node {node.name or node.output[0]!r} is {node.op_type}: control flow cannot be quantized; export without it")


def _check_types(path: Path, proto: ModelProto) -> None:
    values = [(value.name, value.type.tensor_type.elem_type) for value in (*proto.graph.input, *proto.graph.output)]
    values += [(tensor.name, tensor.data_type) for tensor in proto.graph.initializer]
    for name, kind in values:
        if kind in HALF_TYPES:
            raise ModelError(
                f"{path}: tensor {name!r} is {TensorProto.DataType.Name(kind)}: quantization starts from float32; export the model in float32"
            )


def _check_static(path: Path, proto: ModelProto) -> None:
    initializers = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        for axis, dim in enumerate(dims):
            if value.name not in initializers and dim.dim_value <= 0:
                label = dim.dim_param or "unknown"
                raise ModelError(
                    f"{path}: input {value.name!r} dimension {axis} is dynamic ({label}): the chip needs static shapes; export with fixed sizes"
                )


def _to_working_opset(path: Path, proto: ModelProto, opset: int) -> ModelProto:
    """Raise the opset where needed. The converter works on the skeleton; it drops node metadata (module paths), put back by node name."""
    if opset >= WORKING_OPSET:
        return proto
    light = skeleton(proto)
    stand_ins = {name for node in light.graph.node if node.name.endswith(STAND_IN) for name in (*node.input, *node.output)}
    metadata = {node.name: node.metadata_props for node in proto.graph.node if node.name}
    try:
        converted = onnx.version_converter.convert_version(light, WORKING_OPSET)
    except Exception as error:  # the converter reports every unsupported operator as a RuntimeError or its own type
        raise ModelError(f"{path}: opset {opset} cannot be raised to {WORKING_OPSET} ({error}); export with opset {WORKING_OPSET}") from error
    known = {tensor.name for tensor in proto.graph.initializer}
    del proto.graph.node[:], proto.graph.value_info[:], proto.opset_import[:]
    proto.graph.node.extend(node for node in converted.graph.node if not stand_ins.intersection(node.output))
    proto.graph.initializer.extend(tensor for tensor in converted.graph.initializer if tensor.name not in known | stand_ins)
    proto.opset_import.extend(converted.opset_import)
    proto.ir_version = max(proto.ir_version, converted.ir_version)
    for node in proto.graph.node:
        if node.name in metadata and not node.metadata_props:
            node.metadata_props.extend(metadata[node.name])
    return proto


def _name_nodes(proto: ModelProto) -> None:
    """Give unnamed nodes the name of the J6 importer (type and position), and make repeated names unique."""
    seen: set[str] = set()
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
        if node.name in seen:
            node.name = f"{node.name}_{index}"
        seen.add(node.name)


def _fold_constants(path: Path, proto: ModelProto) -> dict[str, NDArray]:
    """Evaluate nodes that read constants only, drop them, and return every constant by name. Initializers are rewritten to match."""
    constants: dict[str, NDArray] = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    kept = []
    outputs = {value.name for value in proto.graph.output}
    for node in proto.graph.node:
        if all(name in constants or not name for name in node.input) and not outputs.intersection(node.output) and not _is_random(node):
            constants.update(_evaluate(path, proto, node, constants))
        else:
            kept.append(node)
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    read = {name for node in kept for name in node.input} | outputs
    constants = {name: value for name, value in constants.items() if name in read}
    _replace_initializers(proto, constants)
    inputs = [value for value in proto.graph.input if value.name not in constants]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    return constants


def _replace_initializers(proto: ModelProto, constants: dict[str, NDArray]) -> None:
    """Initializers for exactly `constants`; those that are there already are not copied again."""
    kept = {tensor.name for tensor in proto.graph.initializer}.intersection(constants)
    for index in reversed(range(len(proto.graph.initializer))):
        if proto.graph.initializer[index].name not in kept:
            del proto.graph.initializer[index]
    made = (name for name in constants if name not in kept)
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(constants[name], order="C"), name) for name in made)


def skeleton(proto: ModelProto) -> ModelProto:
    """The model without its large weights: each becomes a ConstantOfShape, which shape inference and the J6 importer read like a weight."""
    light = model_without_weights(proto)
    shapes, nodes = [], []
    for tensor in proto.graph.initializer:
        if not is_large(tensor):
            light.graph.initializer.append(tensor)
            continue
        shapes.append(numpy_helper.from_array(np.array(tensor.dims, np.int64), f"{tensor.name}__shape"))
        value = numpy_helper.from_array(np.zeros(1, onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)))
        nodes.append(onnx.helper.make_node("ConstantOfShape", [shapes[-1].name], [tensor.name], name=f"{tensor.name}{STAND_IN}", value=value))
    light.graph.initializer.extend(shapes)
    light.graph.node.extend([*nodes, *proto.graph.node])
    return light


def with_stubs(proto: ModelProto) -> ModelProto:
    """The model with stubs in place of its large weights: name, type and shape, no data."""
    light = model_without_weights(proto)
    light.graph.node.extend(proto.graph.node)
    light.graph.initializer.extend(_stub(tensor) if is_large(tensor) else tensor for tensor in proto.graph.initializer)
    return light


def _stub(tensor: TensorProto) -> TensorProto:
    stub = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL)
    entry = stub.external_data.add()
    entry.key, entry.value = "location", "memory"
    return stub


def model_without_weights(proto: ModelProto) -> ModelProto:
    """Everything of a model but its nodes and initializers, copied without copying the weights first."""
    light = ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.metadata_props.extend(proto.metadata_props)
    light.graph.name = proto.graph.name
    light.graph.input.extend(proto.graph.input)
    light.graph.output.extend(proto.graph.output)
    light.graph.value_info.extend(proto.graph.value_info)
    return light


def is_large(tensor: TensorProto) -> bool:
    """True for initializers that are data, not shapes or parameters of operators."""
    return tensor.data_type == TensorProto.FLOAT and prod(tensor.dims) >= LARGE


def _is_random(node: NodeProto) -> bool:
    return node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")


def _evaluate(path: Path, proto: ModelProto, node: NodeProto, constants: dict[str, NDArray]) -> dict[str, NDArray]:
    from onnx.reference import ReferenceEvaluator

    names = [name for name in dict.fromkeys(node.input) if name]
    feeds = {name: constants[name] for name in names}
    infos = [onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(feeds[name].dtype), feeds[name].shape) for name in names]
    graph = onnx.helper.make_graph([node], "constant", infos, [onnx.ValueInfoProto(name=name) for name in node.output])
    try:
        values = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=proto.opset_import)).run(None, feeds)
    except Exception as error:  # any failure means the same to the user: this constant expression has no value
        raise ModelError(f"{path}: constant node {node.name!r} ({node.op_type}) cannot be evaluated ({error})") from error
    return {name: np.asarray(value) for name, value in zip(node.output, values, strict=True)}


def _check_finite(path: Path, proto: ModelProto, constants: dict[str, NDArray]) -> None:
    for node in proto.graph.node:
        for name in node.input:
            value = constants.get(name)
            if value is not None and value.dtype.kind == "f" and not np.isfinite(value).all():
                bad = int(np.size(value) - np.isfinite(value).sum())
                raise ModelError(f"{path}: weight {name!r} of node {node.name!r} holds {bad} NaN or infinite values of {value.size}")


def _infer(path: Path, proto: ModelProto, constants: dict[str, NDArray]) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Shapes of all tensors and the names of the float32 ones. Stale value infos are dropped first; `proto` gets the new ones."""
    del proto.graph.value_info[:]
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton(proto), strict_mode=True, data_prop=True)
    except Exception as error:  # onnx reports contradictions with its own exception type
        raise ModelError(f"{path}: shapes contradict each other ({error})") from error
    infos = [*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output]
    proto.graph.value_info.extend(info for info in inferred.graph.value_info if info.name not in constants)
    kinds = {info.name: info.type.tensor_type.elem_type for info in infos}
    shapes = {info.name: tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim) for info in infos}
    shapes.update({name: value.shape for name, value in constants.items()})
    _check_known(path, (name for node in proto.graph.node for name in node.output if name), kinds, shapes)
    return shapes, frozenset(name for name, kind in kinds.items() if kind == TensorProto.FLOAT)


def _check_known(path: Path, names: Iterable[str], kinds: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
    for name in names:
        if kinds.get(name) in HALF_TYPES:
            raise ModelError(f"{path}: tensor {name!r} is half precision: quantization starts from float32; export the model in float32")
        if name not in shapes or any(dim <= 0 for dim in shapes[name]):
            raise ModelError(f"{path}: tensor {name!r} has no static shape ({shapes.get(name)}); export with fixed sizes")
