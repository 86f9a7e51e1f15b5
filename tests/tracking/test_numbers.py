"""Numbers of a pipeline version: from files of every kind, and the same for the registry's copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.tracking.numbers import SOURCES, version_numbers
from pipeline.tracking.registration import register_release
from pipeline.tracking.registry import registered_files

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.paths import Paths


def add_ranges_and_plan(root: Path) -> None:
    """What calibration and compilation leave, in the formats of the real stages."""
    meta = np.frombuffer(json.dumps({"batches": 2, "findings": ["input is dark"]}).encode(), np.uint8)
    ranges = {"minimum": [-1.0, -8.0, 0.0], "maximum": [2.0, 4.0, 3.0], "count": [10, 10, 20], "zeros": [0, 5, 5]}
    np.savez(root / "models/calibration.npz", meta=meta, **{name: np.array(values) for name, values in ranges.items()})
    plan = root / "build/j6m"
    plan.mkdir(parents=True)
    (plan / "memory.json").write_text(json.dumps({"chip": "j6m", "input_bytes": 7, "temporary": {"peak_bytes": 5, "buffers": []}}))
    (plan / "schedule.json").write_text(json.dumps({"finish_ms": [0.5, 2.5, 2.0]}))
    outputs = {"det_boxes": {"sqnr_db": 40.0}}
    (root / "reports/sensitivity.json").write_text(json.dumps({"tensors": {"int8": 3, "int16": 1}, "outputs": outputs, "findings": []}))


def test_every_kind_of_file_gives_numbers_and_the_registry_keeps_them(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    add_ranges_and_plan(paths.root)
    found = version_numbers(paths.root)
    assert found["calibration"] == {
        "samples": 2.0, "findings": 1.0, "tensors": 3.0, "largest_magnitude.median": 3.0, "largest_magnitude.maximum": 8.0, "values_zero_share": 0.25,
    }  # fmt: skip
    assert found["plan"] == {"j6m.input_bytes": 7.0, "j6m.temporary.peak_bytes": 5.0, "j6m.blocks": 3.0, "j6m.accelerator_ms": 2.5}
    assert found["quantization"] == {"tensors.int8": 3.0, "tensors.int16": 1.0, "outputs.det_boxes.sqnr_db": 40.0, "findings": 0.0}
    assert (found["gate"], found["training"], found["dataset"]) == ({"latency": 8.75}, {"loss": 0.05}, {"counts.sample": 2.0})
    assert found["eval_int8"]["map.AP"] == 0.496
    assert "topology" not in found  # the sample project has no such stage

    version = register_release(paths, config).version
    with registered_files(paths, config, version) as (_, folder):
        assert version_numbers(folder) == found


def test_every_source_is_an_output_of_the_pipeline(project_root: Path) -> None:
    """In dvc.yaml of the project: a file that is renamed there must not vanish from the pages."""
    text = (project_root / "dvc.yaml").read_text()
    assert [source.output for source in SOURCES if f"- {source.output}:" not in text] == []
