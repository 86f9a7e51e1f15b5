"""One pass through a model with bounded memory: the graph runs in consecutive segments, and what a segment leaves behind lies in one planned arena.

A session that returns every intermediate tensor holds all of them at once. A segment returns as many as the budget allows; they are handed to the
caller, and only those that a later segment reads stay. Each operator still runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, ValueInfoProto, helper

from pipeline.errors import ModelError
from pipeline.j6.memory import Buffer, plan_arena
from pipeline.quantization.model import FloatModel, is_large
from pipeline.quantization.sessions import Batch, open_session

ALIGNMENT = 64  # bytes; a cache line


@dataclass(frozen=True)
class Segment:
    """Consecutive nodes. `reads` come from graph inputs or earlier segments; `writes` are what the caller or a later segment wants."""

    nodes: tuple[NodeProto, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class SegmentedRunner:
    """Runs a model segment by segment; `tensors` are the intermediate tensors that the caller wants to see."""

    def __init__(self, model: FloatModel, tensors: Sequence[str], threads: int, budget_bytes: int) -> None:
        self._model, self._wanted = model, set(tensors)
        self._infos = {info.name: info for info in (*model.light.graph.input, *model.light.graph.value_info, *model.light.graph.output)}
        self.segments = split(model, tensors, budget_bytes)
        self._sessions = [open_session(self._part(segment), threads, self._weights(segment)) for segment in self.segments]
        self._views = self._plan()

    def run(self, batch: Batch) -> Iterator[tuple[str, NDArray]]:
        """(name, value) of each wanted tensor; a value is overwritten once the next one of a later segment arrives.

        Raises `ModelError` for a batch that onnxruntime refuses.
        """
        values = {name: np.ascontiguousarray(batch[name]) for name in self._model.inputs}
        yield from ((name, value) for name, value in values.items() if name in self._wanted)
        for segment, session in zip(self.segments, self._sessions, strict=True):
            binding = session.io_binding()
            for name in segment.reads:
                binding.bind_cpu_input(name, values[name])
            for name in segment.writes:
                view = values[name] = self._views[name]
                binding.bind_output(name, "cpu", 0, view.dtype, view.shape, view.ctypes.data)
            try:
                session.run_with_iobinding(binding)
            except Exception as error:  # onnxruntime has a dozen unrelated exception types for wrong inputs
                raise ModelError(f"onnxruntime cannot run the model on this batch: {error}") from error
            yield from ((name, values[name]) for name in segment.writes if name in self._wanted)

    def _part(self, segment: Segment) -> ModelProto:
        """The segment as a model; the session gets the data of large weights apart."""
        proto = ModelProto(ir_version=self._model.light.ir_version)
        proto.opset_import.extend(self._model.light.opset_import)
        graph = proto.graph
        graph.name = "segment"
        graph.node.extend(segment.nodes)
        graph.input.extend(self._typed(name) for name in segment.reads)
        graph.output.extend(self._typed(name) for name in segment.writes)
        read = {name for node in segment.nodes for name in node.input}
        graph.initializer.extend(tensor for tensor in self._model.light.graph.initializer if tensor.name in read)
        return proto

    def _typed(self, name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, self._infos[name].type.tensor_type.elem_type, self._model.shapes[name])

    def _weights(self, segment: Segment) -> dict[str, NDArray]:
        read = {name for node in segment.nodes for name in node.input}
        large = (tensor.name for tensor in self._model.light.graph.initializer if tensor.name in read and is_large(tensor))
        return {name: np.ascontiguousarray(self._model.constants[name]) for name in large}

    def _plan(self) -> dict[str, NDArray]:
        """A place in the arena for everything that segments write."""
        last = {name: index for index, segment in enumerate(self.segments) for name in (*segment.writes, *segment.reads)}
        buffers = [Buffer(name, self._bytes(name), index, last[name]) for index, segment in enumerate(self.segments) for name in segment.writes]
        plan = plan_arena(buffers, ALIGNMENT)
        arena = np.empty(plan.peak_bytes, np.uint8)
        return {placed.name: self._view(arena, placed.name, placed.offset) for placed in plan.buffers}

    def _bytes(self, name: str) -> int:
        return prod(self._model.shapes[name]) * self._dtype(name).itemsize

    def _dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(helper.tensor_dtype_to_np_dtype(self._infos[name].type.tensor_type.elem_type))

    def _view(self, arena: NDArray[np.uint8], name: str, offset: int) -> NDArray:
        return arena[offset : offset + self._bytes(name)].view(self._dtype(name)).reshape(self._model.shapes[name])


def split(model: FloatModel, tensors: Sequence[str], budget_bytes: int) -> list[Segment]:
    """Consecutive segments of which each writes at most `budget_bytes` of the wanted tensors, or a single one that is larger."""
    wanted = set(tensors)
    groups: list[list[NodeProto]] = [[]]
    used = 0
    for node in model.nodes:
        size = sum(4 * prod(model.shapes[name]) for name in node.output if name in wanted)
        if used and used + size > budget_bytes:
            groups.append([])
            used = 0
        groups[-1].append(node)
        used += size
    return _linked(model, groups, wanted)


def _linked(model: FloatModel, groups: Sequence[Sequence[NodeProto]], wanted: set[str]) -> list[Segment]:
    made_in = {name: index for index, group in enumerate(groups) for node in group for name in node.output if name}
    read_in: dict[str, int] = {}
    for index, group in enumerate(groups):
        read_in.update({name: index for node in group for name in node.input})
    segments = []
    for index, group in enumerate(groups):
        read = dict.fromkeys(name for node in group for name in node.input if name and name not in model.constants)
        made = [name for node in group for name in node.output if name]
        reads = tuple(name for name in read if made_in.get(name, -1) < index)
        writes = tuple(name for name in made if name in wanted or read_in.get(name, index) > index)
        segments.append(Segment(tuple(group), reads, writes))
    return [segment for segment in segments if segment.writes]
