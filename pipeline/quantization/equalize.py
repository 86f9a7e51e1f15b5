"""Equalization: the channels of an activation get similar ranges, because one scale serves them all; the weights that read it take the difference.

x' = x / s channel by channel, folded into what makes x (convolution, product with bias, LayerNormalization, a ReLU in between), and W' = W s in every
weight that reads it. s = sqrt(range of x / range of the weights) (Xiao et al., "SmoothQuant", ICML 2023, alpha 0.5; Nagel et al., ICCV 2019, for
convolutions), rounded to a power of two: then the float model computes exactly the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from pipeline.quantization.fusion import bias_operands
from pipeline.quantization.model import FloatModel, attributes_of, is_large
from pipeline.quantization.sessions import Batch, Runner, split_by_memory

BATCHES = 4
"""Batches whose channel ranges decide; ranges of channels settle quickly."""
LARGEST_SHIFT = 4
"""Powers of two that a channel may move by."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Pair:
    """An activation between weights. `makers`: (constant, axis of the channels); `readers`: (constant, axis of the input channels)."""

    tensor: str
    channel_axis: int
    makers: tuple[tuple[str, int], ...]
    readers: tuple[tuple[str, int], ...]


def find_pairs(model: FloatModel) -> list[Pair]:
    """Every activation whose scale can be moved: all readers are layers with weights, the maker has weights, and no weight is shared."""
    pairs = []
    for tensor in model.activations:
        readers = _readers(model, tensor)
        makers, axis = _makers(model, tensor)
        if readers and makers and all(_is_private(model, name) for name, _ in (*makers, *readers)):
            pairs.append(Pair(tensor, axis, tuple(makers), tuple(readers)))
    return pairs


def _is_private(model: FloatModel, constant: str) -> bool:
    return constant in model.constants and len(model.consumers[constant]) == 1


def _readers(model: FloatModel, tensor: str) -> list[tuple[str, int]]:
    """(weight, input channel axis) of every reader; empty when one of them is anything else, or `tensor` is an output."""
    found = []
    for node, position in model.consumers.get(tensor, []):
        axis = _input_axis(model, node) if position == 0 else None
        if axis is None:
            return []
        found.append((node.input[1], axis))
    return [] if tensor in model.outputs else found


def _input_axis(model: FloatModel, node: NodeProto) -> int | None:
    weight = model.constants.get(node.input[1]) if len(node.input) > 1 else None
    if weight is None or weight.dtype != np.float32:
        return None
    if node.op_type == "MatMul" and weight.ndim == 2:
        return 0
    groups = attributes_of(node).get("group", 1)
    if node.op_type == "Conv" and groups == 1:
        return 1
    return 0 if node.op_type == "Conv" and weight.shape[:2] == (groups, 1) else None  # depthwise: one filter a channel


def _makers(model: FloatModel, tensor: str) -> tuple[list[tuple[str, int]], int]:
    """(constants with the channels along an axis, channel axis of the tensor); empty when the scale cannot be folded into the maker."""
    node = model.producer.get(tensor)
    if node is not None and node.op_type == "Relu" and len(model.consumers[node.input[0]]) == 1:
        node = model.producer.get(node.input[0])
    if node is None:
        return [], 0
    if node.op_type == "Conv" and node.input[1] in model.constants:
        return [(name, 0) for name in node.input[1:]], 1
    if node.op_type == "LayerNormalization" and model.constants.get(node.input[1], np.zeros(0)).ndim == 1:
        return [(name, 0) for name in node.input[1:]], len(model.shapes[tensor]) - 1
    matched = bias_operands(model, node)
    if matched is not None and model.constants[matched[0].input[1]].ndim == 2:
        return [(matched[0].input[1], 1), (matched[1], 0)], len(model.shapes[tensor]) - 1
    return [], 0


def channel_shifts(model: FloatModel, batches: Sequence[Batch], threads: int) -> dict[str, Floats]:
    """Tensor -> s, one power of two a channel; tensors that have nothing to gain are left out."""
    pairs = {pair.tensor: pair for pair in find_pairs(model)}
    ranges: dict[str, Floats] = {}
    for part in split_by_memory(list(pairs), model.shapes):
        runner = Runner(model.proto, part, threads)
        for batch in batches:
            for name, value in runner.peek(batch).items():
                axes = tuple(axis for axis in range(value.ndim) if axis != pairs[name].channel_axis)
                ranges[name] = np.maximum(ranges.get(name, 0.0), np.abs(value).max(axis=axes))
    shifts = {name: _shift(model, pair, ranges[name]) for name, pair in pairs.items()}
    return {name: shift for name, shift in shifts.items() if (shift != 1.0).any()}


def _shift(model: FloatModel, pair: Pair, seen: Floats) -> Floats:
    """sqrt(activation range / weight range), without its mean, as powers of two; 1 for channels that are dead on either side."""
    weights = np.zeros(seen.shape, np.float32)
    for name, axis in pair.readers:
        value = np.abs(model.constants[name])
        weights = np.maximum(weights, value.max(axis=tuple(other for other in range(value.ndim) if other != axis)))
    alive = (seen > 0.0) & (weights > 0.0)
    logs = np.zeros(seen.shape)
    logs[alive] = 0.5 * np.log2(seen[alive] / weights[alive])
    logs[alive] -= np.median(logs[alive]) if alive.any() else 0.0
    return np.exp2(np.clip(np.rint(logs), -LARGEST_SHIFT, LARGEST_SHIFT)).astype(np.float32)


def equalized(model: FloatModel, shifts: Mapping[str, Floats]) -> FloatModel:
    """The model with its weights rescaled; its outputs are the same numbers."""
    if not shifts:
        return model
    constants = dict(model.constants)
    for pair in find_pairs(model):
        if pair.tensor not in shifts:
            continue
        for name, axis in pair.makers:
            constants[name] = constants[name] / _along(shifts[pair.tensor], axis, constants[name].ndim)
        for name, axis in pair.readers:
            constants[name] = constants[name] * _along(shifts[pair.tensor], axis, constants[name].ndim)
    return replace(model, constants=constants, light=_with_constants(model, constants))


def _along(shift: Floats, axis: int, rank: int) -> Floats:
    shape = [1] * rank
    shape[axis] = -1
    return shift.reshape(shape)


def _with_constants(model: FloatModel, constants: Mapping[str, NDArray]) -> ModelProto:
    light = ModelProto()
    light.CopyFrom(model.light)
    for tensor in light.graph.initializer:
        if not is_large(tensor) and constants[tensor.name] is not model.constants[tensor.name]:
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(constants[tensor.name]), tensor.name))
    return light
