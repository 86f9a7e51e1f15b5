"""`bevj6 validate DATAROOT --version V [--json]`: exit status, document and messages, on a sound data set and on each kind of broken one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli import main
from tests.validation.damaged_data import DataSet


def run(capsys: pytest.CaptureFixture[str], data: DataSet, *options: str) -> tuple[int, str, str]:
    status = main(["validate", str(data.root), "--version", data.version, "--project", str(data.root), *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_sound_set_is_status_0(trainval: DataSet, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, trainval, "--json")
    document = json.loads(out)
    assert (status, err, document["passed"], document["samples"]["kept"]) == (0, "", True, 4)
    before = sorted(trainval.root.rglob("*"))
    status, out, _ = run(capsys, trainval)
    assert status == 0 and "Validation passed" in out and len(out.splitlines()) < 40
    assert sorted(trainval.root.rglob("*")) == before  # nothing is written


def test_limits_of_the_project_are_used(trainval: DataSet, capsys: pytest.CaptureFixture[str]) -> None:
    (trainval.root / "params.yaml").write_text("validation: {fail_on: warning}\n")
    assert run(capsys, trainval)[0] == 1
    (trainval.root / "params.yaml").write_text("validation: {fail_on: sometimes}\n")
    status, out, err = run(capsys, trainval, "--json")
    assert (status, out) == (1, "") and "fail_on" in err


def _cut(data: DataSet) -> None:
    path = data.root / data.version / "sample_data.json"
    path.write_bytes(path.read_bytes()[:2000])


def _unknown_token(data: DataSet) -> None:
    data.edit("sample_annotation", lambda records: records[3].update(sample_token="f00d"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "sample_data.json: not valid JSON"),
        (lambda data: (data.root / data.version / "ego_pose.json").unlink(), "table missing: ego_pose.json"),
        (_unknown_token, "sample_token 'f00d' of record"),
        (lambda data: data.edit("sample", lambda records: records.clear()), "sample_token"),
        (lambda data: data.edit("scene", lambda records: records[0].pop("name")), "name of record"),
    ],
)
def test_tables_that_cannot_be_joined_are_one_message(
    trainval: DataSet, capsys: pytest.CaptureFixture[str], damage: Callable[[DataSet], object], message: str
) -> None:
    damage(trainval)
    status, out, err = run(capsys, trainval, "--json")
    assert (status, out) == (1, "")
    assert err.startswith("bevj6 validate: error: ") and message in err and "Traceback" not in err


def _circular(data: DataSet) -> None:
    data.edit("sample", lambda records: records[1].update(next=records[1]["token"]))


def _nan_pose(data: DataSet) -> None:
    token = data.frames("LIDAR_TOP")[0]["ego_pose_token"]
    data.edit("ego_pose", lambda records: [r.update(translation=[float("nan"), 0.0, 0.0]) for r in records if r["token"] == token])


def _empty_image(data: DataSet) -> None:
    data.own(data.frames("CAM_FRONT")[1]["filename"]).write_bytes(b"")


def _between_frames(data: DataSet) -> None:
    data.edit("sample", lambda records: records[0].update(timestamp=records[0]["timestamp"] + 20_000))


def _empty_scene(data: DataSet) -> None:
    data.edit("scene", lambda records: records.append({**records[0], "token": "empty", "name": "scene-9999"}))


@pytest.mark.parametrize(
    ("damage", "rule", "status", "kept"),
    [
        (_circular, "sample_chain", 1, 4),
        (_nan_pose, "sample_pose", 1, 3),
        (_empty_image, "image_file", 1, 3),
        (_between_frames, "label_time", 1, 3),
        (_empty_scene, "scene_ends", 0, 4),
    ],
)
def test_what_can_be_joined_is_a_finding(
    trainval: DataSet, capsys: pytest.CaptureFixture[str], damage: Callable[[DataSet], None], rule: str, status: int, kept: int
) -> None:
    damage(trainval)
    found, out, err = run(capsys, trainval, "--json")
    document = json.loads(out)
    failed = {entry["name"]: entry for entry in document["rules"] if entry["failed"]}
    assert (found, err, document["passed"], document["samples"]["kept"]) == (status, "", status == 0, kept)
    assert failed[rule]["examples"]


def test_zero_length_lines_and_polygons_of_a_map_are_findings(trainval_with_maps: DataSet, capsys: pytest.CaptureFixture[str]) -> None:
    path = trainval_with_maps.own("maps/expansion/boston-seaport.json")
    stored = json.loads(path.read_text())
    line, polygon = stored["line"][0], next(p for p in stored["polygon"] if p["token"] == stored["ped_crossing"][0]["polygon_token"])
    line["node_tokens"] = line["node_tokens"][:1] * 2
    polygon["exterior_node_tokens"] = polygon["exterior_node_tokens"][:1] * 4
    path.write_text(json.dumps(stored))
    status, out, _ = run(capsys, trainval_with_maps, "--json")
    (rule,) = (entry for entry in json.loads(out)["rules"] if entry["name"] == "map_shapes")
    assert status == 0 and rule["failed"] >= 2


def test_no_data_set_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(tmp_path / "nowhere"), "--version", "v1.0-mini", "--json", "--project", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "version not found" in captured.err
