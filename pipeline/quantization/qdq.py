"""Writing a plan into the model: standard QuantizeLinear/DequantizeLinear pairs (QDQ), zero point 0.

- Every quantized activation t becomes t -> QuantizeLinear -> DequantizeLinear -> readers. Graph inputs and outputs keep their names and stay
  float32: the pair sits inside the graph.
- Weights of matrix operators are stored as int8 per output channel with a DequantizeLinear in front; their bias is int32 with
  scale = input scale * weight scale, the format of the accumulator.
- Other constants (element-wise operands, a matrix on the left of a product) follow the dtype of the result. Scalars
  stay float: the chip folds a factor into the scale.
- Parameters of normalisations stay float: they are part of the operator.

Same model and plan give the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from pipeline.quantization.convention import broadcast_scales, channel_scales, quantize
from pipeline.quantization.fusion import bias_operands
from pipeline.quantization.model import FloatModel, attributes_of
from pipeline.quantization.plan import MATRIX_OPS, QuantPlan

OPS_WITH_CONSTANTS = frozenset({"Add", "Sub", "Mul", "Div", "Concat", "Where", "Max", "Min", "Gather", "GridSample", "MatMul", "Gemm"})
"""Operators, besides weights, whose constant operands are stored as integers."""

INT32_HEADROOM = 2.0**31 * 0.5
"""A bias may use half of the accumulator; the other half belongs to the products."""


@dataclass(frozen=True)
class WeightChoice:
    """A stored constant: which node reads it, at which operand, as what. `axis` None means one scale for the whole tensor."""

    constant: str
    dtype: str
    axis: int | None


def quantized_name(tensor: str) -> str:
    """Name of the dequantized version of an activation that is neither graph output nor constant."""
    return f"{tensor}__dq"


def readable_name(model: FloatModel, plan: QuantPlan, tensor: str) -> str:
    """Tensor of the QDQ model that holds what the readers of `tensor` see."""
    is_quantized = plan.tensors[tensor].threshold is not None
    return quantized_name(tensor) if is_quantized and tensor not in model.outputs else tensor


def write_qdq(model: FloatModel, plan: QuantPlan) -> ModelProto:
    """The QDQ model of `plan`; inputs, outputs and metadata of the float model are kept."""
    return _Writer(model, plan).write()


def weight_choice(model: FloatModel, plan: QuantPlan, node: NodeProto, position: int) -> WeightChoice | None:
    """How the constant at operand `position` of `node` is stored, or None when it stays float32."""
    name = node.input[position]
    value = model.constants.get(name)
    if value is None or value.dtype != np.float32 or value.size <= 1:
        return None
    if node.op_type in MATRIX_OPS and position > 0:
        return WeightChoice(name, "int8", _channel_axis(node, value)) if position == 1 else None
    result = plan.tensors.get(node.output[0])
    if node.op_type not in OPS_WITH_CONSTANTS or result is None or result.threshold is None:
        return None
    wide = node.op_type == "GridSample" and position == 1
    return WeightChoice(name, "int16" if wide else result.dtype, None)


def _channel_axis(node: NodeProto, weight: NDArray) -> int | None:
    """Axis of the output channels of a weight; None for a stack of matrices, whose channels are no single axis."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "ConvTranspose":
        return 1
    if node.op_type == "Gemm":
        return 0 if attributes_of(node).get("transB", 0) else 1
    return weight.ndim - 1 if weight.ndim == 2 else None


def weight_scales(model: FloatModel, plan: QuantPlan, node: NodeProto, choice: WeightChoice) -> NDArray[np.float32]:
    """Scales of a stored constant, raised where the int32 bias of the channel would not fit otherwise."""
    scales = channel_scales(model.constants[choice.constant], choice.axis, choice.dtype, _power_of_two(plan))
    bias, input_scale = bias_of(model, node), _input_scale(plan, node)
    if choice.axis is None or bias is None or input_scale is None:
        return scales
    needed = np.abs(model.constants[bias]).astype(np.float64) / (input_scale * INT32_HEADROOM)
    if node.op_type == "ConvTranspose":
        needed = needed.reshape(-1, scales.size).max(axis=0)
    raised = np.exp2(np.ceil(np.log2(np.maximum(needed, 1e-300)))) if _power_of_two(plan) else needed
    return np.maximum(scales, raised.astype(np.float32))


