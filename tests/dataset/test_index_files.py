"""The index on disk: row groups, equal bytes, worker processes, and clear errors."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from pipeline.dataset.build import IndexTables, with_verdicts
from pipeline.dataset.index import Index, write_index
from pipeline.errors import DataError


def write(tables: IndexTables, directory: Path) -> Index:
    write_index(tables, directory, "..", "v1.0-minival", "fingerprint")
    return Index.open(directory)


def test_samples_are_the_same_whatever_the_row_groups(real_minival: IndexTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(real_minival, tmp_path / "a" / "data" / "index")
    monkeypatch.setattr("pipeline.dataset.index._ROW_GROUP", dict.fromkeys(("samples", "frames", "sweeps", "calibrations", "boxes", "instances"), 7))
    split = write(real_minival, tmp_path / "b" / "data" / "index")
    # Backwards, so that row groups are dropped and read again.
    for token in reversed(whole.tokens()):
        one, other = whole.sample(token), split.sample(token)
        assert one.boxes.tokens == other.boxes.tokens and list(one.cameras) == list(other.cameras)
        for name, value in asdict(one.boxes).items():
            np.testing.assert_array_equal(value, getattr(other.boxes, name))
        np.testing.assert_array_equal(one.ego2img("CAM_BACK"), other.ego2img("CAM_BACK"))


def test_equal_tables_give_equal_bytes(real_minival: IndexTables, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(real_minival, tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_index_travels_to_worker_processes(real_minival: IndexTables, tmp_path: Path) -> None:
    index = write(real_minival, tmp_path / "data" / "index")
    token = index.tokens()[3]
    before = index.sample(token)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(index)).sample(token).boxes.center_m, before.boxes.center_m)


def test_scenes_splits_and_dropped_samples(real_minival: IndexTables, tmp_path: Path) -> None:
    gone = real_minival.samples["token"][5].as_py()
    index = write(with_verdicts(real_minival, {gone: "image_file"}, {}), tmp_path / "data" / "index")
    assert {name: len(tokens) for name, tokens in index.scenes("val").items()} == {"scene-0103": 39, "scene-0916": 41}
    assert index.tokens("train") == []
    assert len(index.tokens("val", kept_only=False)) == 81 and gone not in index.tokens()


def test_unusable_lidar_is_no_lidar(real_minival: IndexTables, tmp_path: Path) -> None:
    frames = real_minival.frames.to_pylist()
    lidar = next(frame for frame in frames if frame["channel"] == "LIDAR_TOP")
    index = write(with_verdicts(real_minival, {}, {lidar["token"]: "file is missing"}), tmp_path / "data" / "index")
    assert index.sample(lidar["sample_token"]).lidar is None


def test_dataroot_is_found_from_the_project_and_can_be_moved(real_minival: IndexTables, tmp_path: Path) -> None:
    directory = tmp_path / "project" / "data" / "index"
    write_index(real_minival, directory, "data/nuscenes", "v", "f")
    assert Index.open(directory).dataroot == tmp_path / "project" / "data" / "nuscenes"
    assert Index.open(directory, Path("/elsewhere")).dataroot == Path("/elsewhere")


def test_errors_name_the_file(real_minival: IndexTables, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"meta\.json: file not found"):
        Index.open(tmp_path / "nothing")
    directory = tmp_path / "data" / "index"
    index = write(real_minival, directory)
    with pytest.raises(DataError, match="sample token 'f00d' is unknown"):
        index.sample("f00d")
    (directory / "samples.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match=r"samples\.parquet: not a valid Parquet file"):
        Index.open(directory)
