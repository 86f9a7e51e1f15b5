"""What made a pipeline version: the content of dvc.lock and the git commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline.errors import file_error
from pipeline.io import canonical_hash

# Stages that judge and show a version but do not make it: judging it again, by other rules or against another champion, makes no new version.
JUDGING_STAGES = ("gate", "report")
# dvc.lock has its own hash, release/ is about released versions: neither is code or parameters.
NOT_SOURCE = (":(exclude)dvc.lock", ":(exclude)release")


@dataclass(frozen=True)
class GitState:
    """Commit of the checkout ("none" outside git). `patch`: what tracked files other than dvc.lock and release/ have that the commit has not."""

    commit: str
    patch: str

    @property
    def dirty(self) -> bool:
        """Whether the commit alone does not say what ran."""
        return bool(self.patch) or self.commit == "none"


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
    """Key of a pipeline version: sha256 over command, inputs, parameters and outputs of every stage that makes it, whatever the order in the file."""
    return canonical_hash({name: stage for name, stage in stages.items() if name not in JUDGING_STAGES})


def locked_md5(stages: dict[str, dict]) -> dict[str, str]:
    """{path: md5} of the single-file outputs in dvc.lock. Directories, which DVC hashes by a manifest of its own, are left out."""
    outputs = [output for stage in stages.values() for output in stage.get("outs", [])]
    return {output["path"]: output["md5"] for output in outputs if "md5" in output and not output["md5"].endswith(".dir")}


def git_state(root: Path) -> GitState:
    """State of the git checkout that holds `root`."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return GitState("none", "")
    return GitState(commit.strip(), _git(root, "diff", "--binary", "--relative", "HEAD", "--", ".", *NOT_SOURCE) or "")


def is_revision(root: Path, name: str) -> bool:
    """Whether `name` is a commit, tag or branch of the git repository that holds `root`."""
    return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}") is not None


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command, or None where git or the repository is missing."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, errors="surrogateescape", check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
