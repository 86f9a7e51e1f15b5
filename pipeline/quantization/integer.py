"""Integer-only reference of what the chip does with a quantized layer: int8 x int8 -> int32 accumulator (+ int32 bias) -> requantize.

Requantization multiplies by a fixed-point number and shifts (Jacob et al., CVPR 2018, section 2.2); no floating-point number touches a value. Layers
are compared one by one with the QDQ model in onnxruntime, each on the integers that the QDQ model itself feeds it, so that differences do not add up.
Products run in float64, which holds every accumulator exactly: below 2^53 its sums of integers have no rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from pipeline.quantization.convention import BITS
from pipeline.quantization.fusion import bias_operands, fused_tensors
from pipeline.quantization.model import FloatModel, attributes_of
from pipeline.quantization.plan import MATRIX_OPS, QuantPlan
from pipeline.quantization.qdq import StoredBias, readable_name, stored_bias, stored_integers, weight_choice, weight_scales, write_qdq
from pipeline.quantization.sessions import Batch, Runner

MULTIPLIER_BITS = 31
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class IntegerLayer:
    """A product with stored weights, or an addition. `target`: stored tensor that it makes; `has_relu`: negative results become 0."""

    node: NodeProto
    target: str
    has_relu: bool
    bias: StoredBias | None


@dataclass(frozen=True)
class LayerDifference:
    """Integer reference against the QDQ model: share of values that differ, and by how many steps at most."""

    node: str
    op: str
    dtype: str
    share: float
    largest_steps: int


def fixed_point(factors: NDArray[np.float64]) -> tuple[Integers, Integers]:
    """(multipliers below 2^31, right shifts) with factor = multiplier x 2^-shift, relative error below 2^-30."""
    mantissas, exponents = np.frexp(factors)
    multipliers = np.rint(mantissas * 2.0**MULTIPLIER_BITS).astype(np.int64)
    return multipliers, (MULTIPLIER_BITS - exponents).astype(np.int64)


def requantize(accumulators: Integers, factors: NDArray[np.float64], dtype: str) -> Integers:
    """Accumulators in steps of the result: multiply, add half, shift, saturate. `factors` broadcast. Accumulators fit int32."""
    multipliers, shifts = fixed_point(factors)
    far = np.minimum(shifts, 62)
    return _saturated((accumulators * multipliers + (np.int64(1) << (far - 1))) >> far, dtype)


def _saturated(values: Integers, dtype: str) -> Integers:
    limit = 2 ** (BITS[dtype] - 1)
    return np.clip(values, -limit, limit - 1)


def integer_layers(model: FloatModel, plan: QuantPlan) -> Iterator[IntegerLayer]:
    """Layers whose operands and result are stored as integers, in graph order."""
    fused, stored = fused_tensors(model), plan.quantized()
    for node in model.nodes:
        if node.op_type not in MATRIX_OPS | {"Add"} or bias_operands(model, node) is not None:
            continue
        target = fused.get(node.output[0], node.output[0])
        maker = model.producer[target]
        bias_node = maker if bias_operands(model, maker) is not None else model.producer.get(maker.input[0])
        bias = stored_bias(model, plan, node) or (stored_bias(model, plan, bias_node) if bias_node is not None and node.op_type == "MatMul" else None)
        is_plain = maker.name == node.name or maker.op_type == "Relu" or bias_operands(model, maker) is not None
        if is_plain and target in stored and _is_stored(model, plan, node):
            yield IntegerLayer(node, target, maker.op_type == "Relu", bias)


def _is_stored(model: FloatModel, plan: QuantPlan, node: NodeProto) -> bool:
    stored = plan.quantized()
    if node.op_type == "Add":
        return all(name in stored for name in node.input)
    choice = weight_choice(model, plan, node, 1)
    return node.input[0] in stored and choice is not None and choice.axis is not None


def layer_output(model: FloatModel, plan: QuantPlan, layer: IntegerLayer, operands: Sequence[Integers]) -> Integers:
    """Integers that the layer makes of the integers of its stored operands."""
    result = plan.tensors[layer.target]
    if layer.node.op_type == "Add":
        values = _sum(operands, [plan.tensors[name].scale / result.scale for name in layer.node.input], result.dtype)
    else:
        accumulators, scales = _product(model, plan, layer, operands[0])
        values = requantize(accumulators, scales / result.scale, result.dtype)
    return np.maximum(values, 0) if layer.has_relu else values


def _sum(operands: Sequence[Integers], factors: Sequence[float], dtype: str) -> Integers:
    """Both operands in 1/2^16 steps of the result, added, then rounded."""
    fraction = 16
    parts = [value * np.int64(round(factor * 2**fraction)) for value, factor in zip(operands, factors, strict=True)]
    return _saturated((parts[0] + parts[1] + (1 << (fraction - 1))) >> fraction, dtype)


def _product(model: FloatModel, plan: QuantPlan, layer: IntegerLayer, value: Integers) -> tuple[Integers, NDArray[np.float64]]:
    """(accumulators with bias, scale of the accumulator by channel, shaped to broadcast)."""
    import torch

    from pipeline.quantization.torch_graph import OPERATORS

    node = layer.node
    choice = weight_choice(model, plan, node, 1)
    assert choice is not None  # `integer_layers` lets no other layer through
    scales = weight_scales(model, plan, node, choice)
    weight = stored_integers(model, plan, choice, scales)
    wide = [torch.from_numpy(array.astype(np.float64)) for array in (value, weight)]
    product = OPERATORS[node.op_type](wide, attributes_of(node), [model.shapes[node.output[0]]])
    assert isinstance(product, torch.Tensor)
    shape = [1] * product.ndim
    shape[1 if node.op_type.startswith("Conv") else -1] = -1
    channels = product.shape[shape.index(-1)]
    accumulators = product.numpy().astype(np.int64)
    if layer.bias is not None:
        accumulators = accumulators + layer.bias.integers.astype(np.int64).reshape(shape)
    by_channel = np.tile(scales, channels // scales.size).astype(np.float64) * plan.tensors[node.input[0]].scale
    return accumulators, by_channel.reshape(shape)


def compare_layers(model: FloatModel, plan: QuantPlan, batch: Batch, threads: int) -> list[LayerDifference]:
    """Every layer of the plan, integer reference against the QDQ model as onnxruntime runs it unfused."""
    layers = list(integer_layers(model, plan))
    names = dict.fromkeys(name for layer in layers for name in (*_operands(layer), layer.target))
    readable = {name: readable_name(model, plan, name) for name in names}
    values = Runner(write_qdq(model, plan), list(dict.fromkeys(readable.values())), threads).run(batch)
    integers = {name: np.rint(values[readable[name]] / np.float32(plan.tensors[name].scale)).astype(np.int64) for name in names}
    rows = []
    for layer in layers:
        difference = np.abs(layer_output(model, plan, layer, [integers[name] for name in _operands(layer)]) - integers[layer.target])
        dtype = plan.tensors[layer.target].dtype
        rows.append(LayerDifference(layer.node.name, layer.node.op_type, dtype, float(np.mean(difference > 0)), int(difference.max(initial=0))))
    return rows


def _operands(layer: IntegerLayer) -> tuple[str, ...]:
    return tuple(layer.node.input) if layer.node.op_type == "Add" else (layer.node.input[0],)
