"""The chip's number format: uniform, symmetric, zero point 0.

    scale = threshold / 128      int8,  integers -128..127
    scale = threshold / 32768    int16, integers -32768..32767
    q = clip(round_half_even(x / scale));  x' = q * scale

The positive threshold itself is not representable: it saturates to 127 (docs/quantization.md, "Convention"). Rounding is that of ONNX
QuantizeLinear, so numbers computed here equal those that onnxruntime computes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]

BITS = {"int8": 8, "int16": 16, "int32": 32}
STEPS = {"int8": 128, "int16": 32768}
"""Integer steps between zero and the threshold (the magnitude of the smallest integer)."""

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # a subnormal scale would flush to zero in some kernels


def scale_of(threshold: float, dtype: str, power_of_two: bool = False) -> float:
    """Scale of a tensor whose values should fit in [-threshold, threshold]; exactly representable in float32.

    With `power_of_two` the scale is rounded up to the next power of two, so the threshold stays covered.
    """
    scale = max(float(np.float32(threshold)) / STEPS[dtype], SMALLEST_SCALE)
    return 2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale


def covering_threshold(minimum: float, maximum: float, dtype: str) -> float:
    """Smallest threshold for which neither end saturates: the positive side has one integer less than the negative one."""
    steps = STEPS[dtype]
    return max(-minimum, maximum * steps / (steps - 1), 0.0)


def quantize(values: FloatArray, scale: float | FloatArray, dtype: str) -> IntArray:
    """Integers of `values`; `scale` broadcasts. Rounds half to even and saturates, as QuantizeLinear does."""
    low, high = -(2 ** (BITS[dtype] - 1)), 2 ** (BITS[dtype] - 1) - 1
    ratio = np.asarray(values, np.float32) / np.asarray(scale, np.float32)
    return np.clip(np.rint(ratio.astype(np.float64) if dtype == "int32" else ratio), low, high).astype(dtype)


def dequantize(integers: IntArray, scale: float | FloatArray) -> NDArray[np.float32]:
    """Real values of quantized `integers`."""
    return integers.astype(np.float32) * np.asarray(scale, np.float32)


def fake_quantize(values: FloatArray, scale: float | FloatArray, dtype: str) -> NDArray[np.float32]:
    """`values` after a round trip through integers: what every reader of a quantized tensor sees."""
    return dequantize(quantize(values, scale, dtype), scale)


def channel_scales(weight: FloatArray, axis: int | None, dtype: str = "int8", power_of_two: bool = False) -> NDArray[np.float32]:
    """One scale per slice of `weight` along `axis` (shape [weight.shape[axis]]), or a single one of shape [] for axis None.

    Weights are known exactly, so no value saturates. A slice of zeros gets the scale of threshold 1: any scale stores zeros.
    """
    rows = weight.reshape(1, -1) if axis is None else np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    thresholds = [covering_threshold(float(row.min()), float(row.max()), dtype) or 1.0 for row in rows]
    scales = np.array([scale_of(threshold, dtype, power_of_two) for threshold in thresholds], np.float32)
    return scales.reshape(()) if axis is None else scales


def broadcast_scales(scales: NDArray[np.float32], axis: int | None, rank: int) -> NDArray[np.float32]:
    """`scales` reshaped so that they broadcast along `axis` of a tensor of the given rank."""
    if axis is None:
        return scales
    shape = [1] * rank
    shape[axis] = -1
    return scales.reshape(shape)
