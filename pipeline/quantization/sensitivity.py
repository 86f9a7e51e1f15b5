"""What each quantized tensor does to the outputs, measured: the tensor alone is quantized, everything else stays float.

One session serves all measurements: every candidate gets Where(flag, rounded, exact) and the flags are graph inputs, so a measurement is one
run and no compilation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from pipeline.progress import track
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, TensorPlan
from pipeline.quantization.sessions import Batch, Runner, output_noise

FLAGS = "quantize_flags"
NEGLIGIBLE_NOISE = 1e-6
"""Noise power / signal power at the outputs below which a promotion buys nothing (-60 dB; int8 storage alone gives about -45 dB)."""


@dataclass(frozen=True)
class Sensitivity:
    """Effect of one tensor: mean over outputs of noise power / signal power, and each output's own."""

    tensor: str
    module: str
    op: str
    noise: float
    by_output: dict[str, float]


def measure(model: FloatModel, plan: QuantPlan, candidates: Sequence[str], batches: Sequence[Batch], threads: int) -> list[Sensitivity]:
    """Quantize each of `candidates` (root tensors of the plan) alone and compare the outputs; strongest effect first (then by name)."""
    if not candidates:
        return []
    decisions = [plan.tensors[name] for name in candidates]
    outputs = model.float_outputs
    runner = Runner(switchable(model, decisions), outputs, threads)
    off = np.zeros(len(candidates), bool)
    reference = [runner.run({**batch, FLAGS: off}) for batch in batches]
    results = []
    for index, name in enumerate(track(candidates, "sensitivity", len(candidates))):
        flags = off.copy()
        flags[index] = True
        values = [runner.run({**batch, FLAGS: flags}) for batch in batches]
        noise = {out: output_noise([ref[out] for ref in reference], [value[out] for value in values]) for out in outputs}
        results.append(Sensitivity(name, model.module_of(name), model.op_type_of(name), float(np.mean(list(noise.values()))), noise))
    return sorted(results, key=lambda result: (-result.noise, result.tensor))


def switchable(model: FloatModel, decisions: Sequence[TensorPlan]) -> ModelProto:
    """The float model with a switch at every decided tensor; the bool input `quantize_flags` [N] turns them on."""
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    del proto.graph.node[:], proto.graph.value_info[:]
    flags = [f"flag_{index}" for index in range(len(decisions))]
    sizes = numpy_helper.from_array(np.ones(len(decisions), np.int64), "flag_sizes")
    proto.graph.initializer.append(sizes)
    proto.graph.input.append(helper.make_tensor_value_info(FLAGS, TensorProto.BOOL, [len(decisions)]))
    proto.graph.node.append(helper.make_node("Split", [FLAGS, sizes.name], flags, axis=0))
    switches = {decision.tensor: _switch(proto, model, decision, flag) for decision, flag in zip(decisions, flags, strict=True)}
    for name in model.inputs:
        proto.graph.node.extend(switches.get(name, []))
    for original in model.nodes:
        node = NodeProto()
        node.CopyFrom(original)
        for position, name in enumerate(node.input):
            node.input[position] = f"{name}__switched" if name in switches and name not in model.outputs else name
        for position, name in enumerate(node.output):
            node.output[position] = f"{name}__exact" if name in switches and name in model.outputs else name
        proto.graph.node.append(node)
        for name in original.output:
            proto.graph.node.extend(switches.get(name, []))
    return proto


def switchable_all(model: FloatModel, plan: QuantPlan) -> ModelProto:
    """The float model with every activation of the plan rounded and no weight: its switches are all on."""
    decisions = list(plan.roots().values())
    proto = switchable(model, decisions)
    del proto.graph.input[-1]
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(len(decisions), bool), FLAGS))
    return proto


def _switch(proto: ModelProto, model: FloatModel, decision: TensorPlan, flag: str) -> list[NodeProto]:
    """tensor -> Q -> DQ, and Where(flag, that, tensor); a graph output keeps its name at the end."""
    name = decision.tensor
    is_output = name in model.outputs
    source, target = (f"{name}__exact", name) if is_output else (name, f"{name}__switched")
    scale, zero, integer, rounded = f"{name}__scale", f"{name}__zero", f"{name}__q", f"{name}__rounded"
    proto.graph.initializer.append(numpy_helper.from_array(np.array(decision.scale, np.float32), scale))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(0, decision.dtype), zero))
    return [
        helper.make_node("QuantizeLinear", [source, scale, zero], [integer]),
        helper.make_node("DequantizeLinear", [integer, scale, zero], [rounded]),
        helper.make_node("Where", [flag, rounded, source], [target]),
    ]


def choose_promotions(results: Sequence[Sensitivity], count: int) -> dict[str, str]:
    """The `count` tensors with the strongest effect, with the reason; negligible effects are left alone."""
    chosen = [result for result in results[:count] if result.noise > NEGLIGIBLE_NOISE]
    return {
        result.tensor: f"output noise {10 * math.log10(result.noise):.1f} dB when quantized alone, rank {rank} of {len(results)} measured"
        for rank, result in enumerate(chosen, 1)
    }


def worst_by_own_error(errors_db: Mapping[str, float], plan: QuantPlan) -> list[str]:
    """The int8 root tensors, lowest local SQNR first."""
    int8 = [name for name, decision in plan.roots().items() if decision.dtype == "int8"]
    return sorted(int8, key=lambda name: (errors_db[name], name))
