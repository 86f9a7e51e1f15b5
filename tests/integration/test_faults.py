"""Stages that are killed or run out of space leave the last good outputs in place and say what happened."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.io import read_json
from pipeline.paths import Paths
from tests.integration.chain import project, run_stages

pytestmark = pytest.mark.integration

TINY: dict[str, Any] = {
    "dataset": {"synthetic": {"train_scenes": 1, "val_scenes": 1, "samples_per_scene": 2, "image_width": 160, "image_height": 90}},
}


@pytest.fixture
def finished(tmp_path: Path, project_root: Path) -> Paths:
    """A project whose data set is made."""
    config, paths = project(tmp_path, project_root / "params.yaml", TINY)
    run_stages(["dataset"], config, paths)
    return paths


def change(paths: Paths, seed: int, train_scenes: int) -> None:
    """Ask for another data set, so that the stage has work to do."""
    values = yaml.safe_load(paths.params.read_text(encoding="utf-8"))
    values["dataset"]["synthetic"] |= {"seed": seed, "train_scenes": train_scenes}
    paths.params.write_text(yaml.safe_dump(values), encoding="utf-8")


def start(paths: Paths, project_root: Path, limit: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(project_root)}
    command = [sys.executable, "-m", "pipeline.stages.dataset"]
    return subprocess.Popen(command, cwd=paths.root, env=environment, preexec_fn=limit, stderr=subprocess.PIPE, text=True)


def files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def test_killed_stage_keeps_the_last_good_outputs_and_runs_again(finished: Paths, project_root: Path) -> None:
    before, description = files(finished.synthetic_dataroot), read_json(finished.dataset_json)
    change(finished, seed=1, train_scenes=30)
    process = start(finished, project_root)
    deadline = time.monotonic() + 60
    while not any(finished.synthetic_dataroot.parent.glob(".nuscenes.tmp-*/samples/*/*.jpg")):
        assert process.poll() is None and time.monotonic() < deadline, "the stage never got to writing images"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert files(finished.synthetic_dataroot) == before
    assert read_json(finished.dataset_json) == description
    change(finished, seed=1, train_scenes=1)
    assert start(finished, project_root).wait() == 0
    assert read_json(finished.dataset_json)["fingerprint"] != description["fingerprint"]
    assert list(finished.synthetic_dataroot.parent.glob(".nuscenes.tmp-*")) == []


def test_full_disk_is_named_and_keeps_the_last_good_outputs(finished: Paths, project_root: Path) -> None:
    """A file size limit of the kernel stands in for a full disk: the same write fails in the same place."""
    before, description = files(finished.synthetic_dataroot), read_json(finished.dataset_json)
    change(finished, seed=1, train_scenes=1)
    process = start(finished, project_root, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)))
    _, message = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "cannot write" in message
    assert "Traceback" not in message
    assert files(finished.synthetic_dataroot) == before
    assert read_json(finished.dataset_json) == description


def test_unknown_chip_is_named(finished: Paths, project_root: Path) -> None:
    values = yaml.safe_load(finished.params.read_text(encoding="utf-8"))
    values["j6"]["chip"] = "j7x"
    finished.params.write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-m", "pipeline.stages.compile"]
    done = subprocess.run(
        command, cwd=finished.root, env=os.environ | {"PYTHONPATH": str(project_root)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "j7x" in done.stderr
    assert "j6m" in done.stderr
    assert "Traceback" not in done.stderr
