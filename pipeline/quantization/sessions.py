"""onnxruntime with everything that could change a number held fixed: threads, deterministic kernels, and no fusion of QDQ nodes.

Unfused QDQ nodes compute exactly what the file says (float arithmetic on integer-valued steps), on every CPU. Fused int8 kernels are faster
and differ by rounding of the requantization only; products use those, analysis uses these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from pipeline.errors import ModelError

Batch = Mapping[str, NDArray]
MEMORY_BUDGET_BYTES = 512 << 20  # intermediate tensors held at once


class Runner:
    """One session that returns `tensors` (intermediate or output) of a model."""

    def __init__(self, proto: ModelProto, tensors: Sequence[str], threads: int) -> None:
        """Raises `ModelError` when onnxruntime refuses the model."""
        self.tensors = list(tensors)
        self._buffers: dict[str, NDArray] = {}
        self._session = open_session(with_outputs(proto, tensors), threads)

    def run(self, batch: Batch) -> dict[str, NDArray]:
        """Values of the tensors for one set of inputs; an input asked for is handed back."""
        computed = [name for name in self.tensors if name not in batch]
        try:
            values = self._session.run(computed, dict(batch)) if computed else []
        except Exception as error:  # same as above, for wrong inputs
            raise ModelError(f"onnxruntime cannot run the model on this batch: {error}") from error
        return dict(zip(computed, values, strict=True)) | {name: batch[name] for name in self.tensors if name in batch}

    def peek(self, batch: Batch) -> dict[str, NDArray]:
        """Like `run`, but the arrays are overwritten by the next call: new memory for hundreds of tensors costs more than computing them."""
        if not self._buffers:
            self._buffers = {name: value for name, value in self.run(batch).items() if name not in batch}
            return self._buffers | {name: batch[name] for name in self.tensors if name in batch}
        binding = self._session.io_binding()
        for name, value in batch.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(value))
        for name, value in self._buffers.items():
            binding.bind_output(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise ModelError(f"onnxruntime cannot run the model on this batch: {error}") from error
        return self._buffers | {name: batch[name] for name in self.tensors if name in batch}


def open_session(proto: ModelProto, threads: int, weights: Mapping[str, NDArray] | None = None) -> Any:
    """Session of a model in memory. `weights` are arrays for initializers that hold no data of their own (`pipeline.quantization.segments`).

    Raises `ModelError` when onnxruntime refuses the model.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.use_deterministic_compute = True
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads would take the time that the observers need
    if weights:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
        options.add_external_initializers(list(weights), values)
    try:
        return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a dozen unrelated exception types for a model it cannot load
        raise ModelError(f"onnxruntime cannot load the model: {error}") from error


def with_outputs(proto: ModelProto, tensors: Sequence[str]) -> ModelProto:
    """Copy of a model that also returns the given float tensors."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    known = {value.name for value in (*copy.graph.output, *copy.graph.input)}
    copy.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in tensors if name not in known)
    return copy


def split_by_memory(tensors: Sequence[str], shapes: Mapping[str, tuple[int, ...]], budget_bytes: int = MEMORY_BUDGET_BYTES) -> Iterator[list[str]]:
    """Consecutive parts of `tensors` whose float32 values fit the budget; every part has at least one tensor."""
    part: list[str] = []
    used = 0
    for name in tensors:
        size = 4 * prod(shapes[name])
        if part and used + size > budget_bytes:
            yield part
            part, used = [], 0
        part.append(name)
        used += size
    if part:
        yield part


def output_noise(reference: Sequence[NDArray], values: Sequence[NDArray]) -> float:
    """Mean over outputs of noise power / signal power; 0 for equal outputs. Infinite where an output became NaN or infinite."""
    ratios = []
    for expected, value in zip(reference, values, strict=True):
        signal = float(np.sum(expected.astype(np.float64) ** 2))
        noise = float(np.sum((expected.astype(np.float64) - value) ** 2))
        ratios.append(noise / signal if signal > 0.0 else float(noise > 0.0))
    mean = float(np.mean(ratios))
    return mean if np.isfinite(mean) else float("inf")
