"""Layer by layer, float against int8: how much of each tensor survives, and how much of the loss is its own.

`local` is the error of rounding the float tensor itself: nothing before it is quantized. `accumulated` is the error of the same tensor in the
QDQ model, where everything before it is quantized too. A layer with a large accumulated and a small local error suffers from its inputs.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from pipeline.quantization.convention import BITS, broadcast_scales, dequantize, quantize
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import MATRIX_OPS, QuantPlan, TensorPlan
from pipeline.quantization.qdq import readable_name, stored_integers, weight_choice, weight_scales
from pipeline.quantization.sessions import Batch, Runner, split_by_memory

EXACT_DB = 200.0  # reported for an error of zero


@dataclass(frozen=True)
class LayerError:
    """One row of layer_wise_error.csv. Ratios are 0..1; SQNR in dB; `error_ratio` is the mean absolute error / mean absolute value."""

    tensor: str
    node: str
    module: str
    op: str
    dtype: str
    scale: float
    threshold: float
    sqnr_db: float
    cosine: float
    error_ratio: float
    local_sqnr_db: float
    local_cosine: float
    saturation: float
    zeros: float
    range_used: float
    weight_sqnr_db: float | None
    rule: str


def layer_errors(model: FloatModel, plan: QuantPlan, qdq: ModelProto, batches: Sequence[Batch], threads: int) -> list[LayerError]:
    """Errors of every quantized storage group over `batches`, worst accumulated SQNR first (then by name)."""
    roots = plan.roots()
    totals = {name: _Totals(decision) for name, decision in roots.items()}
    for part in split_by_memory(list(roots), model.shapes):
        exact = Runner(model.proto, part, threads)
        quantized = Runner(qdq, [readable_name(model, plan, name) for name in part], threads)
        for batch in batches:
            reference, values = exact.peek(batch), quantized.peek(batch)
            for name in part:
                totals[name].add(reference[name], values[readable_name(model, plan, name)])
    weights = weight_errors_db(model, plan)
    rows = [_row(model, name, total, weights) for name, total in totals.items()]
    return sorted(rows, key=lambda row: (row.sqnr_db, row.tensor))


def local_errors_db(model: FloatModel, plan: QuantPlan, batches: Sequence[Batch], threads: int) -> dict[str, float]:
    """SQNR in dB of rounding each quantized storage group alone."""
    roots = plan.roots()
    totals = {name: _Totals(decision) for name, decision in roots.items()}
    for part in split_by_memory(list(roots), model.shapes):
        runner = Runner(model.proto, part, threads)
        for batch in batches:
            for name, value in runner.peek(batch).items():
                totals[name].add_local(value)
    return {name: total.local_sqnr_db for name, total in totals.items()}


def weight_errors_db(model: FloatModel, plan: QuantPlan) -> dict[str, float]:
    """Output tensor of a matrix operator -> SQNR in dB of its stored weights."""
    errors = {}
    for node in model.nodes:
        choice = weight_choice(model, plan, node, 1) if node.op_type in MATRIX_OPS else None
        if choice is None:
            continue
        value = model.constants[choice.constant]
        scales = weight_scales(model, plan, node, choice)
        stored = dequantize(stored_integers(model, plan, choice, scales), broadcast_scales(scales, choice.axis, value.ndim))
        errors[node.output[0]] = sqnr_db(_power(value), _power(value - stored))
    return errors


def sqnr_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise), both as power; `EXACT_DB` without noise, -`EXACT_DB` at infinite noise, 0 for noise on an empty signal."""
    if noise <= 0.0:
        return EXACT_DB
    if not np.isfinite(noise):
        return -EXACT_DB
    return min(10.0 * float(np.log10(signal / noise)), EXACT_DB) if signal > 0.0 else 0.0


def _power(values: NDArray) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))


class _Totals:
    """Sums over batches for one tensor: x is the float value, y the value in the QDQ model, z the float value after rounding."""

    def __init__(self, decision: TensorPlan) -> None:
        self.decision = decision
        self.count = self.saturated = self.zeros = 0
        self.largest = self.xx = self.yy = self.xy = self.zz = self.xz = 0.0
        self.noise = self.local_noise = self.absolute = self.absolute_error = 0.0

    def add_local(self, value: NDArray) -> None:
        """Take in one batch of float values."""
        scale, dtype = self.decision.scale, self.decision.dtype
        integers = quantize(value, scale, dtype)
        rounded = dequantize(integers, scale)
        limit = 2 ** (BITS[dtype] - 1)
        self.count += value.size
        self.zeros += int(np.count_nonzero(integers == 0))
        self.saturated += int(np.count_nonzero((value > (limit - 0.5) * scale) | (value < -(limit + 0.5) * scale)))
        self.largest = max(self.largest, float(np.abs(value).max(initial=0.0)))
        self.xx += _power(value)
        self.zz += _power(rounded)
        self.xz += float(np.sum(value.astype(np.float64) * rounded))
        self.local_noise += _power(value - rounded)

    def add(self, value: NDArray, quantized: NDArray) -> None:
        """Take in one batch of float values and of the QDQ model's values."""
        self.add_local(value)
        self.yy += _power(quantized)
        self.xy += float(np.sum(value.astype(np.float64) * quantized))
        self.noise += _power(value - quantized)
        self.absolute += float(np.abs(value).sum(dtype=np.float64))
        self.absolute_error += float(np.abs(value - quantized).sum(dtype=np.float64))

    @property
    def local_sqnr_db(self) -> float:
        """SQNR of rounding alone."""
        return sqnr_db(self.xx, self.local_noise)


def _cosine(xx: float, yy: float, xy: float) -> float:
    """Cosine of two vectors; 1 when both are zero, 0 when one is."""
    if xx == 0.0 or yy == 0.0:
        return float(xx == yy)
    return xy / float(np.sqrt(xx) * np.sqrt(yy))


def _row(model: FloatModel, name: str, total: _Totals, weights: Mapping[str, float]) -> LayerError:
    decision = total.decision
    node = model.producer.get(name)
    return LayerError(
        tensor=name,
        node=node.name if node is not None else "",
        module=model.module_of(name),
        op=model.op_type_of(name),
        dtype=decision.dtype,
        scale=decision.scale,
        threshold=decision.threshold or 0.0,
        sqnr_db=sqnr_db(total.xx, total.noise),
        cosine=_cosine(total.xx, total.yy, total.xy),
        error_ratio=total.absolute_error / total.absolute if total.absolute else 0.0,
        local_sqnr_db=total.local_sqnr_db,
        local_cosine=_cosine(total.xx, total.zz, total.xz),
        saturation=total.saturated / total.count,
        zeros=total.zeros / total.count,
        range_used=total.largest / (decision.threshold or 1.0),
        weight_sqnr_db=_weight_error(model, name, weights),
        rule=decision.rule,
    )


def _weight_error(model: FloatModel, name: str, weights: Mapping[str, float]) -> float | None:
    """Error of the weights in the block that makes a tensor: its own node's, or those of the node fused in front of it."""
    node = model.producer.get(name)
    while node is not None:
        if node.output[0] in weights:
            return weights[node.output[0]]
        if node.op_type not in ("Relu", "Clip", "Add"):
            return None
        node = model.producer.get(node.input[0])
    return None


def to_csv(rows: Sequence[Any], kind: type[Any] = LayerError) -> str:
    """Rows of one dataclass as CSV text with a header; six significant digits."""
    names = [field.name for field in fields(kind)]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(_cells(getattr(row, name) for name in names))
    return stream.getvalue()


def _cells(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
