"""Real nuScenes tables, indexed once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.dataset.build import IndexTables, build_index
from pipeline.dataset.index import Index, write_index
from pipeline.dataset.tables import Tables, read_tables

VERSIONS = ("v1.0-mini", "v1.0-trainval", "v1.0-minival")


@pytest.fixture(scope="session")
def real_root(shared: Path) -> Path:
    """A dataroot with real tables, 24 images and 2 lidar key frames."""
    root = shared / "data" / "nuscenes-subset"
    if not root.is_dir():
        pytest.skip(f"real nuScenes tables not found at {root}")
    return root


@pytest.fixture(scope="session", params=VERSIONS)
def real_tables(request: pytest.FixtureRequest, real_root: Path) -> Tables:
    return read_tables(real_root, request.param)


@pytest.fixture(scope="session")
def real_index_tables(real_tables: Tables) -> IndexTables:
    return build_index(real_tables, {"train": ["scene-0061", "scene-0003"], "val": ["scene-0103", "scene-0916"]})


@pytest.fixture(scope="session")
def real_index(real_tables: Tables, real_index_tables: IndexTables, real_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory = tmp_path_factory.mktemp("project") / "data" / "index"
    write_index(real_index_tables, directory, str(real_root), real_tables.folder.name, "test")
    return Index.open(directory)


@pytest.fixture(scope="session")
def real_minival(real_root: Path) -> IndexTables:
    """The index of 81 real consecutive samples of two scenes, all in the split "val"."""
    return build_index(read_tables(real_root, "v1.0-minival"), {"val": ["scene-0103", "scene-0916"]})
