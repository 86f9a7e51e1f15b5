"""Two versions side by side, from directories and from git revisions."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.tracking.compare import as_text, compare_versions


def commit(project: Path) -> None:
    subprocess.run(["git", "add", "--all"], cwd=project, check=True)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, "commit", "--quiet", "--message", "run"], cwd=project, check=True)


def test_a_version_equals_itself(built_copy: Path) -> None:
    same = compare_versions(built_copy, ".", ".")
    assert all(row.delta == 0 for row in same.metrics)
    assert same.params == {}
    assert same.identity == {}
    count = len(same.metrics)
    lines = [f"{count} of {count} numbers are the same (--json lists all)", "data, chip, gate: the same", "parameters: the same"]
    assert as_text(same).splitlines() == lines


def test_revision_against_the_working_tree(built_copy: Path) -> None:
    """What a revision holds comes from the DVC cache, although the working tree has moved on."""
    commit(built_copy)
    profile = built_copy / "reports/profile.json"
    content = json.loads(profile.read_text())
    content["latency_ms"], content["by_head_ms"]["map"], content["profile_hash"] = 9.75, 2.25, "d" * 64
    del content["by_head_ms"]["occupancy"]
    profile.write_text(json.dumps(content))
    params = built_copy / "params.yaml"
    params.write_text(params.read_text().replace("steps: 20", "steps: 7"))
    found = compare_versions(built_copy, "HEAD", ".")
    rows = {row.name: (row.a, row.b, row.delta) for row in found.metrics}
    assert rows["profile/latency_ms"] == (8.75, 9.75, 1.0)
    assert rows["latency_ms/map"] == (1.25, 2.25, 1.0)
    assert rows["latency_ms/occupancy"] == (1.0, None, None)
    assert rows["int8/map.AP"] == (0.496, 0.496, 0.0)
    assert found.params == {"train.steps": ["20", "7"]}
    assert found.identity == {"chip_profile_hash": ["c" * 64, "d" * 64]}
    text = as_text(found)
    assert "train.steps: 20 -> 7" in text
    assert re.search(r"^profile/latency_ms +8\.75 +9\.75 +\+1$", text, re.MULTILINE)
    assert "int8/map.AP" not in text  # the same


@pytest.mark.parametrize("name", ["no-such-branch", "--help", "../elsewhere"])
def test_unknown_version_is_named(built_copy: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"neither a directory in .* nor a git revision"):
        compare_versions(built_copy, ".", name)


def test_directory_without_reports_is_named(built_copy: Path) -> None:
    (built_copy / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: has none of reports/eval_float\.json"):
        compare_versions(built_copy, ".", "empty")


def test_cut_report_is_named(built_copy: Path) -> None:
    (built_copy / "reports/profile.json").write_text('{"chip": "j6m",')
    with pytest.raises(DataError, match=r"reports/profile\.json: not valid JSON"):
        compare_versions(built_copy, ".", ".")
