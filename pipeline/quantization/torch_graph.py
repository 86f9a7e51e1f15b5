"""A float ONNX model as torch operations, so that its constants can be trained; fake quantization enters through two hooks.

Only what training needs: the model is in normal form (pipeline/quantization/model.py), so every shape is known and every constant is folded.
`check` compares the result with onnxruntime before anything is trained on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from onnx import NodeProto
from torch import Tensor
from torch.nn import functional

from pipeline.errors import ModelError
from pipeline.quantization.model import FloatModel, attributes_of
from pipeline.quantization.sessions import Batch, Runner

LARGEST_DIFFERENCE = 1e-3  # of an output's largest magnitude

Shape = tuple[int, ...]
Operands = Sequence[Any]
"""Tensors; None for an optional operand that is absent."""
ReadConstant = Callable[[NodeProto, int], Tensor]
"""Value of the constant at an operand position of a node."""
ReadActivation = Callable[[str, Tensor], Tensor]
"""Value that the readers of a tensor see."""


class TorchGraph:
    """Runs the nodes of a model one by one."""

    def __init__(self, model: FloatModel) -> None:
        """Raises `ModelError` naming the node whose operator is not known here."""
        self._model = model
        for node in model.nodes:
            if node.op_type not in OPERATORS:
                raise ModelError(f"{model.path}: node {node.name!r}: operator {node.op_type} is not known to quantization-aware training")
        self._attributes = {node.name: attributes_of(node) for node in model.nodes}
        self._last_reader = {name: node.name for node in model.nodes for name in node.input}
        self._constants = {name: torch.from_numpy(np.array(value)) for name, value in model.constants.items()}

    def constant(self, node: NodeProto, position: int) -> Tensor:
        """The constant as the float model has it."""
        return self._constants[node.input[position]]

    def run(self, batch: Batch, read_constant: ReadConstant | None = None, read_activation: ReadActivation | None = None) -> dict[str, Tensor]:
        """Float outputs by name; without hooks those of the float model."""
        constant = read_constant or self.constant
        seen = read_activation or (lambda name, value: value)
        values = {name: seen(name, torch.from_numpy(np.ascontiguousarray(batch[name]))) for name in self._model.inputs}
        for node in self._model.nodes:
            operands = [self._operand(node, position, name, values, constant) for position, name in enumerate(node.input)]
            shapes = [self._model.shapes[name] for name in node.output]
            results = OPERATORS[node.op_type](operands, self._attributes[node.name], shapes)
            results = results if isinstance(results, tuple) else (results,)
            values.update({name: seen(name, value) for name, value in zip(node.output, results, strict=True)})
            for name in node.input:
                if self._last_reader[name] == node.name and name not in self._model.outputs:
                    values.pop(name, None)
        return {name: values[name] for name in self._model.float_outputs}

    def _operand(self, node: NodeProto, position: int, name: str, values: Mapping[str, Tensor], constant: ReadConstant) -> Tensor | None:
        if not name:
            return None
        return constant(node, position) if name in self._constants else values[name]

    def check(self, batch: Batch) -> None:
        """Raise `ModelError` when an output differs from onnxruntime's by more than `LARGEST_DIFFERENCE` of its largest magnitude."""
        with torch.no_grad():
            found = self.run(batch)
        exact = Runner(self._model.proto, list(found), 1).run(batch)
        for name, value in found.items():
            difference = float(np.abs(value.numpy() - exact[name]).max(initial=0.0))
            if not difference <= LARGEST_DIFFERENCE * max(float(np.abs(exact[name]).max(initial=0.0)), 1.0):
                raise ModelError(f"{self._model.path}: output {name!r} in torch differs from onnxruntime by {difference:g}: it cannot be trained")


# ------------------------------------------------------------------------------------------------------------------------ operators
Operator = Callable[[Operands, Mapping[str, Any], Sequence[Shape]], Tensor | tuple[Tensor, ...]]


