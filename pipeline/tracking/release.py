"""Everything MLflow is told about one pipeline version, gathered from files: parameters, metrics, curves, tags, the data set, the models.

No MLflow in here: `read_release` can be tested, printed (`bevj6 compare`) and repeated without a server.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.champion import numbers, registered_name
from pipeline.config import Config
from pipeline.errors import DataError, file_error
from pipeline.io import read_json
from pipeline.paths import Paths
from pipeline.tracking.numbers import MEMORY_MAP, SCHEDULE
from pipeline.tracking.revision import GitState, git_state, lock_hash, locked_md5, read_lock

LOCK_TAG = "bevj6.lock_sha"  # the key of a pipeline version, on its run and on its model version
GATE_TAG = "bevj6.gate"
HEADLINES = ("detection.mAP", "detection.NDS", "map.AP", "occupancy.mIoU")  # also tags of the model version, for the registry's page
PATCH_NAME = "uncommitted.patch"


@dataclass(frozen=True)
class CurvePoint:
    """One value of a training curve."""

    name: str
    step: int
    value: float


@dataclass(frozen=True)
class DataSource:
    """The data set behind a version: where it lies (relative to the project where it can be) and its sha256 fingerprint."""

    name: str
    source: str
    fingerprint: str


@dataclass(frozen=True)
class Release:
    """One pipeline version. `key` is the hash of dvc.lock, `files` what is kept with it, by its path among the run's artifacts."""

    key: str
    name: str
    params: dict[str, str]
    metrics: dict[str, float]
    curves: tuple[CurvePoint, ...]
    tags: dict[str, str]
    data: DataSource
    paths: Paths
    files: dict[str, Path]
    git: GitState


def read_release(paths: Paths, config: Config, git: GitState | None = None) -> Release:
    """Gather the version that the working tree holds. `git`: the state of its checkout, where `paths` are not in it.

    Raises:
        DataError: a file is missing or malformed, or a model or report is not the one dvc.lock names (edited, or `dvc repro` has not finished).
    """
    stages = read_lock(paths.root)
    check_against_lock(paths.root, stages)
    dataset, profile, gate = (read_json(file) for file in (paths.dataset_json, paths.report("profile.json"), paths.report("gate.json")))
    key = lock_hash(stages)
    git = git or git_state(paths.root)
    metrics = read_metrics(paths)
    source = dataset.get("dataroot") or str(dataset["source"])
    return Release(
        key=key,
        name=registered_name(config, profile["chip"]),
        params=flatten_params(config.model_dump(mode="json")),
        metrics=metrics,
        curves=tuple(read_curves(paths.float_dir / "curves.csv")),
        tags=_tags(paths, git, key, metrics, dataset, profile, gate),
        data=DataSource(f"{dataset['source']}-{dataset['version']}", source, dataset["fingerprint"]),
        paths=paths,
        files=kept_files(paths),
        git=git,
    )


def kept_files(paths: Paths) -> dict[str, Path]:
    """Files that are kept with a version, by artifact path: reports, the float model with its contract, the data set's description, the three files
    that say how all of it was made, and, where they are, ranges and plan. The INT8 model is logged as an MLflow model of its own."""
    reports = {f"reports/{file.relative_to(paths.reports).as_posix()}": file for file in sorted(paths.reports.rglob("*")) if file.is_file()}
    models = {f"models/{file.name}": file for file in (paths.onnx, paths.contract)}
    training = {f"models/float/{name}": paths.float_dir / name for name in ("metrics.json", "curves.csv")}
    origin = {f"pipeline/{file.name}": file for file in (paths.params, paths.root / "dvc.yaml", paths.root / "dvc.lock")}
    plan = [file for name in (MEMORY_MAP, SCHEDULE) for file in sorted(paths.root.glob(f"build/*/{name}"))]
    optional = {file.relative_to(paths.root).as_posix(): file for file in (paths.calibration, *plan) if file.is_file()}
    return reports | models | training | origin | optional | {"data/dataset.json": paths.dataset_json}


