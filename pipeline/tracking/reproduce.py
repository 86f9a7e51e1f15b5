"""Make a registered version again, in a fresh folder, and repeat its evaluation: `bevj6 reproduce VERSION FOLDER`.

What made a version is a git commit (with the changes that were not committed then, which are kept with it), dvc.lock, and the files that dvc.lock
names, from the DVC cache of this checkout or from a DVC remote.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.champion import numbers
from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.execution import stage_environment
from pipeline.io import read_json
from pipeline.paths import Paths
from pipeline.tracking.registry import registered_files
from pipeline.tracking.release import PATCH_NAME
from pipeline.tracking.revision import read_lock

EVALUATIONS = ("reports/eval_float.json", "reports/eval_int8.json")
SAME_RELATIVE = 1e-6  # the same program on another processor may round sums differently


@dataclass(frozen=True)
class Difference:
    """A number of a report that came out otherwise; None where one side lacks it."""

    metric: str
    logged: float | None
    reproduced: float | None


@dataclass(frozen=True)
class Reproduction:
    """Where a version was made again, and how many of its evaluation's numbers were compared and which differ by more than SAME_RELATIVE."""

    model: str
    version: int
    folder: str
    git_commit: str
    compared: int
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether every number came out again."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "same": self.same}


def reproduce(paths: Paths, config: Config, version: int | str, folder: Path) -> Reproduction:
    """Check out what made a version into `folder`, which must not exist or be empty, and evaluate again.

    Raises:
        DataError: no such version; the folder is in use; the commit or a file of dvc.lock cannot be had; an evaluation failed.
        ServiceError: MLflow is away or refuses.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: is not empty")
    with registered_files(paths, config, version) as (target, files):
        commit = target.tags["bevj6.git_commit"]
        _check_out(paths.root, commit, files, folder)
        stages = read_lock(folder)
        evaluations = {output: stage for stage, fields in stages.items() for output in _outputs(fields) if output in EVALUATIONS}
        _restore(paths.root, folder, stages, set(evaluations.values()))
        for stage in sorted(set(evaluations.values())):
            _dvc(folder, f"stage {stage} failed", "repro", "--single-item", "--force", "--no-commit", stage)
        logged, again = ({name: read_json(root / name) for name in evaluations} for root in (files, folder))
    compared, differences = compare_numbers(logged, again)
    return Reproduction(target.name, int(target.version), str(folder), commit, compared, differences)


def compare_numbers(logged: Any, again: Any) -> tuple[int, tuple[Difference, ...]]:
    """How many numbers of two nested documents were compared, and those that differ."""
    old, new = dict(numbers(logged)), dict(numbers(again))
    names = sorted(old.keys() | new.keys())
    return len(names), tuple(Difference(name, old.get(name), new.get(name)) for name in names if not _same(old.get(name), new.get(name)))


def _same(a: float | None, b: float | None) -> bool:
    return a is not None and b is not None and math.isclose(a, b, rel_tol=SAME_RELATIVE, abs_tol=SAME_RELATIVE)


def _check_out(root: Path, commit: str, files: Path, folder: Path) -> None:
    """The commit, the changes that were not committed, and the version's own params.yaml, dvc.yaml and dvc.lock."""
    top = Path(_run(root, "not a git checkout", "git", "rev-parse", "--show-toplevel").strip())
    if root.resolve() != top.resolve():
        raise DataError(f"{root}: must be the top of its git checkout, which is {top}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run(root, "cannot clone", "git", "clone", "--quiet", "--no-checkout", str(top), str(folder.resolve()))
    missing = f"commit {commit} is not in {top}: fetch the branch that holds it"
    _run(folder, missing, "git", "checkout", "--quiet", "--detach", commit)
    patch = files / "pipeline" / PATCH_NAME
    if patch.is_file():
        _run(folder, f"the version's uncommitted changes do not fit commit {commit}", "git", "apply", str(patch))
    for name in ("params.yaml", "dvc.yaml", "dvc.lock"):
        shutil.copy(files / "pipeline" / name, folder / name)


def _restore(root: Path, folder: Path, stages: dict[str, dict], wanted: Iterable[str]) -> None:
    """Bring what the wanted stages read and write into `folder`."""
    made = {output for fields in stages.values() for output in _outputs(fields)}
    needed = {entry["path"] for stage in wanted for kind in ("deps", "outs") for entry in stages[stage].get(kind, [])}
    cache = _run(root, "not a DVC project", sys.executable, "-m", "dvc", "cache", "dir").strip()
    _dvc(folder, "cannot set the DVC cache", "cache", "dir", "--local", str(Path(root, cache).resolve()))
    targets = sorted(made & needed)
    if _status(folder, "checkout", "--force", *targets) != 0:
        _dvc(folder, "files of this version are neither in the DVC cache nor in a remote (`dvc push` where it was made)", "pull", "--force", *targets)


def _outputs(fields: dict[str, Any]) -> list[str]:
    return [output["path"] for output in fields.get("outs", [])]


def _status(folder: Path, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=folder, env=stage_environment(), capture_output=True, check=False).returncode


def _dvc(folder: Path, problem: str, *arguments: str) -> str:
    return _run(folder, problem, sys.executable, "-m", "dvc", *arguments)


def _run(folder: Path, problem: str, *command: str) -> str:
    """Output of a command; `DataError` with `problem` and its last words when it fails."""
    done = subprocess.run(command, cwd=folder, env=stage_environment(), capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        words = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise DataError(f"{folder}: {problem} ({'; '.join(words[-3:])})")
    return done.stdout
