"""The description of a data set, its splits, and clear errors for damaged ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import DatasetConfig
from pipeline.dataset.source import Description, dataroot, describe
from pipeline.dataset.splits import resolve_splits
from pipeline.dataset.tables import TABLE_NAMES, read_table, read_tables, vectors
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

    edit(copy_of_mini, table, lambda records: records[0].update(change))
    with pytest.raises(DataError, match=message):
        build_index(read_tables(copy_of_mini, "v1.0-mini"), {})


@pytest.fixture(params=["small file", "large file"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which a table is read."""
    if request.param == "large file":
        monkeypatch.setattr("pipeline.dataset.tables._SMALL_BYTES", -1)


def test_tables_are_read_in_any_layout(tmp_path: Path, reader: None) -> None:
    """One line, indented, with "},{" inside a string, with fields that are not read: the same table."""
    records = [{"token": f"t{i}", "name": 'odd "},\n{" text' if i == 1 else "n\u00e9", "extra": {"x": 1}} for i in range(3)]
    for indent in (None, 0, 2):
        (tmp_path / "attribute.json").write_text(json.dumps(records, indent=indent))
        assert read_table(tmp_path, "attribute").to_pylist() == [{"token": r["token"], "name": r["name"]} for r in records]
    (tmp_path / "attribute.json").write_text("[]")
    assert read_table(tmp_path, "attribute").num_rows == 0


def test_numbers_are_read_to_the_last_bit(tmp_path: Path, reader: None) -> None:
    """As json.loads does: any double, in a list or alone, NaN and infinity too."""
    doubles = np.random.default_rng(0).integers(0, 1 << 64, 30_000, dtype=np.uint64).view(np.float64).reshape(-1, 3)
    numbers = np.vstack([doubles, np.random.default_rng(1).uniform(-2000, 2000, (10_000, 3)), [[np.nan, np.inf, -np.inf]]])
    records = [{"token": f"t{i}", "timestamp": 1532402927647951 + i, "rotation": [], "translation": row} for i, row in enumerate(numbers.tolist())]
    (tmp_path / "ego_pose.json").write_text(json.dumps(records, indent=0))
    table = read_table(tmp_path, "ego_pose")
    read = json.loads((tmp_path / "ego_pose.json").read_text())
    np.testing.assert_array_equal(vectors(tmp_path, table, "translation", 3), np.array([record["translation"] for record in read]))
    assert table["timestamp"].to_pylist() == [record["timestamp"] for record in read]


def test_large_and_small_files_are_read_alike(real_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = read_tables(real_root, "v1.0-mini")
    monkeypatch.setattr("pipeline.dataset.tables._SMALL_BYTES", -1)
    monkeypatch.setattr("pipeline.dataset.tables._BATCH_ROWS", 2048)
    large = read_tables(real_root, "v1.0-mini")
    assert all(getattr(large, name).equals(getattr(small, name)) for name in TABLE_NAMES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        (" \n", "not valid JSON"),
        ('[{"token": "a", "name": "b"},', "not valid JSON"),
        ('[{"token": "a", "name": "b"}', "not valid JSON"),
        ('[{"token": "a", "name": "b"},]', "not valid JSON"),
        ('[{"token": "a", "name": "b"}] [', "not valid JSON"),
        ('[{"token": "a", "name": "b"}][{"token": "c", "name": "d"}]', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (b'[{"token": "a", "name": "\xff"}]', "not valid JSON"),
        ('{"token": "a", "name": "b"}', "must hold one JSON array of records"),
        ("[1, 2]", "must hold one JSON array of records"),
        ('[[{"token": "a", "name": "b"}]]', "must hold one JSON array of records"),
        ('[{"token": "a", "name": null}]', "name of record 'a' is missing"),
        ('[{"token": "a"}]', "name of record 'a' is missing"),
        ('[{"name": "b"}]', "token of record 'number 0' is missing"),
        ('[{"token": "a", "name": "\\ud800"}]', "name of record 'a' is"),
    ],
)
def test_a_damaged_table_is_named(tmp_path: Path, reader: None, content: str | bytes, message: str) -> None:
    (tmp_path / "attribute.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=rf"attribute\.json: {message}"):
        read_table(tmp_path, "attribute")


def test_a_fraction_is_no_count(tmp_path: Path, reader: None) -> None:
    record = {"token": "a", "category_token": "c", "nbr_annotations": 2.5, "first_annotation_token": "", "last_annotation_token": ""}
    (tmp_path / "instance.json").write_text(json.dumps([record]))
    with pytest.raises(DataError, match=r"nbr_annotations of record 'a' is 2\.5: it must be an integer"):
        read_table(tmp_path, "instance")


def test_folder_names_are_no_patterns(tmp_path: Path, reader: None) -> None:
    for name in ("set[1]", "set1", "set*"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "attribute.json").write_text(json.dumps([{"token": name, "name": "n"}]))
    for name in ("set[1]", "set1", "set*"):
        assert read_table(tmp_path / name, "attribute")["token"].to_pylist() == [name]


def test_a_table_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "attribute.json").mkdir()
    with pytest.raises(DataError, match=r"attribute\.json: file cannot be read \(Is a directory\)"):
        read_table(tmp_path, "attribute")


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
