"""Calibration: one pass of the float model over training batches, and the file that holds what it saw."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.config import QuantizationConfig
from pipeline.errors import DataError, ModelError, file_error
from pipeline.io import atomic_path
from pipeline.progress import track
from pipeline.quantization.equalize import BATCHES, channel_shifts, equalized
from pipeline.quantization.lint import BatchLinter, Finding, lint_model, lint_statistics
from pipeline.quantization.model import FloatModel
from pipeline.quantization.observers import TensorStatistics
from pipeline.quantization.plan import observed_tensors
from pipeline.quantization.segments import SegmentedRunner
from pipeline.quantization.sessions import Batch

FORMAT = 1
MEMORY_BUDGET_BYTES = 16 << 20  # intermediate tensors that a segment of the model leaves behind
_COUNTS = ("count", "zeros", "nonfinite")


@dataclass(frozen=True)
class Calibration:
    """What calibration saw. `analysis` are the batches kept for error tables; `model_sha256` ties it to one float model.

    `equalization`: activation -> factor of each channel by which the model was equalized before (`pipeline.quantization.equalize`).
    """

    model_sha256: str
    batches: int
    statistics: dict[str, TensorStatistics]
    analysis: list[dict[str, NDArray]]
    findings: tuple[Finding, ...]
    equalization: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


def calibrate(model: FloatModel, batches: Iterable[Batch], config: QuantizationConfig, budget_bytes: int = MEMORY_BUDGET_BYTES) -> Calibration:
    """Run the float model over `batches` (input name -> array) and collect statistics of every tensor that a plan can quantize.

    At most `calibration_batches` are used. Memory is bounded: one batch (a few where channels are equalized), what is alive between segments of
    `budget_bytes`, 48 KB of statistics a tensor.

    Raises:
        DataError: fewer batches than configured (and not allowed), or a batch that the linter refuses.
        ModelError: a tensor that is NaN or infinite in every batch, or a batch that onnxruntime refuses.
    """
    batches, shifts = _equalization(model, batches, config)
    model = equalized(model, shifts)
    tensors = observed_tensors(model)
    runner = SegmentedRunner(model, tensors, config.threads, budget_bytes)
    statistics = {name: TensorStatistics.empty() for name in tensors}
    linter = BatchLinter(model)
    kept: list[dict[str, NDArray]] = []
    wanted = _analysis_indices(config)
    count = 0
    for batch in track(batches, "calibrate", config.calibration_batches):
        inputs = linter.check(batch)
        for name, value in runner.run(inputs):
            statistics[name].update(value)
        if count in wanted:
            kept.append({name: np.array(value) for name, value in inputs.items()})
        count += 1
        if count == config.calibration_batches:
            break
    check_count(count, config)
    findings = (*lint_model(model), *linter.findings(), *lint_statistics(model, statistics))
    return Calibration(model.sha256, count, statistics, kept, findings, shifts)


def _equalization(
    model: FloatModel, batches: Iterable[Batch], config: QuantizationConfig
) -> tuple[Iterable[Batch], Mapping[str, NDArray[np.float32]]]:
    """(all batches, channel factors from the first few of them)."""
    if not config.repair.equalize:
        return batches, {}
    stream = iter(batches)
    first = list(islice(stream, BATCHES))
    linter = BatchLinter(model)
    return chain(first, stream), channel_shifts(model, [linter.check(batch) for batch in first], config.threads)


def merge(parts: Sequence[Calibration]) -> Calibration:
    """One calibration from those of shards, in any order of processes: statistics add up exactly, findings are those of all shards.

    Raises `ModelError` when there is none, or they belong to different models (to which equalization by different batches leads).
    """
    if not parts or len({part.model_sha256 for part in parts}) != 1 or any(part.equalization for part in parts):
        raise ModelError("calibrations can be merged only when there are some, all of one model as it is (not equalized)")
    statistics = {name: reduce(TensorStatistics.merge, (part.statistics[name] for part in parts)) for name in parts[0].statistics}
    findings = dict.fromkeys(finding for part in parts for finding in part.findings)
    return Calibration(
        parts[0].model_sha256, sum(part.batches for part in parts), statistics, [batch for part in parts for batch in part.analysis], tuple(findings)
    )


def _analysis_indices(config: QuantizationConfig) -> frozenset[int]:
    """Evenly spread batches; the first is always among them, so that short calibrations keep one."""
    step = max(config.calibration_batches // config.analysis_batches, 1)
    return frozenset(range(0, step * config.analysis_batches, step))


def check_count(count: int, config: QuantizationConfig) -> None:
    """Raise `DataError` when `count` batches are fewer than configured and that is not allowed; none at all never is."""
    if count == 0:
        raise DataError("calibration: no batch was given; the training split (or the calibration folder) is empty")
    if count < config.calibration_batches and not config.allow_fewer_batches:
        raise DataError(
            f"calibration: {count} batches, quantization.calibration_batches = {config.calibration_batches}; give more training samples, "
            "lower the number, or set quantization.allow_fewer_batches: true"
        )


def save_calibration(path: Path, calibration: Calibration) -> None:
    """Write calibration.npz: plain arrays and one JSON text, no pickle; equal content is equal bytes."""
    names = list(calibration.statistics)
    values = list(calibration.statistics.values())
    meta = {
        "format": FORMAT,
        "model_sha256": calibration.model_sha256,
        "batches": calibration.batches,
        "tensors": names,
        "analysis_batches": len(calibration.analysis),
        "findings": [asdict(finding) for finding in calibration.findings],
    }
    arrays: dict[str, NDArray] = {"meta": np.frombuffer(json.dumps(meta, sort_keys=True).encode(), np.uint8)}
    arrays["minimum"] = np.array([value.minimum for value in values], np.float64)
    arrays["maximum"] = np.array([value.maximum for value in values], np.float64)
    for name in _COUNTS:
        arrays[name] = np.array([getattr(value, name) for value in values], np.int64)
    arrays["histogram"] = np.stack([value.histogram for value in values])
    for index, batch in enumerate(calibration.analysis):
        arrays.update({f"analysis/{index}/{name}": value for name, value in batch.items()})
    arrays.update({f"equalize/{name}": value for name, value in calibration.equalization.items()})
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)


def load_calibration(path: Path, model: FloatModel | None = None) -> Calibration:
    """Read calibration.npz; with `model`, make sure that it belongs to it.

    Raises:
        DataError: missing, cut or malformed file.
        ModelError: the calibration was made with another model.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        calibration = _from_arrays(arrays)
    except FileNotFoundError as error:
        raise file_error(path, "file not found", "run the stage calibrate") from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise file_error(path, f"not a calibration file, or cut short ({error})", "run the stage calibrate") from error
    if model is not None and calibration.model_sha256 != model.sha256:
        raise ModelError(
            f"{path}: made with another model (sha256 {calibration.model_sha256[:12]}) than {model.path} ({model.sha256[:12]}); calibrate again"
        )
    return calibration


def _from_arrays(arrays: dict[str, NDArray]) -> Calibration:
    meta = json.loads(arrays["meta"].tobytes().decode())
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']}, expected {FORMAT}")
    statistics = {}
    for row, name in enumerate(meta["tensors"]):
        count, zeros, nonfinite = (int(arrays[field][row]) for field in _COUNTS)
        low, high = float(arrays["minimum"][row]), float(arrays["maximum"][row])
        statistics[name] = TensorStatistics(low, high, count, zeros, nonfinite, arrays["histogram"][row])
    analysis: list[dict[str, NDArray]] = [{} for _ in range(meta["analysis_batches"])]
    for key, value in arrays.items():
        if key.startswith("analysis/"):
            _, index, name = key.split("/", 2)
            analysis[int(index)][name] = value
    findings = tuple(Finding(**finding) for finding in meta["findings"])
    equalization = {key.removeprefix("equalize/"): value for key, value in arrays.items() if key.startswith("equalize/")}
    return Calibration(meta["model_sha256"], meta["batches"], statistics, analysis, findings, equalization)
