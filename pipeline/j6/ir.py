"""The intermediate representation of a network: tensors, operators, graph.

Everything after `graph.py` (fusion, assignment, cost, memory, schedule) works on these records only, so none of it knows ONNX.
All shapes are static; sizes are bytes; a multiply-accumulate (MAC) counts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

DTYPE_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}

VIEW_KINDS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout", "Cast"})
MATRIX_KINDS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True)
class Tensor:
    """A named array; `constant` marks weights and everything computed from weights alone."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    constant: bool = False

    @property
    def elements(self) -> int:
        """Number of elements (1 for a scalar)."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size without padding, bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Op:
    """One operator. `operands` are all its tensors in ONNX order; `inputs` are the activations and `weights` the constants among them."""

    name: str
    kind: str
    operands: tuple[str, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    origin: tuple[str, ...] = ()
    module: str = ""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the ONNX nodes that this operator stands for."""
        return self.origin or (self.name,)


@dataclass(frozen=True)
class Graph:
    """Operators in topological order and the tensors between them."""

    name: str
    model_hash: str
    opset: int
    tensors: dict[str, Tensor]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    quantized: bool
    assumed: frozenset[str] = frozenset()  # activations without a quantizer, taken as the assumed dtype
    notes: tuple[str, ...] = ()

    def producers(self) -> dict[str, int]:
        """Tensor name -> index of the operator that writes it."""
        return {output: index for index, op in enumerate(self.ops) for output in op.outputs}

    def consumers(self) -> dict[str, list[int]]:
        """Tensor name -> indices of the operators that read it, in order."""
        table: dict[str, list[int]] = {}
        for index, op in enumerate(self.ops):
            for name in dict.fromkeys(op.inputs):
                table.setdefault(name, []).append(index)
        return table


def conv_dims(op: Op, tensors: Mapping[str, Tensor]) -> tuple[int, int, int, int, int]:
    """(positions, channels_in_per_group, channels_out_per_group, groups, taps) of a Conv or ConvTranspose.

    `positions` is batch x spatial size of the side on which the kernel is applied once per element: the output of a Conv,
    the input of a ConvTranspose.
    """
    weight = tensors[op.operands[1]].shape
    groups = int(op.attrs.get("group", 1))
    taps = prod(weight[2:])
    side = tensors[op.operands[0] if op.kind == "ConvTranspose" else op.outputs[0]].shape
    positions = side[0] * prod(side[2:])
    if op.kind == "ConvTranspose":
        return positions, weight[0] // groups, weight[1], groups, taps
    return positions, weight[1], weight[0] // groups, groups, taps


def matmul_dims(op: Op, tensors: Mapping[str, Tensor]) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a MatMul or Gemm; a constant right-hand matrix folds the batch into m."""
    left, right = (tensors[name].shape for name in op.operands[:2])
    out = tensors[op.outputs[0]].shape
    if op.kind == "Gemm":
        return 1, out[0], out[1], left[0] if op.attrs.get("transA") else left[1]
    k = left[-1]
    n = right[-1] if len(right) > 1 else 1
    rows = prod(out) // n
    m = rows if op.operands[1] in op.weights else (left[-2] if len(left) > 1 else 1)
    return rows // m, m, n, k


def macs(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """Multiply-accumulates of a matrix operator, unpadded; 0 for every other kind."""
    if op.kind in ("Conv", "ConvTranspose"):
        positions, channels_in, channels_out, groups, taps = conv_dims(op, tensors)
        return positions * channels_in * channels_out * groups * taps
    if op.kind in ("Gemm", "MatMul"):
        batch, m, n, k = matmul_dims(op, tensors)
        return batch * m * n * k
    return 0
