"""Two pipeline versions side by side: data, parameters, accuracy, simulated latency by head, errors of the layers. `bevj6 compare A B`.

A version is a directory, a git revision, or a registered version: a number or an alias, written `3`, `@3` or `@champion`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import load_config
from pipeline.errors import DataError, file_error
from pipeline.paths import Paths
from pipeline.tracking.registry import registered_files
from pipeline.tracking.release import flatten_params, report_metrics
from pipeline.tracking.revision import is_revision

LAYERS_SHOWN = 20  # those whose error changed most

ReadText = Callable[[str], str | None]


@dataclass(frozen=True)
class Difference:
    """A number of both versions; None where a version lacks it. `delta` = b - a."""

    name: str
    a: float | None
    b: float | None
    delta: float | None


@dataclass(frozen=True)
class Comparison:
    """What differs between versions `a` and `b`: all metrics, the layers whose error changed most (signal to quantization noise of the layer's output
    in the whole network, dB), the parameters that changed, the data and chip hashes."""

    a: str
    b: str
    metrics: tuple[Difference, ...]
    layers_sqnr_db: tuple[Difference, ...]
    params: dict[str, list[str | None]]
    identity: dict[str, list[str | None]]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


@dataclass(frozen=True)
class Snapshot:
    """The files of one version that are compared, parsed."""

    metrics: dict[str, float]
    layers_sqnr_db: dict[str, float]
    params: dict[str, str]
    identity: dict[str, str]


def compare_versions(root: Path, a: str, b: str) -> Comparison:
    """Compare two versions, each a directory ("." for this checkout), a git revision of the project at `root` or a registered version.

    Raises:
        DataError: none of these, or its reports are missing or malformed.
        ServiceError: a registered version is meant and MLflow is away.
    """
    first, second = read_snapshot(root, a), read_snapshot(root, b)
    layers = sorted(_differences(first.layers_sqnr_db, second.layers_sqnr_db), key=lambda row: -abs(row.delta or 0.0))
    return Comparison(
        a, b,
        _differences(first.metrics, second.metrics),
        tuple(row for row in layers[:LAYERS_SHOWN] if row.delta),
        _changed(first.params, second.params),
        _changed(first.identity, second.identity),
    )  # fmt: skip


def read_snapshot(root: Path, version: str) -> Snapshot:
    """Reports, params.yaml and hashes of a version.

    Raises:
        DataError, ServiceError: as in `compare_versions`.
    """
    with _reader(root, version) as read:
        return _snapshot(version, read)


def _snapshot(version: str, read: ReadText) -> Snapshot:
    reports = {name: _json(version, f"reports/{name}.json", read) for name in ("eval_float", "eval_int8", "profile", "gate")}
    if reports["eval_float"] is None and reports["eval_int8"] is None and reports["profile"] is None:
        raise DataError(f"{version}: has none of reports/eval_float.json, reports/eval_int8.json, reports/profile.json. Run `dvc repro` there first")
    dataset = _json(version, "data/dataset.json", read) or {}
    training = _json(version, "models/float/metrics.json", read)
    profile, gate = reports["profile"] or {}, reports["gate"] or {}
    identity = {"data_fingerprint": dataset.get("fingerprint"), "chip": profile.get("chip"), "chip_profile_hash": profile.get("profile_hash")}
    if "passed" in gate:
        identity["gate"] = "passed" if gate["passed"] else "failed"
    return Snapshot(
        report_metrics(reports["eval_float"], reports["eval_int8"], profile, training),
        _layer_errors(version, read("reports/layer_wise_error.csv")),
        flatten_params(yaml.safe_load(read("params.yaml") or "{}")),
        {key: value for key, value in identity.items() if value is not None},
    )


def as_text(comparison: Comparison) -> str:
    """Two tables for a terminal: the numbers that differ, then what changed in parameters and hashes."""
    different = [row for row in comparison.metrics if row.delta != 0.0]
    lines = [f"{'':44s} {'A':>12s} {'B':>12s} {'B - A':>12s}   A = {comparison.a}, B = {comparison.b}"] if different else []
    lines += [f"{row.name:44s} {_number(row.a)} {_number(row.b)} {_number(row.delta, '+')}" for row in different]
    lines.append(f"{len(comparison.metrics) - len(different)} of {len(comparison.metrics)} numbers are the same (--json lists all)")
    if comparison.layers_sqnr_db:
        lines.append("signal to quantization noise of layers, dB, largest changes:")
        lines += [f"  {row.name:42s} {_number(row.a)} {_number(row.b)} {_number(row.delta, '+')}" for row in comparison.layers_sqnr_db]
    for title, changes in (("data, chip, gate", comparison.identity), ("parameters", comparison.params)):
        lines += [f"{title}: the same" if not changes else f"{title}:", *(f"  {key}: {old} -> {new}" for key, (old, new) in changes.items())]
    return "\n".join(lines)


@contextmanager
def _reader(root: Path, version: str) -> Iterator[ReadText]:
    """How files of a version are read: from its directory, from git and DVC, or from MLflow."""
    if (root / version).is_dir():
        yield _folder_reader(root / version)
    elif version.startswith("@") or (version.isdigit() and not is_revision(root, version)):
        name = version.removeprefix("@")
        paths = Paths(root)
        with registered_files(paths, load_config(paths.params), int(name) if name.isdigit() else name) as (_, folder):
            yield _folder_reader(folder)
    else:
        yield _revision_reader(root, version)


def _folder_reader(folder: Path) -> ReadText:
    def read(relative: str) -> str | None:
        path = folder / relative
        if not path.is_file() and relative == "params.yaml":  # among the files kept with a registered version
            path = folder / "pipeline" / relative
        return path.read_text(encoding="utf-8") if path.is_file() else None

    return read


def _revision_reader(root: Path, revision: str) -> ReadText:
    """Files of a git revision; what git does not hold comes from the DVC cache or remote."""
    if not is_revision(root, revision):
        raise DataError(f"{revision}: neither a directory in {root.resolve()} nor a git revision of it (a registered version is @NUMBER or @ALIAS)")
    from dvc.api import DVCFileSystem

    files = DVCFileSystem(str(root), rev=revision)

    def read(relative: str) -> str | None:
        try:
            return str(files.read_text(relative, encoding="utf-8"))
        except FileNotFoundError:
            return None

    return read


def _json(version: str, relative: str, read: ReadText) -> Any:
    text = read(relative)
    try:
        return None if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise file_error(f"{version}: {relative}", f"not valid JSON ({error})") from error


def _layer_errors(version: str, text: str | None) -> dict[str, float]:
    """{tensor: SQNR in dB} of layer_wise_error.csv; a version without it has none."""
    rows = csv.DictReader((text or "").splitlines())
    try:
        return {row["tensor"]: float(row["sqnr_db"]) for row in rows if row["sqnr_db"]}
    except (KeyError, TypeError, ValueError) as error:
        problem = f"line {rows.line_num}: must have tensor and sqnr_db, a number ({error!r})"
        raise file_error(f"{version}: reports/layer_wise_error.csv", problem) from None


def _differences(a: dict[str, float], b: dict[str, float]) -> tuple[Difference, ...]:
    return tuple(_difference(name, a.get(name), b.get(name)) for name in sorted(a.keys() | b.keys()))


def _difference(name: str, a: float | None, b: float | None) -> Difference:
    return Difference(name, a, b, None if a is None or b is None else b - a)


def _changed(a: dict[str, str], b: dict[str, str]) -> dict[str, list[str | None]]:
    return {key: [a.get(key), b.get(key)] for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)}


def _number(value: float | None, sign: str = "") -> str:
    return f"{'-':>12s}" if value is None else f"{value:{sign}12.6g}"
