"""The numbers of a pipeline version, by what they describe: what flows show beside the champion's.

Most stages write them as a report; calibration, quantization, plan and training leave them in files of other purpose. Every file here is kept with a
registered version at the same path, so that a version in the registry has the same numbers as the working tree it came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.champion import COMPARED_REPORTS, numbers
from pipeline.io import read_json

MEMORY_MAP, SCHEDULE = "memory.json", "schedule.json"


@dataclass(frozen=True)
class Source:
    """Where numbers come from. `output`: a file or directory, relative to the project; `read`: it as a nested mapping. `depth`: parts of the names
    that are worth a line beside others; deeper ones (a class, a layer) are for the report."""

    name: str
    output: str
    read: Callable[[Path], Any] = read_json
    depth: int = 2


def version_numbers(root: Path) -> dict[str, dict[str, float]]:
    """{source: {dotted name: number}} of a project, or of the files kept with a registered version; sources that are not there are left out.

    Raises:
        DataError: a file is no valid JSON.
    """
    return {source.name: source_numbers(source, root) for source in SOURCES if (root / source.output).exists()}


def source_numbers(source: Source, root: Path) -> dict[str, float]:
    """{dotted name: number} of one source.

    Raises:
        DataError: as in `version_numbers`, or the file is missing.
    """
    return dict(numbers(source.read(root / source.output)))


def _dataset(path: Path) -> dict[str, Any]:
    return {"counts": read_json(path).get("counts")}


def _calibration(path: Path) -> dict[str, float]:
    """Samples and tensors that were seen, and the ranges: largest magnitude of each tensor."""
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        magnitude = np.maximum(np.abs(arrays["minimum"]), np.abs(arrays["maximum"]))
        found = json.loads(arrays["meta"].tobytes())
        return {
            "samples": found["batches"],
            "findings": len(found["findings"]),
            "tensors": len(magnitude),
            "largest_magnitude.median": float(np.median(magnitude)),
            "largest_magnitude.maximum": float(magnitude.max()),
            "values_zero_share": float(arrays["zeros"].sum() / arrays["count"].sum()),
        }


def _quantization(path: Path) -> dict[str, Any]:
    """Tensors by precision, error of each output, what int16 costs."""
    sensitivity = read_json(path)
    kept_without = (sensitivity.get("training") or {}).get("kept_without")
    found = {name: sensitivity.get(name) for name in ("tensors", "outputs", "simulated_us")}
    return {**found, "kept_without_training": kept_without, "findings": len(sensitivity.get("findings", []))}


def _gate(path: Path) -> dict[str, float | None]:
    """Value of each rule."""
    return {rule["name"]: rule["value"] for rule in read_json(path).get("rules", [])}


def _plan(folder: Path) -> dict[str, Any]:
    """Of each chip compiled for: bytes by kind of memory, blocks, and the end of the last one."""
    plans: dict[str, Any] = {}
    for file in sorted(folder.glob(f"*/{MEMORY_MAP}")):
        finish_ms = read_json(file.with_name(SCHEDULE))["finish_ms"]
        plans[file.parent.name] = {**read_json(file), "blocks": len(finish_ms), "accelerator_ms": max(finish_ms)}
    return plans


SOURCES = (
    Source("dataset", "data/dataset.json", _dataset),
    Source("topology", "reports/topology.json"),
    Source("vectorize", "reports/vectorize.json", depth=4),
    Source("training", "models/float/metrics.json"),
    Source("calibration", "models/calibration.npz", _calibration),
    Source("quantization", "reports/sensitivity.json", _quantization, depth=3),
    Source("plan", "build", _plan, depth=3),
    Source("gate", "reports/gate.json", _gate),
    *(Source(name, f"reports/{name}.json", depth=3 if name == "robustness" else 2) for name in COMPARED_REPORTS),
)
