"""The description of a data set, its splits, and clear errors for damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DatasetConfig
from pipeline.dataset.source import Description, dataroot, describe
from pipeline.dataset.splits import resolve_splits
from pipeline.dataset.tables import read_table
from pipeline.errors import ConfigError, DataError
from pipeline.io import write_json
from pipeline.paths import Paths


@pytest.fixture
def copy_of_mini(real_root: Path, tmp_path: Path) -> Path:
    """A writable dataroot with the real tables of v1.0-mini and nothing else."""
    shutil.copytree(real_root / "v1.0-mini", tmp_path / "set" / "v1.0-mini")
    (tmp_path / "set" / "v1.0-mini").chmod(0o755)
    for path in (tmp_path / "set" / "v1.0-mini").iterdir():
        path.chmod(0o644)
    return tmp_path / "set"


def describe_mini(root: Path, **config: Any) -> dict[str, Any]:
    return describe(DatasetConfig(source="nuscenes", dataroot=str(root), version="v1.0-mini", **config), Paths(root.parent))


def edit(root: Path, table: str, change) -> None:
    path = root / "v1.0-mini" / f"{table}.json"
    records = json.loads(path.read_text())
    change(records)
    path.write_text(json.dumps(records))


def test_real_set_is_described(real_root: Path, tmp_path: Path) -> None:
    config = DatasetConfig(source="nuscenes", dataroot=str(real_root), version="v1.0-trainval")
    description = describe(config, Paths(tmp_path))
    assert description["counts"]["sample_annotation"] == 159
    assert description["provides"] == {"lidar": True, "map_expansion": ["boston-seaport", "singapore-onenorth"], "occupancy": 0}
    assert description["splits"] == {"train": ["scene-0061"], "val": ["scene-0103", "scene-0003"]}
    write_json(tmp_path / "dataset.json", description)
    assert Description.read(tmp_path / "dataset.json").fingerprint == description["fingerprint"]


def test_dataroot_without_maps_and_files_is_reported_not_fatal(copy_of_mini: Path) -> None:
    description = describe_mini(copy_of_mini)
    assert description["provides"] == {"lidar": False, "map_expansion": [], "occupancy": 0}
    assert any("No map expansion for boston-seaport, singapore-onenorth" in note for note in description["notes"])


def test_dataroot_inside_the_project_is_recorded_relative(copy_of_mini: Path) -> None:
    assert describe_mini(copy_of_mini)["dataroot"] == "set"


def test_fingerprint_follows_tables_and_files(copy_of_mini: Path) -> None:
    before = describe_mini(copy_of_mini)["fingerprint"]
    assert describe_mini(copy_of_mini)["fingerprint"] == before
    name = json.loads((copy_of_mini / "v1.0-mini" / "sample_data.json").read_text())[0]["filename"]
    (copy_of_mini / name).parent.mkdir(parents=True)
    (copy_of_mini / name).write_bytes(b"a")
    one_file = describe_mini(copy_of_mini)["fingerprint"]
    (copy_of_mini / name).write_bytes(b"b")
    assert len({before, one_file, describe_mini(copy_of_mini)["fingerprint"]}) == 3


def test_synthetic_dataroot_is_inside_the_project(tmp_path: Path) -> None:
    assert dataroot(DatasetConfig(), Paths(tmp_path)) == tmp_path / "data" / "nuscenes"


def test_missing_version_names_the_present_ones(copy_of_mini: Path) -> None:
    with pytest.raises(DataError, match=r"v1\.0-foo: version not found.*v1.0-mini"):
        describe(DatasetConfig(source="nuscenes", dataroot=str(copy_of_mini), version="v1.0-foo"), Paths(copy_of_mini))


def test_missing_table_is_named(copy_of_mini: Path) -> None:
    (copy_of_mini / "v1.0-mini" / "ego_pose.json").unlink()
    with pytest.raises(DataError, match=r"table missing: ego_pose\.json"):
        describe_mini(copy_of_mini)


@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_json_cut_in_half_is_named(copy_of_mini: Path, keep: float) -> None:
    path = copy_of_mini / "v1.0-mini" / "sample_annotation.json"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data))])
    with pytest.raises(DataError, match=r"sample_annotation\.json: not valid JSON .*Was the file cut"):
        describe_mini(copy_of_mini)


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ("sample", "scene_token"),
        ("sample_data", "ego_pose_token"),
        ("sample_data", "sample_token"),
        ("calibrated_sensor", "sensor_token"),
        ("sample_annotation", "instance_token"),
    ],
)
def test_unknown_token_is_named(copy_of_mini: Path, table: str, field: str) -> None:
    edit(copy_of_mini, table, lambda records: records[1].update({field: "f00d"}))
    with pytest.raises(DataError, match=rf"{table}\.json: {field} 'f00d' of record '\w+' is not a token of"):
        describe_mini(copy_of_mini)


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("sample", {"timestamp": "noon"}, r"timestamp of record '\w+' is 'noon': it must be a number"),
        ("ego_pose", {"rotation": [1, 0, 0]}, r"rotation of record '\w+' is \[1.0, 0.0, 0.0\]: it must hold 4 numbers"),
        ("sample_data", {"filename": "../../etc/passwd"}, r"filename '../../etc/passwd' .* leaves the data set"),
        ("sample_data", {"filename": None}, "filename of record .* is missing"),
        ("calibrated_sensor", {"camera_intrinsic": [[1.0], [2.0]]}, "must be 3 x 3 numbers"),
    ],
)
def test_wrong_field_is_named(copy_of_mini: Path, table: str, change: dict[str, Any], message: str) -> None:
    from pipeline.dataset.build import build_index
    from pipeline.dataset.tables import read_tables

    edit(copy_of_mini, table, lambda records: records[0].update(change))
    with pytest.raises(DataError, match=message):
        build_index(read_tables(copy_of_mini, "v1.0-mini"), {})


def test_tables_are_read_in_any_layout(tmp_path: Path) -> None:
    """One line, indented, with "},{" inside a string, with fields that are not read, with NaN: the same table."""
    records = [{"token": f"t{i}", "name": 'odd "},\n{" text' if i == 1 else "n", "extra": {"x": 1}} for i in range(3)]
    for indent in (None, 0, 2):
        (tmp_path / "attribute.json").write_text(json.dumps(records, indent=indent))
        assert read_table(tmp_path, "attribute").to_pylist() == [{"token": r["token"], "name": r["name"]} for r in records]
    (tmp_path / "attribute.json").write_text("[]")
    assert read_table(tmp_path, "attribute").num_rows == 0


def test_blocks_are_joined_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.dataset.tables._BLOCK_BYTES", 100)
    records = [{"token": f"token-{i}", "name": "x" * (i % 150)} for i in range(200)]
    (tmp_path / "attribute.json").write_text(json.dumps(records, indent=0))
    assert read_table(tmp_path, "attribute").to_pylist() == records


SCENES = [f"s{i}" for i in range(10)]


def test_params_choose_the_held_out_scenes(tmp_path: Path) -> None:
    splits = resolve_splits(SCENES, ("s3", "s1"), tmp_path, "v")
    assert splits.val == ("s1", "s3") and set(splits.train) == set(SCENES) - {"s1", "s3"}


def test_unknown_held_out_scene_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset.val_scenes: 'nope' is not a scene"):
        resolve_splits(SCENES, ("nope",), tmp_path, "v")
    with pytest.raises(ConfigError, match="nothing is left"):
        resolve_splits(SCENES, tuple(SCENES), tmp_path, "v")


def test_splits_file_of_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    write_json(tmp_path / "v" / "splits.json", {"own_train": ["s0"], "own_val": ["s9"]})
    splits = resolve_splits(SCENES, (), tmp_path, "v")
    assert (splits.train, splits.val) == (("s0",), ("s9",))
    write_json(tmp_path / "v" / "splits.json", {"train": ["s0"], "val": ["s0"]})
    with pytest.raises(DataError, match="'s0' is listed twice"):
        resolve_splits(SCENES, (), tmp_path, "v")
    write_json(tmp_path / "v" / "splits.json", {"train": ["s0"], "validation": ["s1"]})
    with pytest.raises(DataError, match=r"splits\.json: must hold one list of scene names called \"val\""):
        resolve_splits(SCENES, (), tmp_path, "v")


def test_without_any_split_the_last_scenes_are_held_out(tmp_path: Path) -> None:
    splits = resolve_splits(SCENES, (), tmp_path, "v1.0-own")
    assert splits.val == ("s8", "s9") and not set(splits.train) & set(splits.val)
    assert "last 2 of 10" in splits.notes[0]


def test_single_scene_is_used_for_both_and_says_so(tmp_path: Path) -> None:
    splits = resolve_splits(["only"], (), tmp_path, "v")
    assert splits.train == splits.val == ("only",)
    assert "AND evaluated on" in splits.notes[0]
