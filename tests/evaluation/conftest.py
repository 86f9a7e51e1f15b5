"""Real tables and real detector output (v1.0-minival), read once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.dataset.build import build_index
from pipeline.dataset.index import Index, write_index
from pipeline.dataset.tables import read_tables

MINIVAL = "v1.0-minival"


@pytest.fixture(scope="session")
def minival_root(shared: Path) -> Path:
    return shared / "data" / "nuscenes-subset"


@pytest.fixture(scope="session")
def minival_index(minival_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    tables = read_tables(minival_root, MINIVAL)
    directory = tmp_path_factory.mktemp("minival") / "index"
    write_index(build_index(tables, {"val": tables.scene["name"].to_pylist()}), directory, str(minival_root), MINIVAL, "fingerprint")
    return Index.open(directory)


@pytest.fixture(scope="session")
def real_detections(shared: Path) -> Path:
    return shared / "data" / "detections" / "cc_3dt_pure_det.json"


@pytest.fixture(scope="session")
def real_results(real_detections: Path) -> dict[str, list[dict]]:
    return json.loads(real_detections.read_text())["results"]
