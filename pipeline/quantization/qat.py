"""Quantization-aware training: a few epochs in which weights and biases learn to live with integers. The last repair, used where PTQ misses the gate.

The float model is the teacher, so no labels are needed and any float ONNX can be trained: the loss is the noise of every output against the float
model's, in dB, averaged over outputs (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, on the outputs themselves). int8 values
and weights are rounded in the forward pass and passed through in the backward pass (straight-through estimator; Jacob et al., "Quantization and
Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", CVPR 2018). int16 rounding is 48 dB finer and is left out.

Weights are trained in integer steps of their own scale, so that one learning rate fits all layers. They start in the cell that PTQ chose. In the
warm-up the ranges are those of calibration while the observers watch; then the ranges follow from what was seen, and are frozen.

The result is a plan for the same float model: other integers, other bias shifts, other ranges. Everything after it is the same as without training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import NodeProto
from torch import Tensor

from pipeline.config import QuantizationConfig
from pipeline.progress import track
from pipeline.quantization.convention import BITS, broadcast_scales, dequantize, quantize
from pipeline.quantization.fusion import bias_operands
from pipeline.quantization.layers import weighted_nodes
from pipeline.quantization.model import FloatModel
from pipeline.quantization.observers import TensorStatistics
from pipeline.quantization.plan import QuantPlan, StoredWeight, make_plan, observed_tensors
from pipeline.quantization.qdq import bias_of, stored_integers, weight_choice, weight_scales
from pipeline.quantization.sessions import Batch, Runner
from pipeline.quantization.torch_graph import TorchGraph

INSIDE = 0.499
"""Largest distance of a starting weight from the integer that PTQ chose, in steps."""
BIAS_STEPS = 128.0
"""Steps in the largest bias of a layer: what a step of the learning rate means for biases."""
SMALLEST_RATIO = 1e-9  # of noise to signal; keeps the logarithm finite


@dataclass(frozen=True)
class Epoch:
    """One line of the training log. `mean_sqnr_db`: over steps and outputs, against the float model."""

    number: int
    frozen: bool
    mean_sqnr_db: float


@dataclass(frozen=True)
class Trained:
    """Plan after training and the log."""

    plan: QuantPlan
    log: tuple[Epoch, ...]


def train(
    model: FloatModel, plan: QuantPlan, promoted: Mapping[str, str], batches: Sequence[Batch], statistics: Mapping[str, TensorStatistics],
    config: QuantizationConfig,
) -> Trained:  # fmt: skip
    """Train the integers of `plan` on `batches`, in their order.

    Args:
        promoted: as for `make_plan`: it makes the plan anew once the observers have seen the warm-up.
        batches: training data, inputs by name.
        statistics: of calibration; kept for tensors that training does not see.

    Raises:
        ModelError: an operator that training does not know, or torch and onnxruntime differ about the float model.
    """
    with _torch_settings(config.threads):
        graph = TorchGraph(model)
        graph.check(batches[0])
        student = _Student(model, plan, graph)
        teacher = Runner(model.proto, model.float_outputs, config.threads)
        steps = config.qat.epochs * len(batches)
        optimizer = torch.optim.Adam(student.parameters(), lr=config.qat.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0))))
        log = []
        for number in range(config.qat.epochs):
            if number == config.qat.warmup_epochs:
                student.freeze(make_plan(model, config, {**statistics, **student.observed}, promoted))
            levels = []
            for batch in track(batches, f"training epoch {number + 1} of {config.qat.epochs}", len(batches)):
                optimizer.zero_grad()
                loss = _noise_db(student.run(batch), teacher.run(batch))
                loss.backward()
                optimizer.step()
                schedule.step()
                levels.append(-float(loss.detach()))
            log.append(Epoch(number + 1, student.frozen, float(np.mean(levels))))
        return Trained(student.result(), tuple(log))


def _noise_db(values: Mapping[str, Tensor], exact: Mapping[str, NDArray]) -> Tensor:
    """10 log10(noise / signal), mean over outputs."""
    ratios = []
    for name, value in values.items():
        expected = torch.from_numpy(exact[name])
        signal = expected.square().mean().clamp_min(torch.finfo(torch.float32).tiny)
        ratios.append((value - expected).square().mean() / signal + SMALLEST_RATIO)
    return 10.0 * torch.log10(torch.stack(ratios)).mean()


class _Student:
    """The model with trainable weights and biases, fake quantization, and observers while they are not frozen."""

    def __init__(self, model: FloatModel, plan: QuantPlan, graph: TorchGraph) -> None:
        self._model, self._plan, self._graph = model, plan, graph
        self.frozen = False
        self.observed: dict[str, TensorStatistics] = {name: TensorStatistics.empty() for name in observed_tensors(model)}
        self._weights: dict[str, Tensor] = {}  # constant -> weight in steps of its scale
        self._units: dict[str, Tensor] = {}
        self._biases: dict[str, Tensor] = {}  # name of the product -> bias in its own steps
        self._bias_units: dict[str, float] = {}
        for node in weighted_nodes(model):
            self._add_layer(node)
        self._fixed: dict[tuple[str, int], Tensor] = {}
        self._scales = self._int8_scales()

    def _add_layer(self, node: NodeProto) -> None:
        choice = weight_choice(self._model, self._plan, node, 1)
        if choice is None or choice.axis is None or len(self._model.consumers[choice.constant]) > 1:
            return
        weight = self._model.constants[choice.constant]
        scales = weight_scales(self._model, self._plan, node, choice)
        unit = broadcast_scales(scales, choice.axis, weight.ndim)
        chosen = stored_integers(self._model, self._plan, choice, scales).astype(np.float32)
        start = np.clip(weight / unit, chosen - INSIDE, chosen + INSIDE)
        self._weights[choice.constant] = torch.tensor(start, dtype=torch.float32, requires_grad=True)
        self._units[choice.constant] = torch.tensor(unit)
        bias = bias_of(self._model, node)
        if bias is not None:
            value = self._model.constants[bias] + self._plan.bias_shifts.get(node.name, 0.0)
            self._bias_units[node.name] = max(float(np.abs(value).max()) / BIAS_STEPS, float(np.finfo(np.float32).tiny))
            self._biases[node.name] = torch.tensor(value / self._bias_units[node.name], dtype=torch.float32, requires_grad=True)

    def parameters(self) -> list[Tensor]:
        """Everything that is trained, in graph order."""
        return [*self._weights.values(), *self._biases.values()]

    def run(self, batch: Batch) -> dict[str, Tensor]:
        """Outputs with rounded weights and activations."""
        return self._graph.run(batch, self._constant, self._seen)

    def freeze(self, plan: QuantPlan) -> None:
        """Take the ranges of `plan` from now on."""
        self._plan = replace(self._plan, tensors=plan.tensors)
        self._fixed.clear()
        self._scales = self._int8_scales()
        self.frozen = True

    def _int8_scales(self) -> dict[str, float]:
        return {name: decision.scale for name, decision in self._plan.roots().items() if decision.dtype == "int8"}

    def _seen(self, name: str, value: Tensor) -> Tensor:
        if not self.frozen and name in self.observed:
            self.observed[name].update(value.detach().numpy())
        scale = self._scales.get(name)
        return value if scale is None else torch.fake_quantize_per_tensor_affine(value, scale, 0, -128, 127)

    def _constant(self, node: NodeProto, position: int) -> Tensor:
        name = node.input[position]
        if name in self._weights and position == 1:
            return _rounded(self._weights[name]) * self._units[name]
        product = self._product_of_bias(node, name)
        if product in self._biases:
            return self._biases[product] * self._bias_units[product]
        key = (node.name, position)
        if key not in self._fixed:
            self._fixed[key] = self._stored(node, position)
        return self._fixed[key]

    def _product_of_bias(self, node: NodeProto, name: str) -> str:
        """Name of the layer whose bias the operand is; empty for anything else."""
        matched = bias_operands(self._model, node)
        if matched is not None:
            return matched[0].name if matched[1] == name else ""
        return node.name if node.op_type != "MatMul" and bias_of(self._model, node) == name else ""

    def _stored(self, node: NodeProto, position: int) -> Tensor:
        """A constant that is not trained, after rounding where it is stored as integers."""
        choice = weight_choice(self._model, self._plan, node, position)
        if choice is None:
            return self._graph.constant(node, position)
        scales = weight_scales(self._model, self._plan, node, choice)
        unit = broadcast_scales(scales, choice.axis, self._model.constants[choice.constant].ndim)
        return torch.tensor(dequantize(stored_integers(self._model, self._plan, choice, scales), unit))

    def result(self) -> QuantPlan:
        """The plan with the trained integers; a scale that the new ranges raised for its bias counts."""
        weights, shifts = dict(self._plan.weights), dict(self._plan.bias_shifts)
        for node in weighted_nodes(self._model):
            choice = weight_choice(self._model, self._plan, node, 1)
            if choice is None or choice.constant not in self._weights:
                continue
            value = (self._weights[choice.constant].detach() * self._units[choice.constant]).numpy()
            scales = weight_scales(self._model, self._plan, node, choice)
            weights[choice.constant] = StoredWeight(scales, quantize(value, broadcast_scales(scales, choice.axis, value.ndim), choice.dtype))
            bias = bias_of(self._model, node)
            if bias is not None and node.name in self._biases:
                trained = self._biases[node.name].detach().numpy().astype(np.float64) * self._bias_units[node.name]
                shifts[node.name] = trained - self._model.constants[bias]
        return replace(self._plan, weights=weights, bias_shifts=shifts)


def _rounded(steps: Tensor) -> Tensor:
    """Nearest int8 integers; the gradient passes inside the range."""
    limit = float(2 ** (BITS["int8"] - 1))
    return torch.fake_quantize_per_tensor_affine(steps, 1.0, 0, -int(limit), int(limit) - 1)


@contextmanager
def _torch_settings(threads: int) -> Iterator[None]:
    """Fixed threads and deterministic kernels, so that the same input gives the same bytes; the caller's settings come back."""
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(deterministic)
