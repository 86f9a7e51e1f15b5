"""The whole chain at the smallest size that still runs every part: same stages, same code, small numbers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import Config, load_config, merge
from pipeline.dataset.build import build_index
from pipeline.dataset.index import write_index
from pipeline.dataset.source import Description
from pipeline.dataset.tables import read_tables
from pipeline.paths import Paths

SMALL: dict[str, Any] = {
    "model": {
        "image_size": [64, 160],
        "backbone": {"depths": [1, 1, 1, 1], "widths": [16, 16, 32, 32]},
        "neck": {"channels": 32},
        "view": {"cells": [32, 32], "channels": 32, "lift_channels": 16, "depth_bins": 16, "encoder_depth": 1},
        "detection": {"anchors": 64, "temporal_instances": 16, "updated_instances": 8, "key_points": 4},
        "map": {"num_query": 16},
        "occupancy": {"channels": 32},
    },
    "train": {"steps": 4, "batch_scenes": 1, "processes": 1},
    "quantization": {"calibration_batches": 2},
    "execution": {"workers": 1},
}


def project(root: Path, template: Path, overrides: dict[str, Any]) -> tuple[Config, Paths]:
    """A project folder with params.yaml = the shipped file + SMALL + `overrides`."""
    values = merge(merge(yaml.safe_load(template.read_text(encoding="utf-8")), SMALL), overrides)
    (root / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return load_config(root / "params.yaml"), Paths(root)


def run_stages(names: list[str], config: Config, paths: Paths) -> dict[str, Any]:
    """Run stages in this process, in order; results by name."""
    return {name: importlib.import_module(f"pipeline.stages.{name}").run(config, paths) for name in names}


def indexed_data_set(config: Config, paths: Paths) -> None:
    """The generated data set and its index, without the checks of the stage `validate`."""
    run_stages(["dataset"], config, paths)
    data = Description.read(paths.dataset_json)
    tables = read_tables(paths.root / data.dataroot, data.version)
    write_index(build_index(tables, data.splits), paths.index_dir, data.dataroot, data.version, data.fingerprint)
