"""Real data sets that tests may damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.validation.damaged_data import DataSet


@pytest.fixture(scope="session")
def real_root(shared: Path) -> Path:
    root = shared / "data" / "nuscenes-subset"
    if not root.is_dir():
        pytest.skip(f"real nuScenes tables not found at {root}")
    return root


@pytest.fixture
def trainval(real_root: Path, tmp_path: Path) -> DataSet:
    """4 real samples of three scenes and logs; all images, 2 of 4 lidar key frames, no maps."""
    return DataSet(real_root, tmp_path / "set", "v1.0-trainval", files=("samples",))


@pytest.fixture
def trainval_with_maps(real_root: Path, tmp_path: Path) -> DataSet:
    return DataSet(real_root, tmp_path / "set", "v1.0-trainval", files=("samples", "maps/expansion"))


@pytest.fixture
def minival(real_root: Path, tmp_path: Path) -> DataSet:
    """Tables of 81 real consecutive samples of two scenes, without any sensor or map file."""
    return DataSet(real_root, tmp_path / "set", "v1.0-minival", files=())