def check_against_lock(root: Path, stages: dict[str, dict]) -> None:
    """Refuse outputs that are absent or differ from dvc.lock, so that a version never mixes files of two runs.

    Raises:
        DataError: naming the first such file.
    """
    for relative, md5 in sorted(locked_md5(stages).items()):
        path = root / relative
        if not path.is_file():
            raise file_error(path, "is in dvc.lock but not on disk", "Run `dvc repro` or `dvc checkout`")
        with path.open("rb") as stream:
            actual = hashlib.file_digest(stream, "md5").hexdigest()
        if actual != md5:
            raise file_error(path, f"md5 is {actual}, dvc.lock says {md5}", "Run `dvc repro`: the file was changed by hand or a run was cut short")


def read_metrics(paths: Paths) -> dict[str, float]:
    """`report_metrics` of the working tree.

    Raises:
        DataError: eval_float.json, eval_int8.json or profile.json is missing or malformed.
    """
    training = paths.float_dir / "metrics.json"
    eval_float, eval_int8, profile = (read_json(paths.report(name)) for name in ("eval_float.json", "eval_int8.json", "profile.json"))
    return report_metrics(eval_float, eval_int8, profile, read_json(training) if training.is_file() else None)


def report_metrics(eval_float: Any, eval_int8: Any, profile: Any, training: Any) -> dict[str, float]:
    """Numbers of the reports as MLflow metrics: `float/detection.mAP`, `int8/map.AP`, `latency_ms/occupancy`, `profile/fps`, `train/loss`."""
    profile = profile or {}
    groups = {
        "float": eval_float,
        "int8": eval_int8,
        "latency_ms": profile.get("by_head_ms"),
        "profile": {key: profile[key] for key in profile if key != "by_head_ms"},
        "train": training,
    }
    return {_metric_name(f"{group}/{name}"): value for group, report in groups.items() for name, value in numbers(report)}


def flatten_params(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested sections as dotted names; lists and null as JSON."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten_params(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return flat


def read_curves(path: Path) -> Iterator[CurvePoint]:
    """Points of a CSV file with a column `step` and one column per curve; empty and non-finite cells are passed over.

    Raises:
        DataError: the file is missing, has no column `step`, or a cell is not a number.
    """
    if not path.is_file():
        raise file_error(path, "file not found")
    with path.open(newline="", encoding="utf-8") as stream:
        rows = csv.DictReader(stream)
        if "step" not in (rows.fieldnames or []):
            raise file_error(path, f"columns are {rows.fieldnames}: one must be 'step'")
        for row in rows:
            yield from _points(path, rows.line_num, row)


def _points(path: Path, line: int, row: dict[str, str]) -> Iterator[CurvePoint]:
    for name, cell in row.items():
        if name == "step" or not cell:
            continue
        try:
            step, value = int(row["step"]), float(cell)
        except ValueError:
            raise file_error(path, f"line {line}, column {name!r}: step {row['step']!r} and value {cell!r} must be numbers") from None
        if math.isfinite(value):
            yield CurvePoint(_metric_name(f"curve/{name}"), step, value)


def _tags(
    paths: Paths, git: GitState, key: str, metrics: dict[str, float], dataset: dict[str, Any], profile: dict[str, Any], gate: dict[str, Any]
) -> dict[str, str]:
    headlines = {f"{group}/{name}": metrics.get(f"{group}/{name}") for group in ("float", "int8") for name in HEADLINES}
    try:
        return {
            LOCK_TAG: key,
            "bevj6.git_commit": git.commit,
            "bevj6.git_dirty": str(git.dirty).lower(),
            "bevj6.data_fingerprint": str(dataset["fingerprint"]),
            "bevj6.chip": str(profile["chip"]),
            "bevj6.chip_profile_hash": str(profile["profile_hash"]),
            "bevj6.latency_ms": f"{profile['latency_ms']:.6g}",
            GATE_TAG: "passed" if gate["passed"] else "failed",
            **{f"bevj6.{name}": f"{value:.6g}" for name, value in headlines.items() if value is not None},
        }
    except KeyError as error:
        raise DataError(f"field {error} is missing in data/dataset.json, reports/profile.json or reports/gate.json of {paths.root}") from None


def _metric_name(name: str) -> str:
    """MLflow allows letters, digits and `_-. :/` in a metric's name."""
    return re.sub(r"[^\w\-. :/]", "_", name)
