"""Static shapes for every tensor of an ONNX model, or an error that says which dimension is free and how to fix it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, numpy_helper

from pipeline.errors import ModelError

MAX_FOLDED_ELEMENTS = 4096  # shape arithmetic is small; anything larger is data


def infer_static_shapes(path: Path, model: ModelProto, shapes: dict[str, tuple[int, ...]]) -> ModelProto:
    """Return a copy of `model` in which every tensor has a value_info with a static shape.

    `shapes` fixes inputs, and tensors that operators unknown to ONNX make, by name. Shape arithmetic (Shape -> Gather -> Concat ...) that
    ONNX's inference leaves open is evaluated and inferred again. Raises `ModelError` naming the dimension or the first tensor that stays unknown.
    """
    made = {name for node in model.graph.node for name in node.output}
    declared = {name: shape for name, shape in shapes.items() if name in made}
    _apply_overrides(path, model, {name: shape for name, shape in shapes.items() if name not in made})
    _check_inputs(path, model)
    inferred = _infer(path, model)
    while (unknown := _first_unknown(inferred)) is not None:
        if unknown in declared:
            _declare(inferred, unknown, declared.pop(unknown))
        elif not _fold_shape_arithmetic(inferred):
            raise ModelError(
                f"{path}: the shape of tensor {unknown!r}, made by {_maker(model, unknown)}, cannot be inferred; "
                f"give it with --shape {unknown}=NxCxHxW, or export the model with static shapes"
            )
        inferred = _infer(path, inferred)
    if declared:
        raise ModelError(f"{path}: --shape names {', '.join(sorted(declared))}, whose shape follows from the graph; leave it out")
    return inferred


def _declare(model: ModelProto, name: str, shape: tuple[int, ...]) -> None:
    """Give a tensor that an operator unknown to ONNX makes the shape that the user states; float where its type is unknown too."""
    graph = model.graph
    known = next((value for value in (*graph.value_info, *graph.output) if value.name == name), None)
    value = graph.value_info.add() if known is None else known
    elem_type = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
    value.CopyFrom(onnx.helper.make_tensor_value_info(name, elem_type, list(shape)))


def _apply_overrides(path: Path, model: ModelProto, shapes: dict[str, tuple[int, ...]]) -> None:
    inputs = {value.name: value for value in model.graph.input}
    for name, shape in shapes.items():
        if name not in inputs:
            raise ModelError(f"{path}: --shape names input {name!r}; the model has {', '.join(sorted(inputs))}")
        dims = inputs[name].type.tensor_type.shape.dim
        if dims and len(dims) != len(shape):
            raise ModelError(f"{path}: --shape {name} has {len(shape)} dimensions; the model's input has {len(dims)}")
        fixed = [dim.dim_value for dim in dims]
        clash = next((axis for axis, size in enumerate(fixed) if size > 0 and size != shape[axis]), None)
        if clash is not None:
            raise ModelError(f"{path}: --shape {name} gives {shape[clash]} for axis {clash}; the model fixes it to {fixed[clash]}")
        elem_type = inputs[name].type.tensor_type.elem_type
        inputs[name].CopyFrom(onnx.helper.make_tensor_value_info(name, elem_type, list(shape)))
    if shapes:
        del model.graph.value_info[:]  # they may hold the symbols that were just replaced


def _maker(model: ModelProto, tensor: str) -> str:
    """The node behind a tensor, for messages."""
    node = next(node for node in model.graph.node if tensor in node.output)
    kind = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"node {node.name!r} ({kind})" if node.name else kind


def _free_axis(value: ValueInfoProto) -> str | None:
    """Name of the first dynamic dimension of a tensor, None when all are fixed."""
    tensor_type = value.type.tensor_type
    if not tensor_type.HasField("shape"):
        return "rank"
    for axis, dim in enumerate(tensor_type.shape.dim):
        if not dim.HasField("dim_value") or dim.dim_value < 0:
            return dim.dim_param or f"axis {axis}"
    return None


def _check_inputs(path: Path, model: ModelProto) -> None:
    initializers = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name in initializers:
            continue
        if not value.type.HasField("tensor_type"):
            raise ModelError(f"{path}: input {value.name!r} is not a tensor (sequence or optional); it has no static cost")
        free = _free_axis(value)
        if free is not None:
            shown = "x".join(str(dim.dim_value or "?") for dim in value.type.tensor_type.shape.dim) or "?"
            flag = f"--shape {value.name}={shown.replace('?', 'N')}"
            raise ModelError(f"{path}: input {value.name!r} has a dynamic dimension ({free} of {shown}); fix it with {flag}")


def _infer(path: Path, model: ModelProto) -> ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=False, strict_mode=False, data_prop=True)
    except Exception as error:  # onnx raises several unrelated types for broken graphs
        raise ModelError(f"{path}: ONNX shape inference failed ({error})") from error


def _known_names(model: ModelProto) -> set[str]:
    graph = model.graph
    known = {value.name for value in (*graph.input, *graph.value_info, *graph.output) if _free_axis(value) is None}
    return known | {tensor.name for tensor in graph.initializer}


def _first_unknown(model: ModelProto) -> str | None:
    known = _known_names(model)
    used = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    for node in model.graph.node:
        for position, name in enumerate(node.output):
            if name and name not in known and (name in used or position == 0):
                return name
    return None


def _fold_shape_arithmetic(model: ModelProto) -> bool:
    """Replace integer nodes whose inputs are known by initializers, in place; True when at least one was replaced."""
    graph = model.graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if _is_small(tensor.dims)}
    shapes = {value.name: value for value in (*graph.input, *graph.value_info) if _free_axis(value) is None}
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    folded = []
    for node in graph.node:
        result = _evaluate(node, values, shapes, opsets)
        if result is not None:
            values[node.output[0]] = result
            folded.append(node)
    for node in folded:
        graph.node.remove(node)
        graph.initializer.append(numpy_helper.from_array(values[node.output[0]], node.output[0]))
    return bool(folded)


def _is_small(dims: object) -> bool:
    return int(np.prod(list(dims), dtype=np.int64)) <= MAX_FOLDED_ELEMENTS  # type: ignore[call-overload]


def _evaluate(node: NodeProto, values: dict[str, np.ndarray], shapes: dict[str, ValueInfoProto], opsets: dict[str, int]) -> np.ndarray | None:
    """Value of a node of shape arithmetic, None when it is not one or its inputs are not known."""
    if node.op_type == "Shape" and node.input[0] in shapes and not node.attribute:
        return np.array([dim.dim_value for dim in shapes[node.input[0]].type.tensor_type.shape.dim], dtype=np.int64)
    if len(node.output) != 1 or not all(name in values for name in node.input if name) or node.op_type == "ConstantOfShape":
        return None
    from onnx.reference import ReferenceEvaluator  # costs 0.3 s and is needed by few models

    try:
        (result,) = ReferenceEvaluator(node, opsets=opsets).run(None, {name: values[name] for name in node.input if name})
    except Exception:  # an operator without a reference implementation stays in the graph
        return None
    array = np.asarray(result)
    return array if array.size <= MAX_FOLDED_ELEMENTS else None