def stored_integers(model: FloatModel, plan: QuantPlan, choice: WeightChoice, scales: NDArray[np.float32]) -> NDArray:
    """Integers of a stored constant: those that repair chose for these scales, or else the nearest ones."""
    chosen = plan.weights.get(choice.constant)
    if chosen is not None and np.array_equal(chosen.scales, scales):
        return chosen.integers
    value = model.constants[choice.constant]
    return quantize(value, broadcast_scales(scales, choice.axis, value.ndim), choice.dtype)


def _power_of_two(plan: QuantPlan) -> bool:
    return any(tensor.power_of_two for tensor in plan.tensors.values())


def _input_scale(plan: QuantPlan, node: NodeProto) -> float | None:
    """Scale of the activation operand of a matrix operator with constant weight; None when it is not quantized."""
    source = plan.tensors.get(node.input[0])
    return source.scale if source is not None and source.threshold is not None else None


def bias_of(model: FloatModel, node: NodeProto) -> str | None:
    """Constant bias that can live in the accumulator of `node`."""
    if node.op_type == "MatMul":
        for reader, _ in model.consumers.get(node.output[0], []):
            matched = bias_operands(model, reader)
            if matched is not None and matched[0].name == node.name:
                return matched[1]
        return None
    if len(node.input) < 3 or node.input[2] not in model.constants or node.input[1] not in model.constants:
        return None
    attributes = attributes_of(node)
    plain = all(attributes.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    return node.input[2] if plain and model.constants[node.input[2]].ndim == 1 and model.constants[node.input[2]].dtype == np.float32 else None


@dataclass(frozen=True)
class StoredBias:
    """The int32 bias of a matrix operator: name of the constant and of the operator whose accumulator holds it, integers, scales by channel."""

    constant: str
    product: str
    integers: NDArray[np.integer]
    scales: NDArray[np.float32]


def stored_bias(model: FloatModel, plan: QuantPlan, node: NodeProto) -> StoredBias | None:
    """The bias that `node` adds, if it becomes int32: of a convolution or Gemm its own, of a product that of the Add behind it."""
    matched = bias_operands(model, node)
    product = matched[0] if matched is not None else node
    if node.op_type == "MatMul" or (node.op_type not in MATRIX_OPS and matched is None):
        return None  # the bias of a MatMul is an operand of the Add behind it
    bias, input_scale = bias_of(model, product), _input_scale(plan, product)
    choice = weight_choice(model, plan, product, 1)
    if bias is None or input_scale is None or choice is None or choice.axis is None:
        return None
    value = model.constants[bias].astype(np.float64) + plan.bias_shifts.get(product.name, 0.0)
    scales = np.float32(input_scale) * weight_scales(model, plan, product, choice)
    scales = np.tile(scales, value.size // scales.size)  # grouped ConvTranspose: the groups share the scales
    axis = 0 if matched is None else len(model.shapes[node.output[0]]) - 1
    # Leading ones change nothing for the Add, but keep onnxruntime 1.32 from fusing it into a Gemm: its optimizer then copies a
    # DequantizeLinear without the zero point and refuses the model it has made.
    integers = quantize(value, scales, "int32").reshape((1,) * axis + (-1,))
    return StoredBias(bias, product.name, integers, scales)


@dataclass
class _Writer:
    """The graph under construction."""

    model: FloatModel
    plan: QuantPlan
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    value_info: list[ValueInfoProto] = field(default_factory=list)

    def write(self) -> ModelProto:
        for name in self.model.inputs:
            if self._is_quantized(name):
                self._add_pair(name, name, quantized_name(name))
        for node in self.model.nodes:
            self._add_node(node)
        return self._finish()

    def _is_quantized(self, name: str) -> bool:
        plan = self.plan.tensors.get(name)
        return plan is not None and plan.threshold is not None

    def _add_node(self, original: NodeProto) -> None:
        node = NodeProto()
        node.CopyFrom(original)
        biases = self._bias_rename(original)
        for position, name in enumerate(original.input):
            node.input[position] = biases.get(position) or self._operand(original, position, name)
        for position, name in enumerate(original.output):
            if name in self.model.outputs and self._is_quantized(name):
                node.output[position] = f"{name}__float"
        self.nodes.append(node)
        for name in original.output:
            if self._is_quantized(name):
                is_output = name in self.model.outputs
                self._add_pair(name, f"{name}__float" if is_output else name, name if is_output else quantized_name(name))

    def _operand(self, node: NodeProto, position: int, name: str) -> str:
        """Name under which the new node reads an operand of the old one."""
        if name in self.plan.tensors:
            return readable_name(self.model, self.plan, name)
        choice = weight_choice(self.model, self.plan, node, position)
        if choice is not None:
            return self._stored_constant(node, choice)
        if name in self.model.constants:
            self.initializers.setdefault(name, numpy_helper.from_array(np.asarray(self.model.constants[name], order="C"), name))
        return name

    def _add_pair(self, tensor: str, source: str, target: str) -> None:
        decision = self.plan.tensors[tensor]
        scale, zero = self._scalar_parameters(tensor, decision.scale, decision.dtype)
        integer = f"{tensor}__q"
        self.nodes.append(helper.make_node("QuantizeLinear", [source, scale, zero], [integer], name=f"{tensor}/QuantizeLinear"))
        self.nodes.append(helper.make_node("DequantizeLinear", [integer, scale, zero], [target], name=f"{tensor}/DequantizeLinear"))

    def _scalar_parameters(self, tensor: str, scale: float, dtype: str) -> tuple[str, str]:
        """Scale initializer of a tensor and the shared zero point of its dtype."""
        name, zero = f"{tensor}__scale", f"zero_point_{dtype}"
        self.initializers[name] = numpy_helper.from_array(np.array(scale, np.float32), name)
        self.initializers.setdefault(zero, numpy_helper.from_array(np.array(0, dtype), zero))
        return name, zero

    def _stored_constant(self, node: NodeProto, choice: WeightChoice) -> str:
        """Add the integer constant and its DequantizeLinear; two nodes that need the same scales share one copy."""
        scales = weight_scales(self.model, self.plan, node, choice)
        integers = stored_integers(self.model, self.plan, choice, scales)
        return self._add_dequantizer(choice.constant, integers, scales, choice.axis)

    def _bias_rename(self, node: NodeProto) -> dict[int, str]:
        """Operand position -> new name of the bias, when it becomes int32."""
        bias = stored_bias(self.model, self.plan, node)
        if bias is None:
            return {}
        position = list(node.input).index(bias.constant)
        axis = bias.integers.ndim - 1
        return {position: self._add_dequantizer(bias.constant, bias.integers, bias.scales, axis, suffix=f"__{bias.product}")}

    def _add_dequantizer(self, constant: str, integers: NDArray, scales: NDArray[np.float32], axis: int | None, suffix: str = "") -> str:
        dtype = str(integers.dtype)
        base = f"{constant}__{dtype}{suffix}"
        while base in self.initializers and not self._holds(base, integers, scales):
            base += "_"  # the same constant read with other scales
        target = f"{base}__dq"
        if base in self.initializers:
            return target
        self.initializers[base] = numpy_helper.from_array(np.ascontiguousarray(integers), base)
        self.initializers[f"{base}__scale"] = numpy_helper.from_array(np.asarray(scales, order="C"), f"{base}__scale")
        zero = f"{base}__zero"
        self.initializers[zero] = numpy_helper.from_array(np.zeros(scales.shape, integers.dtype), zero)
        attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
        node = helper.make_node("DequantizeLinear", [base, f"{base}__scale", zero], [target], name=f"{base}/DequantizeLinear", **attributes)
        self.nodes.append(node)
        return target

    def _holds(self, base: str, integers: NDArray, scales: NDArray[np.float32]) -> bool:
        stored = numpy_helper.to_array(self.initializers[base]), numpy_helper.to_array(self.initializers[f"{base}__scale"])
        return np.array_equal(stored[0], integers) and np.array_equal(stored[1], scales)

    def _finish(self) -> ModelProto:
        source = self.model.light
        model = ModelProto()
        model.CopyFrom(source)
        del model.graph.node[:], model.graph.initializer[:], model.graph.value_info[:]
        model.graph.node.extend(self.nodes)
        model.graph.initializer.extend(self.initializers[name] for name in sorted(self.initializers))
        model.producer_name, model.producer_version = "bevj6", ""
        return model
