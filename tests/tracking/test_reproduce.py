"""A registered version made again in a fresh folder: same commit, same files, same numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.paths import Paths
from pipeline.tracking.registration import register_release
from pipeline.tracking.reproduce import Difference, compare_numbers, reproduce


def test_numbers_that_differ_or_are_missing_are_named() -> None:
    logged = {"map": {"AP": 0.5, "note": "text"}, "samples": 4, "gone": 1.0}
    assert compare_numbers(logged, logged) == (3, ())
    again = {"map": {"AP": 0.5 + 1e-9}, "samples": 5, "new": 2.0}
    assert compare_numbers(logged, again) == (4, (Difference("gone", 1.0, None), Difference("new", None, 2.0), Difference("samples", 4.0, 5.0)))


def test_version_is_made_again_after_the_checkout_has_moved_on(tracked_copy: tuple[Paths, Config], tmp_path: Path) -> None:
    paths, config = tracked_copy
    work = paths.root / "work.py"
    work.write_text(work.read_text() + "# uncommitted\n")  # goes along as a patch
    register_release(paths, config)
    work.write_text("raise SystemExit('other code')\n")
    (paths.root / "params.yaml").write_text("train:\n  steps: 3\n")
    done = reproduce(paths, config, "candidate", tmp_path / "again")
    assert done.same, done.differences
    assert done.compared == 8
    assert (tmp_path / "again/work.py").read_text().endswith("# uncommitted\n")
    assert "steps: 20" in (tmp_path / "again/params.yaml").read_text()
    assert json.loads((tmp_path / "again/reports/eval_int8.json").read_text())["map"]["AP"] == 0.496
    with pytest.raises(DataError, match="again: is not empty"):
        reproduce(paths, config, 1, tmp_path / "again")


def dvc(folder: Path, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "dvc", *arguments, "--quiet"], cwd=folder, check=False, capture_output=True).returncode


def test_half_pushed_remote_is_named_and_mended_by_pushing_again(tracked_copy: tuple[Paths, Config], tmp_path: Path) -> None:
    """The cache is gone and the remote lacks the model: the message says what to do, and after `dvc push` from the source it works."""
    paths, config = tracked_copy
    remote = tmp_path / "remote"
    assert dvc(paths.root, "remote", "add", "--default", "store", str(remote)) == 0
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, "commit", "--quiet", "--all", "--message", "remote"], cwd=paths.root, check=True)
    register_release(paths, config)
    assert dvc(paths.root, "push") == 0
    pushed = sorted(path for path in remote.rglob("*") if path.is_file())
    onnx_md5 = subprocess.run(["md5sum", "models/multitask.onnx"], cwd=paths.root, capture_output=True, text=True, check=True).stdout[:32]
    lost = remote / "files" / "md5" / onnx_md5[:2] / onnx_md5[2:]
    lost.unlink()
    full_cache = Path(shutil.move(paths.root / ".dvc/cache", tmp_path / "cache"))
    (paths.root / ".dvc/cache").mkdir()
    with pytest.raises(DataError, match="neither in the DVC cache nor in a remote"):
        reproduce(paths, config, 1, tmp_path / "first")
    shutil.rmtree(paths.root / ".dvc/cache")
    shutil.move(full_cache, paths.root / ".dvc/cache")
    assert dvc(paths.root, "push") == 0
    assert sorted(path for path in remote.rglob("*") if path.is_file()) == pushed
    shutil.rmtree(paths.root / ".dvc/cache/files")
    assert reproduce(paths, config, 1, tmp_path / "second").same
