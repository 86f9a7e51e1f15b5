"""The linter before calibration: wrong data is cheaper to refuse than to explain after it became noise on the chip."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from pipeline.errors import DataError
from pipeline.quantization.model import FloatModel
from pipeline.quantization.observers import TensorStatistics, percentile_threshold
from pipeline.quantization.plan import MATRIX_OPS, QuantPlan
from pipeline.quantization.sessions import Batch

LARGEST_NORMALISED_PIXEL = 16.0  # mean/std normalised images stay within about +-3; 0-255 ones reach 255
LARGEST_IMAGE_MEAN, SMALLEST_IMAGE_DEVIATION, LARGEST_IMAGE_DEVIATION = 1.5, 0.15, 4.0  # standardised: mean 0, standard deviation 1 over a data set
EXPLODING = 1e5  # int16 resolves 3 units there, int8 780
OUTLIER_RATIO = 1e3  # largest magnitude against the one that 99.9 % stay below
SMALL_OPERAND = 1 / 64  # an int8 operand with less than this share of the result's range moves it by at most two steps


@dataclass(frozen=True)
class Finding:
    """Something a person should look at: which tensor, in which module, and what is wrong with it."""

    tensor: str
    module: str
    message: str

    def __str__(self) -> str:
        place = f"{self.tensor} ({self.module})" if self.module else self.tensor
        return f"{place}: {self.message}"


class BatchLinter:
    """Checks every batch as it arrives; remembers digests to find repeated batches."""

    def __init__(self, model: FloatModel) -> None:
        self._model = model
        self._types = {value.name: helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in model.light.graph.input}
        self._seen: dict[str, int] = {}
        self._images: dict[str, _ImageRange] = {}
        self._repeated = 0
        self._count = 0

    def check(self, batch: Batch) -> dict[str, NDArray]:
        """Return the batch's model inputs, or raise `DataError` naming the batch, the input, the value and the rule."""
        index = self._count
        self._count += 1
        missing = [name for name in self._model.inputs if name not in batch]
        if missing:
            raise DataError(f"calibration batch {index}: input {missing[0]!r} is missing; the model reads {', '.join(self._model.inputs)}")
        inputs = {name: np.asarray(batch[name]) for name in self._model.inputs}
        for name, value in inputs.items():
            self._check_input(index, name, value)
            if is_image(value):
                self._images.setdefault(name, _ImageRange()).add(value)
        self._remember(inputs)
        return inputs

    def _check_input(self, index: int, name: str, value: NDArray) -> None:
        where = f"calibration batch {index}: input {name!r}"
        expected = self._model.shapes[name]
        if value.shape != expected:
            raise DataError(f"{where} has shape {value.shape}, the model reads {expected}")
        if value.dtype != self._types[name]:
            kind = TensorProto.DataType.Name(helper.np_dtype_to_tensor_dtype(np.dtype(self._types[name])))
            raise DataError(f"{where} is {value.dtype}, the model reads {kind}; normalise and convert as in training")
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise DataError(f"{where} holds {int((~np.isfinite(value)).sum())} NaN or infinite values")
        if is_unnormalised_image(value):
            raise DataError(
                f"{where} ranges from {value.min():g} to {value.max():g}: pixels that were not normalised (limit {LARGEST_NORMALISED_PIXEL:g}); "
                "apply the mean and standard deviation of training"
            )

    def _remember(self, inputs: Mapping[str, NDArray]) -> None:
        digest = hashlib.sha256()
        for name in sorted(inputs):
            digest.update(np.ascontiguousarray(inputs[name]).tobytes())
        key = digest.hexdigest()
        self._repeated += key in self._seen
        self._seen.setdefault(key, self._count)

    def findings(self) -> tuple[Finding, ...]:
        """What was seen over all batches."""
        found = [Finding(name, "", text) for name, seen in self._images.items() if (text := seen.judge())]
        if self._repeated:
            found.append(Finding("(batches)", "", f"{self._repeated} of {self._count} batches repeat an earlier one: they add no information"))
        return tuple(found)


