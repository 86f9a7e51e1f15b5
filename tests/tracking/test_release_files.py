"""What is gathered from files about one pipeline version."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.champion import numbers, registered_name
from pipeline.config import Config, load_config
from pipeline.errors import DataError
from pipeline.paths import Paths
from pipeline.tracking.release import flatten_params, read_curves, read_release
from pipeline.tracking.revision import git_state, lock_hash, read_lock


def test_release_of_the_sample_project(built_copy: Path) -> None:
    release = read_release(Paths(built_copy), load_config(built_copy / "params.yaml"))
    assert release.name == "bev-multitask-j6m"
    assert release.metrics["float/detection.mAP"] == 0.4
    assert release.metrics["int8/occupancy.mIoU"] == 0.299
    assert release.metrics["latency_ms/shared"] == 4.5
    assert release.metrics["profile/latency_ms"] == 8.75
    assert release.params["train.steps"] == "20"
    assert release.params["dataset.dataroot"] == "null"
    assert len(release.curves) == 20
    assert (release.curves[3].name, release.curves[3].step, release.curves[3].value) == ("curve/loss", 3, 0.25)
    assert release.data.fingerprint == "0" * 64
    assert release.tags["bevj6.chip_profile_hash"] == "c" * 64
    assert release.tags["bevj6.gate"] == "passed"
    assert release.tags["bevj6.lock_sha"] == release.key
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=built_copy, capture_output=True, text=True, check=True).stdout.strip()
    assert (release.tags["bevj6.git_commit"], release.tags["bevj6.git_dirty"]) == (commit, "false")


def test_key_ignores_the_order_in_dvc_lock_and_nothing_else(built_copy: Path) -> None:
    stages = read_lock(built_copy)
    assert lock_hash(dict(reversed(stages.items()))) == lock_hash(stages)
    stages["train"]["params"]["params.yaml"]["train"]["steps"] = 21
    assert lock_hash(stages) != lock_hash(read_lock(built_copy))


def test_dvc_lock_alone_does_not_make_a_checkout_dirty(built_copy: Path) -> None:
    subprocess.run(["git", "add", "dvc.lock"], cwd=built_copy, check=True)
    with (built_copy / "dvc.lock").open("a") as stream:
        stream.write("# later\n")
    assert not git_state(built_copy).dirty
    (built_copy / "work.py").write_text("changed\n")
    assert git_state(built_copy).dirty


def test_directory_outside_git_says_so(tmp_path: Path) -> None:
    assert git_state(tmp_path).commit == "none"


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda root: (root / "reports/eval_int8.json").write_text("{}"), r"reports/eval_int8\.json: md5 is .*, dvc\.lock says"),
        (lambda root: (root / "models/multitask_int8.onnx").unlink(), r"models/multitask_int8\.onnx: is in dvc\.lock but not on disk"),
        (lambda root: (root / "dvc.lock").unlink(), r"dvc\.lock: file not found\. Run `dvc repro` first"),
        (lambda root: (root / "dvc.lock").write_text("stages: ["), r"dvc\.lock: not valid YAML"),
        (lambda root: (root / "dvc.lock").write_text("schema: '2.0'\n"), r"dvc\.lock: has no mapping `stages`"),
        (lambda root: (root / "models/float/curves.csv").unlink(), r"models/float/curves\.csv: file not found"),
        (lambda root: (root / "models/float/curves.csv").write_text("epoch,loss\n1,2\n"), r"columns are \['epoch', 'loss'\]: one must be 'step'"),
        (lambda root: (root / "models/float/curves.csv").write_text("step,loss\n1,two\n"), r"line 2, column 'loss': .*'two' must be numbers"),
    ],
)
def test_files_that_are_not_one_version_are_refused(built_copy: Path, break_it, message: str) -> None:
    break_it(built_copy)
    with pytest.raises(DataError, match=message):
        read_release(Paths(built_copy), Config())


def test_missing_report_field_is_named(built_copy: Path) -> None:
    report = built_copy / "reports/profile.json"
    lock = built_copy / "dvc.lock"
    content = json.loads(report.read_text())
    del content["profile_hash"]
    old = hashlib.md5(report.read_bytes()).hexdigest()
    report.write_text(json.dumps(content))
    lock.write_text(lock.read_text().replace(old, hashlib.md5(report.read_bytes()).hexdigest()))
    with pytest.raises(DataError, match="'profile_hash' is missing"):
        read_release(Paths(built_copy), Config())


def test_gaps_in_curves_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "curves.csv"
    path.write_text("step,loss,map loss (m)\n0,1.5,\n10,nan,2\n")
    assert [(point.name, point.step, point.value) for point in read_curves(path)] == [("curve/loss", 0, 1.5), ("curve/map loss _m_", 10, 2.0)]


def test_numbers_are_the_finite_leaves() -> None:
    report = {"b": {"y": 2, "x": 1.5}, "a": True, "text": "7", "list": [1], "bad": float("inf")}
    assert list(numbers(report)) == [("b.x", 1.5), ("b.y", 2.0)]


LEAVES = st.integers() | st.text(max_size=4)


@given(st.recursive(LEAVES, lambda inner: st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3), max_leaves=8))
def test_flattening_loses_no_value(value) -> None:
    def leaves(node) -> int:
        return sum(leaves(item) for item in node.values()) if isinstance(node, dict) else 1

    tree = {"root": value}
    assert len(flatten_params(tree)) == leaves(tree)


@pytest.mark.parametrize(("chip", "expected"), [("j6m", "bev-multitask-j6m"), ("profiles/my chip v2.yaml", "bev-multitask-my-chip-v2")])
def test_registered_name_carries_the_chip(chip: str, expected: str) -> None:
    assert registered_name(Config(), chip) == expected
