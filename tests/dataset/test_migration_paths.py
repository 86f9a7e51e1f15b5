"""Data sets that lack something train on, and models/float/metrics.json says which labels were used. A path is a parameter or a fact of the set."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.dataset.images import ImageStore
from pipeline.dataset.index import Index
from pipeline.dataset.stream import segments
from pipeline.io import read_json
from pipeline.paths import Paths
from pipeline.training.batches import BatchLoader
from pipeline.training.labels import LabelStore
from tests.integration.chain import project, run_stages
from tests.models.tiny import TINY

SMALL: dict[str, Any] = {
    "dataset": {"synthetic": {"train_scenes": 1, "val_scenes": 1, "samples_per_scene": 3, "image_width": 160, "image_height": 90}},
    "model": TINY,
    "train": {"image_steps": 0, "steps": 2, "batch_scenes": 1, "processes": 1, "log_every": 1},
}
SAMPLES = 3  # of the training split


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Path:
    """A project of two small scenes in which only the data set has been made."""
    root = tmp_path_factory.mktemp("generated")
    run_stages(["dataset"], *project(root, project_root / "params.yaml", SMALL))
    return root


@pytest.fixture
def copy(generated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private copy of it. The pages of validation, which take most of the time, are left out."""
    monkeypatch.setattr("pipeline.stages.validate.write_data_docs", lambda *args: {})
    yield Path(shutil.copytree(generated, tmp_path / "project"))


def as_real_data(root: Path, **sections: Any) -> tuple[Config, Paths]:
    """The project with its data set given, not generated, so that what was taken away stays away."""
    source = {"source": "nuscenes", "dataroot": "data/nuscenes", **sections.pop("dataset", {})}
    return project(root, root / "params.yaml", {**SMALL, "dataset": source, **sections})


def test_without_occupancy_the_other_heads_are_trained(copy: Path) -> None:
    shutil.rmtree(copy / "data" / "nuscenes" / "gts")
    config, paths = as_real_data(copy)
    run_stages(["dataset", "validate", "topology", "train"], config, paths)
    metrics = read_json(paths.root / "models" / "float" / "metrics.json")
    assert metrics["samples_with_labels"] == {"detection": SAMPLES, "map": SAMPLES, "occupancy": 0}
    assert metrics["tasks_without_labels"] == ["occupancy"]
    description, report = read_json(paths.dataset_json), read_json(paths.report("validation.json"))
    assert description["provides"]["occupancy"] == 0 and any("occupancy head is not trained" in note for note in description["notes"])
    assert next(rule for rule in report["rules"] if rule["name"] == "occupancy_file")["checked"] == 0


@pytest.mark.parametrize(("pairs", "starts"), [("previous", [True, False, False]), ("none", [True, True, True])])
def test_without_pairs_detection_learns_from_single_frames(copy: Path, pairs: str, starts: list[bool]) -> None:
    config, paths = as_real_data(copy, dataset={"pairs": pairs})
    run_stages(["dataset", "validate", *(["train"] if pairs == "none" else [])], config, paths)
    index = Index.open(paths.index_dir)
    assert index.paired == (pairs == "previous")
    assert [len(run) for run in segments(index, "train")] == ([3] if pairs == "previous" else [1, 1, 1])
    loader = BatchLoader(config, index, ImageStore(index, config.model.image_size, paths.image_cache_dir), LabelStore(index, None))
    assert [batch.samples[0].starts_scene for batch in islice(loader.steps(), 3)] == starts
    if pairs == "none":
        metrics = read_json(paths.root / "models" / "float" / "metrics.json")
        assert metrics["samples_with_labels"]["detection"] == SAMPLES and "detection" not in metrics["tasks_without_labels"]


def test_with_a_raster_map_alone_its_boundaries_are_trained(copy: Path) -> None:
    shutil.rmtree(copy / "data" / "nuscenes" / "maps" / "expansion")
    config, paths = as_real_data(copy, maps={"source": "raster"})
    run_stages(["dataset", "validate", "vectorize", "topology", "train"], config, paths)
    locations = read_json(paths.report("topology.json"))["locations"]
    assert {(entry["source"], *entry["labelled"]) for entry in locations.values()} == {("raster", "boundary")}
    assert read_json(paths.root / "models" / "float" / "metrics.json")["samples_with_labels"]["map"] == SAMPLES