@dataclass
class _ImageRange:
    """Sums over the pixels of one image input."""

    low: float = np.inf
    high: float = -np.inf
    count: int = 0
    first: float = 0.0
    second: float = 0.0

    def add(self, value: NDArray) -> None:
        self.low, self.high = min(self.low, float(value.min())), max(self.high, float(value.max()))
        self.count += value.size
        self.first += float(value.sum(dtype=np.float64))
        self.second += float(np.square(value, dtype=np.float64).sum())

    def judge(self) -> str:
        """What is odd about the pixels of all batches; "" where nothing is."""
        mean = self.first / self.count
        deviation = float(np.sqrt(max(self.second / self.count - mean * mean, 0.0)))
        measured = f"pixels from {self.low:.3g} to {self.high:.3g}, mean {mean:.2f}, standard deviation {deviation:.2f}"
        if self.low >= 0.0 and self.high <= 1.0:
            return f"{measured}: looks divided by 255 but not standardised; right only if the model was trained so"
        if abs(mean) > LARGEST_IMAGE_MEAN or not SMALLEST_IMAGE_DEVIATION <= deviation <= LARGEST_IMAGE_DEVIATION:
            return f"{measured}: standardised images have about 0 and 1; was another mean or standard deviation used in training?"
        return ""


def is_image(value: NDArray) -> bool:
    """True for a float array with three channels, NCHW or NHWC."""
    has_channels = value.ndim >= 3 and 3 in (value.shape[-3], value.shape[-1]) and min(value.shape[-2:]) >= 3
    return bool(has_channels and value.size >= 3 * 64 and value.dtype.kind == "f")


def is_unnormalised_image(value: NDArray) -> bool:
    """True for an image of non-negative values that go beyond what normalised pixels reach."""
    return bool(is_image(value) and value.min() >= 0.0 and value.max() > LARGEST_NORMALISED_PIXEL)


def lint_model(model: FloatModel) -> tuple[Finding, ...]:
    """Weights that several operators share: they have one set of scales, while what the operators read may differ in range."""
    findings = []
    for name, value in model.constants.items():
        readers = [node for node, position in model.consumers.get(name, []) if node.op_type in MATRIX_OPS and position == 1]
        if value.ndim > 1 and len(readers) > 1:
            calls = ", ".join(repr(node.name) for node in readers)
            findings.append(Finding(name, model.module_of(readers[0].output[0]), f"weight shared by {calls}: repair and training leave it alone"))
    return tuple(findings)


def lint_statistics(model: FloatModel, statistics: Mapping[str, TensorStatistics]) -> tuple[Finding, ...]:
    """Dead, exploding and non-finite tensors, with module and proposal."""
    findings = []
    for name, value in statistics.items():
        message = _judge(model, name, value)
        if message:
            findings.append(Finding(name, model.module_of(name), message))
    return tuple(findings)


def _judge(model: FloatModel, name: str, value: TensorStatistics) -> str:
    if value.nonfinite:
        return f"{value.nonfinite} NaN or infinite values"
    if value.magnitude == 0.0:
        return "dead: zero in every batch"
    usual = percentile_threshold(value, 99.9)
    if value.magnitude >= EXPLODING:
        return f"exploding: reaches {value.magnitude:.3g} while 99.9 % stay below {usual:.3g}; {_clamp_advice(model, name, usual)}"
    if usual > 0.0 and value.magnitude > OUTLIER_RATIO * usual:
        return f"outliers: reaches {value.magnitude:.3g} while 99.9 % stay below {usual:.3g}"
    return ""


def _clamp_advice(model: FloatModel, name: str, usual: float) -> str:
    if model.op_type_of(name) in ("Reciprocal", "Div"):
        divisor = model.producer[name].input[-1]
        return f"clamp the divisor {divisor!r} to at least {1.0 / max(usual, 1e-6):.3g} in magnitude"
    return f"clamp it to +-{usual:.3g}"


def lint_plan(model: FloatModel, plan: QuantPlan) -> tuple[Finding, ...]:
    """Additions and concatenations whose operands differ so much in range that int8 hides the smaller one."""
    findings = []
    for node in model.nodes:
        result = plan.tensors.get(node.output[0])
        if node.op_type not in ("Add", "Concat") or result is None or result.dtype != "int8" or result.threshold is None:
            continue
        operands = [plan.tensors[name] for name in node.input if name in plan.tensors and plan.tensors[name].threshold]
        for operand in operands:
            share = (operand.threshold or 0.0) / result.threshold
            if share < SMALL_OPERAND:
                text = f"range is {share:.1%} of the range of {node.op_type} {node.name!r} that reads it: int8 hides it"
                findings.append(Finding(operand.tensor, model.module_of(operand.tensor), text))
    return tuple(findings)