def _plain(function: Callable[..., Tensor]) -> Operator:
    """Operator without attributes; operands in the order of the torch function."""
    return lambda operands, attributes, shapes: function(*operands)


def _integers(value: Tensor | None) -> list[int]:
    return [] if value is None else [int(number) for number in value.reshape(-1)]


def _symmetric(pads: Sequence[int], rank: int) -> list[int]:
    begins, ends = list(pads[:rank]), list(pads[rank:])
    if begins != ends:
        raise ModelError(f"pads {list(pads)}: quantization-aware training knows equal pads on both sides only")
    return begins


def _conv(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    value, weight, bias = (*operands, None)[:3]
    rank = weight.ndim - 2
    pads = _symmetric(attributes.get("pads", [0] * 2 * rank), rank)
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    return function(value, weight, bias, strides, pads, dilations, attributes.get("group", 1))


def _conv_transpose(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    value, weight, bias = (*operands, None)[:3]
    pads = _symmetric(attributes.get("pads", [0] * 4), 2)
    extra, dilations = attributes.get("output_padding", [0, 0]), attributes.get("dilations", [1, 1])
    return functional.conv_transpose2d(value, weight, bias, attributes.get("strides", [1, 1]), pads, extra, attributes.get("group", 1), dilations)


def _gemm(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    left, right, bias = (*operands, None)[:3]
    left = left.T if attributes.get("transA", 0) else left
    product = attributes.get("alpha", 1.0) * (left @ (right.T if attributes.get("transB", 0) else right))
    return product if bias is None else product + attributes.get("beta", 1.0) * bias


def _reshaped(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    return operands[0].reshape(shapes[0])


def _slice(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    value, starts, ends, axes, steps = (*operands, None, None)[:5]
    first, stop = _integers(starts), _integers(ends)
    for axis, begin, end, step in zip(_integers(axes) or range(len(first)), first, stop, _integers(steps) or [1] * len(first), strict=True):
        chosen = range(value.shape[axis])[slice(begin, end if step > 0 or end >= -value.shape[axis] else None, step)]
        value = value.index_select(axis, torch.tensor(list(chosen)))
    return value


def _gather(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    value, axis = operands[0], attributes.get("axis", 0)
    indices = operands[1].reshape(-1).long()
    return value.index_select(axis, torch.where(indices < 0, indices + value.shape[axis], indices)).reshape(shapes[0])


def _split(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    return tuple(operands[0].split([shape[axis] for shape in shapes], axis))


def _resize(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    """Nearest neighbour by the floor of the scaled index, which is what torch does too; bilinear with half pixels or aligned corners."""
    mode, place = attributes.get("mode", b"nearest"), attributes.get("coordinate_transformation_mode", b"half_pixel")
    size = shapes[0][2:]
    if mode == b"nearest" and place == b"asymmetric" and attributes.get("nearest_mode", b"") == b"floor":
        return functional.interpolate(operands[0], size, mode="nearest")
    if mode == b"linear" and place in (b"half_pixel", b"pytorch_half_pixel", b"align_corners"):
        return functional.interpolate(operands[0], size, mode="bilinear", align_corners=place == b"align_corners")
    raise ModelError(f"Resize with mode {mode!r} and coordinates {place!r} is not known to quantization-aware training")


def _grid_sample(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    mode = {b"linear": "bilinear", b"bilinear": "bilinear", b"nearest": "nearest"}[attributes.get("mode", b"linear")]
    padding = attributes.get("padding_mode", b"zeros").decode()
    return functional.grid_sample(operands[0], operands[1], mode, padding, bool(attributes.get("align_corners", 0)))


def _layer_norm(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    value, scale, bias = (*operands, None)[:3]
    axis = attributes.get("axis", -1) % value.ndim
    return functional.layer_norm(value, value.shape[axis:], scale, bias, attributes.get("epsilon", 1e-5))


def _reduce(function: Callable[..., Tensor]) -> Operator:
    def run(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
        axes = attributes.get("axes") or _integers(operands[1] if len(operands) > 1 else None) or list(range(operands[0].ndim))
        return function(operands[0], axes, keepdim=bool(attributes.get("keepdims", 1)))

    return run


def _max_pool(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    pads, ceil = _symmetric(attributes.get("pads", [0] * 4), 2), bool(attributes.get("ceil_mode", 0))
    return functional.max_pool2d(
        operands[0], attributes["kernel_shape"], attributes.get("strides", [1, 1]), pads, attributes.get("dilations", [1, 1]), ceil
    )


def _average_pool(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    pads = _symmetric(attributes.get("pads", [0] * 4), 2)
    counted = bool(attributes.get("count_include_pad", 0))
    return functional.avg_pool2d(operands[0], attributes["kernel_shape"], attributes.get("strides", [1, 1]), pads, False, counted)


def _batch_norm(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    value, scale, bias, mean, variance = operands
    return functional.batch_norm(value, mean, variance, scale, bias, eps=attributes.get("epsilon", 1e-5))


def _clip(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    value, low, high = (*operands, None, None)[:3]
    return value.clamp(low, high) if low is not None or high is not None else value


def _gelu(operands: Operands, attributes: Mapping[str, Any], shapes: Sequence[Shape]) -> Tensor:
    return functional.gelu(operands[0], approximate=attributes.get("approximate", b"none").decode())


OPERATORS: dict[str, Operator] = {
    "Add": _plain(torch.add), "Sub": _plain(torch.sub), "Mul": _plain(torch.mul), "Div": _plain(torch.div), "Pow": _plain(torch.pow),
    "MatMul": _plain(torch.matmul), "Relu": _plain(torch.relu), "Sigmoid": _plain(torch.sigmoid), "Tanh": _plain(torch.tanh),
    "Exp": _plain(torch.exp), "Log": _plain(torch.log), "Sqrt": _plain(torch.sqrt), "Erf": _plain(torch.erf), "Neg": _plain(torch.neg),
    "Abs": _plain(torch.abs), "Sin": _plain(torch.sin), "Cos": _plain(torch.cos), "Reciprocal": _plain(torch.reciprocal),
    "Max": _plain(torch.maximum), "Min": _plain(torch.minimum), "Where": _plain(torch.where), "Identity": _plain(lambda value: value),
    "Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm, "Slice": _slice, "Gather": _gather, "Split": _split, "Resize": _resize,
    "GridSample": _grid_sample, "LayerNormalization": _layer_norm, "BatchNormalization": _batch_norm, "MaxPool": _max_pool,
    "AveragePool": _average_pool, "Clip": _clip, "Gelu": _gelu, "Reshape": _reshaped, "Flatten": _reshaped, "Squeeze": _reshaped,
    "Unsqueeze": _reshaped,
    "Expand": lambda operands, attributes, shapes: operands[0].broadcast_to(shapes[0]),
    "Transpose": lambda operands, attributes, shapes: operands[0].permute(attributes.get("perm", list(range(operands[0].ndim))[::-1])),
    "Concat": lambda operands, attributes, shapes: torch.cat(list(operands), attributes["axis"]),
    "Softmax": lambda operands, attributes, shapes: torch.softmax(operands[0], attributes.get("axis", -1)),
    "LeakyRelu": lambda operands, attributes, shapes: functional.leaky_relu(operands[0], attributes.get("alpha", 0.01)),
    "HardSigmoid": lambda operands, attributes, shapes: (operands[0] * attributes.get("alpha", 0.2) + attributes.get("beta", 0.5)).clamp(0.0, 1.0),
    "GlobalAveragePool": lambda operands, attributes, shapes: operands[0].mean(list(range(2, operands[0].ndim)), keepdim=True),
    "ReduceSum": _reduce(torch.sum), "ReduceMean": _reduce(torch.mean), "ReduceMax": _reduce(torch.amax), "ReduceMin": _reduce(torch.amin),
}  # fmt: skip
