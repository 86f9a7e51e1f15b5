"""What made a pipeline version: the content of dvc.lock and the git commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline.errors import file_error
from pipeline.io import canonical_hash


@dataclass(frozen=True)
class GitState:
    """Commit of the checkout ("none" outside git); `dirty`: tracked files other than dvc.lock, whose hash is kept apart, differ from it."""

    commit: str
    dirty: bool


def read_lock(root: Path) -> dict[str, dict]:
    """Stages of dvc.lock: {stage: {"cmd", "deps", "params", "outs"}}.

    Raises:
        DataError: dvc.lock is missing or not a DVC lock file.
    """
    path = root / "dvc.lock"
    try:
        lock = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise file_error(path, "file not found", "Run `dvc repro` first") from error
    except yaml.YAMLError as error:
        raise file_error(path, f"not valid YAML ({error})") from error
    if not isinstance(lock, dict) or not isinstance(lock.get("stages"), dict):
        raise file_error(path, "has no mapping `stages`; it is not a DVC lock file")
    return lock["stages"]


def lock_hash(stages: dict[str, dict]) -> str:
    """Key of a pipeline version: sha256 over every stage's command, inputs, parameters and outputs, whatever the order in the file."""
    return canonical_hash(stages)


def locked_md5(stages: dict[str, dict]) -> dict[str, str]:
    """{path: md5} of the single-file outputs in dvc.lock. Directories, which DVC hashes by a manifest of its own, are left out."""
    outputs = [output for stage in stages.values() for output in stage.get("outs", [])]
    return {output["path"]: output["md5"] for output in outputs if "md5" in output and not output["md5"].endswith(".dir")}


def git_state(root: Path) -> GitState:
    """State of the git checkout that holds `root`."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return GitState("none", True)
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)dvc.lock")
    return GitState(commit, bool(changes))


def is_revision(root: Path, name: str) -> bool:
    """Whether `name` is a commit, tag or branch of the git repository that holds `root`."""
    return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}") is not None


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, or None where git or the repository is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
