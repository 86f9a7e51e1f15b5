"""The stages dataset and validate end to end on real data: index, report, pages, equal bytes, and the last good index after a failure."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import pytest

from pipeline.config import Config, DatasetConfig, ExecutionConfig, ValidationConfig
from pipeline.dataset.index import Index
from pipeline.errors import DataError
from pipeline.paths import Paths
from pipeline.stages import dataset, validate
from pipeline.validation.command import print_summary, validate_dataset
from pipeline.validation.data_docs import write_data_docs
from pipeline.validation.evaluate import Outcome, apply
from pipeline.validation.rules import Rule
from tests.validation.damaged_data import DataSet


def config_for(data: DataSet, **validation) -> Config:
    source = DatasetConfig(source="nuscenes", dataroot=str(data.root), version=data.version)
    return Config(dataset=source, validation=ValidationConfig(**validation), execution=ExecutionConfig(workers=1))


def run(data: DataSet, project: Path, **validation) -> Paths:
    paths = Paths(project)
    dataset.run(config_for(data, **validation), paths)
    validate.run(config_for(data, **validation), paths)
    return paths


def tree_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def test_stage_writes_index_report_and_pages_with_equal_bytes(trainval: DataSet, tmp_path: Path) -> None:
    paths = run(trainval, tmp_path / "a")
    index = Index.open(paths.index_dir)
    assert len(index.tokens("train")) == 1 and len(index.tokens("val")) == 3
    assert index.sample(index.tokens("train")[0]).cameras["CAM_FRONT"].path.is_file()
    report = json.loads(paths.report("validation.json").read_text())
    assert report["passed"] and report["samples"]["kept"] == 4
    assert report["checklist"]["coordinate_consistency_rms_m"] <= 0.15
    assert report["checklist"]["sensor_timestamps_ms"] <= 5
    assert report["checklist"]["channel_alignment_std"] <= 1.2
    again = run(trainval, tmp_path / "b")
    assert tree_hash(paths.root) == tree_hash(again.root)


def test_pages_agree_with_the_report_and_carry_tokens(trainval: DataSet, tmp_path: Path) -> None:
    frame = trainval.frames("CAM_BACK")[0]
    trainval.own(frame["filename"]).write_bytes(b"")
    result = trainval.validate()
    counted = write_data_docs(result.outcomes, result.tidy, tmp_path / "docs", "0123456789abcdef")
    ours = {outcome.rule.name: len(outcome.tokens) for outcome in result.outcomes if result.tidy[outcome.rule.table].num_rows}
    assert counted == ours and counted["image_file"] == 1
    pages = "".join(page.read_text() for page in (tmp_path / "docs").rglob("validations/images/**/*.html"))
    assert frame["token"] in pages and "the image is there, whole and decodable" in pages
    assert str(tmp_path) not in pages
    with (tmp_path / "docs" / "findings.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {"rule": "image_file", "severity": "error", "token": frame["token"], "value": "file has 0 bytes"}.items() <= next(
        row for row in rows if row["rule"] == "image_file"
    ).items()


@pytest.fixture
def without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the HTML pages, which take most of the time and are tested above."""
    monkeypatch.setattr("pipeline.stages.validate.write_data_docs", lambda *args: {})


def test_failure_leaves_the_report_and_the_last_good_index(trainval: DataSet, tmp_path: Path, without_pages: None) -> None:
    paths = run(trainval, tmp_path / "project")
    before = tree_hash(paths.index_dir)
    frame = trainval.frames("CAM_FRONT")[0]
    trainval.own(frame["filename"]).write_bytes(b"")
    with pytest.raises(DataError, match=rf"image_file: 1 of 24 in images\.file_problem, for example '{frame['token']}': file has 0 bytes"):
        run(trainval, tmp_path / "project")
    assert tree_hash(paths.index_dir) == before
    assert not json.loads(paths.report("validation.json").read_text())["passed"]


def test_fail_on_never_goes_on_without_the_damaged_samples(trainval: DataSet, tmp_path: Path, without_pages: None) -> None:
    frame = trainval.frames("CAM_FRONT")[0]
    trainval.own(frame["filename"]).unlink()
    paths = run(trainval, tmp_path / "project", fail_on="never")
    index = Index.open(paths.index_dir)
    assert frame["sample_token"] not in index.tokens() and frame["sample_token"] in index.tokens(kept_only=False)


def test_fail_on_warning_is_stricter(trainval: DataSet, tmp_path: Path, without_pages: None) -> None:
    with pytest.raises(DataError, match="lidar_file: 2 of 4"):
        run(trainval, tmp_path / "project", fail_on="warning")


def test_nothing_left_is_an_error(minival: DataSet, tmp_path: Path, without_pages: None) -> None:
    with pytest.raises(DataError, match="no usable sample is left"):
        run(minival, tmp_path / "project", fail_on="never")


def test_stage_without_description_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dataset\.json: file not found"):
        validate.run(Config(), Paths(tmp_path))


def test_command_reports_any_data_set(trainval: DataSet, capsys: pytest.CaptureFixture[str]) -> None:
    report = validate_dataset(trainval.root, trainval.version, ValidationConfig(), workers=1)
    assert json.loads(json.dumps(report, allow_nan=False))["samples"]["kept"] == 4
    print_summary(report)
    printed = capsys.readouterr().out
    assert "Validation passed" in printed and "phase 4, window 4, strict 0" in printed and "lidar_file" in printed
    assert len(printed.splitlines()) < 40


def test_command_reads_lyft_tables(shared: Path) -> None:
    """Fractional time stamps and 64-digit tokens; a sample cut out of its scene, with camera poses that are up to 103 ms old."""
    root = shared / "data" / "lyft-one-sample" / "v1.01-train"
    report = validate_dataset(root, "v1.01-train", ValidationConfig(), workers=1)
    failed = {rule["name"]: rule["failed"] for rule in report["rules"] if rule["failed"]}
    assert failed["ego_pose_age"] == 6 and failed["sample_chain"] == 1
    assert not {name for name in failed if name.startswith(("camera_", "rig_", "view_", "intrinsics"))}
    assert not report["passed"] and any("No map expansion for Palo Alto" in note for note in report["notes"])


def test_dataroot_without_maps_passes(trainval: DataSet) -> None:
    assert validate_dataset(trainval.root, trainval.version, ValidationConfig(), workers=1)["passed"]


def test_null_is_not_judged_and_limits_are_inclusive() -> None:
    import pyarrow as pa

    table = pa.table({"token": ["a", "b", "c", "d"], "x": pa.array([1.0, None, 5.0, 5.5])})
    outcome = apply(Rule("r", "boxes", "x", "error", "m", 1, 5), table)
    assert outcome == Outcome(outcome.rule, 3, ("d",), ("5.5",), ("",))
