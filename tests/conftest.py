"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Two cores are shared by everything: one thread per library is faster for the small tensors of the tests, and repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("DVC_NO_ANALYTICS", "true")

# A verdict must not depend on the load of the machine or on luck; HYPOTHESIS_PROFILE=explore looks for new cases.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

PROJECT_ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def project_root() -> Path:
    return PROJECT_ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with real data, measured latencies and graphs, beside the checkout; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("BEVJ6_SHARED", PROJECT_ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder} (set BEVJ6_SHARED)")
    return folder


@pytest.fixture
def sample_project(tmp_path: Path) -> Path:
    """A fresh copy of tests/sample_project, a small DVC project with the files and reports of the real one; nothing has run in it yet."""
    return copy_sample_project(tmp_path / "project")


@pytest.fixture(scope="session")
def built_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample project after `dvc repro`. Shared by the session: copy it to change it."""
    project = copy_sample_project(tmp_path_factory.mktemp("built") / "project")
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=project, check=True, env=os.environ | {"PATH": INTERPRETER_FIRST})
    return project


@pytest.fixture
def built_copy(built_project: Path, tmp_path: Path) -> Path:
    """A private copy of the sample project in which every stage is up to date."""
    return Path(shutil.copytree(built_project, tmp_path / "project", symlinks=True))


INTERPRETER_FIRST = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def copy_sample_project(target: Path) -> Path:
    shutil.copytree(PROJECT_ROOT / "tests" / "sample_project", target, ignore=shutil.ignore_patterns("__pycache__"))
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["git", "init", "--quiet"], [sys.executable, "-m", "dvc", "init", "--quiet"]):
        subprocess.run(command, cwd=target, check=True)
    subprocess.run(["git", "add", "."], cwd=target, check=True)
    subprocess.run(["git", *identity, "commit", "--quiet", "--message", "sample"], cwd=target, check=True)
    return target
