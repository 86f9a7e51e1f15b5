"""The INT8 model with the data type of chosen tensors as an input: one session measures any mix of int8 and int16.

A candidate's quantizer gets its scale and its limits at run time. int8 is written as int16 integers that are clipped to -128..127 steps first, which
gives the same values. Everything else is the INT8 model itself, rounded weights included; biases keep the scale that belongs to int8 inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from pipeline.quantization.convention import BITS
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, TensorPlan
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.sessions import Batch, Runner, output_noise

LOWS, HIGHS, SCALES = "mix_lows", "mix_highs", "mix_scales"
ZERO = "mix_zero"


class MixedModel:
    """Noise at the outputs for any set of promoted candidates (root tensors that the plan stores as int8)."""

    def __init__(
        self, model: FloatModel, plan: QuantPlan, wide: QuantPlan, candidates: Sequence[str], batches: Sequence[Batch], threads: int
    ) -> None:
        """`wide` is the plan with every candidate promoted: where its scales come from."""
        self._names = list(candidates)
        self._members = {name: [t for t, decision in plan.quantized().items() if decision.root == name] for name in candidates}
        self._settings = {name: (_setting(plan.tensors[name]), _setting(wide.tensors[name])) for name in candidates}
        self.outputs = model.float_outputs
        self._batches = batches
        exact = Runner(model.proto, self.outputs, threads)
        self._reference = [exact.run(batch) for batch in batches]
        self._runner = Runner(self._switchable(write_qdq(model, plan)), self.outputs, threads)

    def noise(self, promoted: Collection[str]) -> dict[str, float]:
        """Noise power / signal power of each output, over all batches, with the given candidates as int16 and the others as int8."""
        chosen = set(promoted)
        settings = np.array([self._settings[name][name in chosen] for name in self._names], np.float32).reshape(-1, 3)
        feeds = {LOWS: settings[:, 0], HIGHS: settings[:, 1], SCALES: settings[:, 2]}
        values = [self._runner.run({**batch, **feeds}) for batch in self._batches]
        return {out: output_noise([ref[out] for ref in self._reference], [value[out] for value in values]) for out in self.outputs}

    def _switchable(self, proto: ModelProto) -> ModelProto:
        graph = proto.graph
        graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(self._names)]) for name in (LOWS, HIGHS, SCALES))
        graph.initializer.append(numpy_helper.from_array(np.array(0, np.int16), ZERO))
        parameters: list[NodeProto] = []
        wanted: dict[str, int] = {}
        for index, name in enumerate(self._names):
            graph.initializer.append(numpy_helper.from_array(np.array(index, np.int64), f"mix_index_{index}"))
            parameters += [helper.make_node("Gather", [vector, f"mix_index_{index}"], [f"{vector}_{index}"]) for vector in (LOWS, HIGHS, SCALES)]
            wanted.update({f"{member}__q": index for member in self._members[name]})
        nodes = [part for node in graph.node for part in _rewritten(node, wanted)]
        del graph.node[:]
        graph.node.extend([*parameters, *nodes])
        return proto


def _rewritten(node: NodeProto, wanted: Mapping[str, int]) -> list[NodeProto]:
    """The node, or the clipped quantizer and the dequantizer with run-time scale in place of a candidate's."""
    if node.op_type == "QuantizeLinear" and node.output[0] in wanted:
        index, integer = wanted[node.output[0]], node.output[0]
        return [
            helper.make_node("Max", [node.input[0], f"{LOWS}_{index}"], [f"{integer}_low"]),
            helper.make_node("Min", [f"{integer}_low", f"{HIGHS}_{index}"], [f"{integer}_clipped"]),
            helper.make_node("QuantizeLinear", [f"{integer}_clipped", f"{SCALES}_{index}", ZERO], [integer]),
        ]
    if node.op_type == "DequantizeLinear" and node.input[0] in wanted:
        return [helper.make_node("DequantizeLinear", [node.input[0], f"{SCALES}_{wanted[node.input[0]]}", ZERO], list(node.output))]
    return [node]


def _setting(decision: TensorPlan) -> tuple[float, float, float]:
    """(lowest value, highest value, scale) of a stored tensor."""
    limit = 2 ** (BITS[decision.dtype] - 1)
    return -limit * decision.scale, (limit - 1) * decision.scale, decision.scale
