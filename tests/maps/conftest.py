"""Indexes to label: real samples, and a project around a small map."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.dataset.build import IndexTables, build_index
from pipeline.dataset.index import write_index
from pipeline.dataset.tables import read_tables
from pipeline.paths import Paths


@pytest.fixture(scope="session")
def minival_tables(shared: Path) -> IndexTables:
    """Index of 81 real consecutive samples in two cities."""
    return build_index(read_tables(shared / "data" / "nuscenes-subset", "v1.0-minival"), {"train": [], "val": []})


@pytest.fixture
def minival(minival_tables: IndexTables, shared: Path, tmp_path: Path) -> Paths:
    """A project whose index holds the real samples and points at the real maps."""
    paths = Paths(tmp_path / "project")
    write_index(minival_tables, paths.index_dir, str(shared / "data" / "nuscenes-subset"), "v1.0-minival", "test")
    return paths
