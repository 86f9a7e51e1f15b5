"""Accuracy won back without training, from the moments of each layer's inputs (pipeline/quantization/layers.py).

Rounding: each weight may go up or down to one of its two neighbouring integers. The pair that minimises the layer's mean squared output error
tr(E G E^T) is searched by coordinate descent from rounding to nearest, so it is never worse on the calibration patches. This is the objective of
AdaRound (Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", ICML 2020), solved on the integers instead of a relaxation.

Bias correction: rounded weights shift the mean of each output channel by E m; the bias takes it back (Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction", ICCV 2019). With it, roundings are chosen for the error around the mean only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from pipeline.config import RepairConfig
from pipeline.quantization.convention import BITS, broadcast_scales, dequantize, quantize
from pipeline.quantization.layers import Floats, LayerMoments, as_rows, from_rows, layer_moments, weighted_nodes
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, StoredWeight
from pipeline.quantization.qdq import bias_of, stored_integers, weight_choice, weight_scales
from pipeline.quantization.sessions import Batch

SWEEPS = 8
RIDGE = 0.01
"""Part of the mean square of a patch's elements added to each: keeps roundings from fitting the few patches that were seen."""


def repair(model: FloatModel, plan: QuantPlan, config: RepairConfig, batches: Sequence[Batch], threads: int) -> QuantPlan:
    """The plan with chosen roundings and bias shifts, as far as they are switched on."""
    if not (config.rounding or config.bias_correction):
        return plan
    moments = layer_moments(model, batches, threads)
    weights: dict[str, StoredWeight] = {}
    shifts: dict[str, NDArray[np.float64]] = {}
    for node in weighted_nodes(model):
        choice = weight_choice(model, plan, node, 1)
        if choice is None or choice.axis is None:
            continue
        weight, seen = model.constants[choice.constant], moments[node.name]
        has_bias = config.bias_correction and bias_of(model, node) is not None
        scales = weight_scales(model, plan, node, choice)
        integers = quantize(weight, broadcast_scales(scales, choice.axis, weight.ndim), choice.dtype)
        if config.rounding and _is_read_once(model, choice.constant):
            integers = _rounded(node, weight, scales, integers, seen, has_bias)
            weights[choice.constant] = StoredWeight(scales, integers)
        if has_bias:
            shifts[node.name] = -_mean_error(node, weight, dequantize(integers, broadcast_scales(scales, choice.axis, weight.ndim)), seen)
    return replace(plan, weights=weights, bias_shifts=shifts)


def _is_read_once(model: FloatModel, constant: str) -> bool:
    """A weight that several layers share has one set of integers, but several sets of inputs."""
    return len(model.consumers[constant]) == 1


def _rounded(node: NodeProto, weight: NDArray, scales: NDArray, nearest: NDArray, seen: LayerMoments, centred: bool) -> NDArray:
    """Integers of `weight` with chosen roundings, in the weight's shape."""
    gram = seen.gram - seen.mean[:, :, None] * seen.mean[:, None, :] if centred else seen.gram
    exact = as_rows(node, weight).astype(np.float64) / scales[:, None]
    start = as_rows(node, nearest).astype(np.float64)
    per_group = len(exact) // len(gram)
    rows = [
        choose_rounding(exact[index * per_group : (index + 1) * per_group], start[index * per_group : (index + 1) * per_group], matrix)
        for index, matrix in enumerate(gram)
    ]
    limit = 2 ** (BITS["int8"] - 1)
    return from_rows(node, np.clip(np.concatenate(rows), -limit, limit - 1), weight.shape).astype(np.int8)


def choose_rounding(exact: Floats, start: Floats, gram: Floats, sweeps: int = SWEEPS) -> Floats:
    """Integers next to `exact` [O, K] with the least sum over rows of e G e^T, e = integer - exact, reached from `start` one weight at a time.

    Args:
        exact: weights in steps of their scale.
        start: integers, each a neighbour of its weight.
        gram: mean x x^T of the inputs, [K, K].
    """
    gram = gram + RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    integers, error = start.copy(), start - exact
    pull = error @ gram
    for _ in range(sweeps):
        flips = 0
        for k in range(exact.shape[1]):
            step = np.where(error[:, k] > 0.0, -1.0, 1.0)  # to the neighbour on the other side
            gain = 2.0 * step * pull[:, k] + gram[k, k]
            step = np.where((gain < 0.0) & (error[:, k] != 0.0), step, 0.0)
            flips += int(np.count_nonzero(step))
            integers[:, k] += step
            error[:, k] += step
            pull += step[:, None] * gram[k]
        if flips == 0:
            break
    return integers


def _mean_error(node: NodeProto, weight: NDArray, stored: NDArray, seen: LayerMoments) -> NDArray[np.float64]:
    """Mean shift of each output channel, [O]."""
    error = as_rows(node, stored).astype(np.float64) - as_rows(node, weight)
    per_group = len(error) // len(seen.mean)
    return np.einsum("ok,ok->o", error, np.repeat(seen.mean, per_group, axis=0))


def output_errors(model: FloatModel, plan: QuantPlan, moments: Mapping[str, LayerMoments]) -> dict[str, float]:
    """Node name -> mean squared output error that its stored weights cause, for reports and tests."""
    errors = {}
    for node in weighted_nodes(model):
        choice = weight_choice(model, plan, node, 1)
        if choice is None or choice.axis is None:
            continue
        weight = model.constants[choice.constant]
        scales = weight_scales(model, plan, node, choice)
        integers = stored_integers(model, plan, choice, scales)
        error = as_rows(node, dequantize(integers, broadcast_scales(scales, choice.axis, weight.ndim))).astype(np.float64) - as_rows(node, weight)
        gram = moments[node.name].gram
        grouped = error.reshape(len(gram), -1, error.shape[1])
        errors[node.name] = float(np.einsum("gok,gkl,gol->", grouped, gram, grouped)) / len(error)
    return errors
