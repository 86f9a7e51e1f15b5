"""What the weights of a layer meet in calibration: second moments of its input patches.

A convolution or matrix product is y = W x for the patch x under the kernel, so its error after rounding W by E is E x, with mean E m and mean square
E G E^T, where m = mean(x) and G = mean(x x^T). These two are all that choosing roundings and correcting biases needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from pipeline.quantization.model import FloatModel, attributes_of
from pipeline.quantization.plan import MATRIX_OPS
from pipeline.quantization.sessions import Batch, Runner, split_by_memory

PATCHES = 4096
"""Patches looked at of one layer in one batch; evenly spaced."""

Floats = NDArray[np.float64]


@dataclass
class LayerMoments:
    """Sums over patches of one layer: `first` [groups, K], `second` [groups, K, K]; K elements of a patch that one output channel reads."""

    first: Floats
    second: Floats
    count: int = 0

    def add(self, patches: NDArray[np.float32]) -> None:
        """Take in patches [groups, n, K]."""
        wide = patches.astype(np.float64)
        self.first += wide.sum(axis=1)
        self.second += np.matmul(wide.transpose(0, 2, 1), wide)
        self.count += patches.shape[1]

    @property
    def mean(self) -> Floats:
        """m, [groups, K]."""
        return self.first / max(self.count, 1)

    @property
    def gram(self) -> Floats:
        """G, [groups, K, K]."""
        return self.second / max(self.count, 1)


def weighted_nodes(model: FloatModel) -> list[NodeProto]:
    """Convolutions and products with constant float weights whose input patches are understood here."""
    return [node for node in model.nodes if node.op_type in MATRIX_OPS and _is_plain(model, node)]


def _is_plain(model: FloatModel, node: NodeProto) -> bool:
    weight = model.constants.get(node.input[1])
    if weight is None or weight.dtype != np.float32 or node.input[0] not in model.float_tensors:
        return False
    attributes = attributes_of(node)
    if node.op_type == "Conv":
        return weight.ndim == 4 and attributes.get("auto_pad", b"NOTSET") == b"NOTSET"
    if node.op_type == "MatMul":
        return weight.ndim == 2
    return node.op_type == "Gemm" and not attributes.get("transA", 0) and attributes.get("alpha", 1.0) == 1.0


def as_rows(node: NodeProto, weight: NDArray) -> NDArray:
    """Weight as one row of K elements for each output channel, [O, K], elements in the order of a patch."""
    if node.op_type == "Conv":
        return weight.reshape(weight.shape[0], -1)
    return weight if node.op_type == "Gemm" and attributes_of(node).get("transB", 0) else weight.T


def from_rows(node: NodeProto, rows: NDArray, shape: tuple[int, ...]) -> NDArray:
    """Inverse of `as_rows`."""
    if node.op_type == "Conv" or (node.op_type == "Gemm" and attributes_of(node).get("transB", 0)):
        return np.ascontiguousarray(rows).reshape(shape)
    return np.ascontiguousarray(rows.T)


def layer_moments(model: FloatModel, batches: Sequence[Batch], threads: int) -> dict[str, LayerMoments]:
    """Node name -> moments of its input patches in the float model."""
    nodes = weighted_nodes(model)
    readers: dict[str, list[NodeProto]] = {}
    for node in nodes:
        readers.setdefault(node.input[0], []).append(node)
    moments = {node.name: _empty(model, node) for node in nodes}
    for part in split_by_memory(list(readers), model.shapes):
        runner = Runner(model.proto, part, threads)
        for batch in batches:
            _collect(runner.peek(batch), readers, model, moments)
    return moments


def _collect(
    values: Mapping[str, NDArray], readers: Mapping[str, Sequence[NodeProto]], model: FloatModel, moments: Mapping[str, LayerMoments]
) -> None:
    for name, value in values.items():
        for node in readers[name]:
            moments[node.name].add(patches(node, value, model.constants[node.input[1]].shape))


def _empty(model: FloatModel, node: NodeProto) -> LayerMoments:
    groups = int(attributes_of(node).get("group", 1))
    size = as_rows(node, model.constants[node.input[1]]).shape[1]
    return LayerMoments(np.zeros((groups, size)), np.zeros((groups, size, size)))


def patches(node: NodeProto, value: NDArray, weight_shape: tuple[int, ...]) -> NDArray[np.float32]:
    """At most about `PATCHES` evenly spaced input patches, [groups, n, K]."""
    if node.op_type != "Conv":
        rows = value.reshape(-1, value.shape[-1])
        return rows[:: max(len(rows) // PATCHES, 1)][None]
    attributes = attributes_of(node)
    kernel, groups = weight_shape[2:], int(attributes.get("group", 1))
    top, left, bottom, right = attributes.get("pads", [0, 0, 0, 0])
    padded = np.pad(value, ((0, 0), (0, 0), (top, bottom), (left, right)))
    dilations = attributes.get("dilations", [1, 1])
    extent = tuple((size - 1) * step + 1 for size, step in zip(kernel, dilations, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(padded, extent, (2, 3))  # type: ignore[call-overload]  # the stub knows single axes only
    strides = attributes.get("strides", [1, 1])
    windows = windows[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]  # [B, C, H, W, kh, kw]
    batch, _, height, width = windows.shape[:4]
    chosen = np.arange(0, batch * height * width, max(batch * height * width // PATCHES, 1) | 1)
    image, row, column = np.unravel_index(chosen, (batch, height, width))
    picked = windows[image, :, row, column]  # [n, C, kh, kw]
    return picked.reshape(len(chosen), groups, -1).transpose(1, 0, 2)
