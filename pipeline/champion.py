"""What this checkout knows about the released models: release/champion.json, the numbers that a candidate is compared with.

The file is written by a promotion or rollback, and by the retrain flow from the registry before it starts; no stage asks a server. It belongs in git.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.errors import file_error
from pipeline.io import read_json, write_json
from pipeline.paths import Paths

COMPARED_REPORTS = ("eval_float", "eval_int8", "robustness", "profile", "validation")


@dataclass(frozen=True)
class Champion:
    """The champion of one registered model. `reports`: the numbers of its reports by dotted path, for example reports["profile"]["latency_ms"]."""

    version: int
    lock_sha: str
    reports: dict[str, dict[str, float]]


def read_champion(paths: Paths, model: str) -> Champion | None:
    """The champion of the registered model `model`; None where there is none, or no file.

    Raises:
        DataError: the file is damaged.
    """
    path = _file(paths)
    entry = (read_json(path) if path.is_file() else {}).get(model)
    if entry is None:
        return None
    try:
        return Champion(int(entry["version"]), str(entry["lock_sha"]), dict(entry["reports"]))
    except (KeyError, TypeError, ValueError) as error:
        raise file_error(path, f"entry {model!r} must hold version, lock_sha and reports ({error!r})") from error


def write_champion(paths: Paths, model: str, champion: Champion | None) -> None:
    """Note the champion of `model`, or that it has none; other models' entries stay. An unchanged file is not written."""
    path = _file(paths)
    old = read_json(path) if path.is_file() else {}
    new = {name: entry for name, entry in old.items() if name != model}
    if champion is not None:
        new[model] = asdict(champion)
    if new != old:
        write_json(path, new)


def reports_numbers(folder: Path) -> dict[str, dict[str, float]]:
    """Numbers of the reports in `folder` that rules can compare; a report that is absent is left out."""
    found = {name: folder / f"{name}.json" for name in COMPARED_REPORTS}
    return {name: dict(numbers(read_json(path))) for name, path in found.items() if path.is_file()}


def numbers(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(dotted path, number) for the finite numbers in nested mappings; text, lists and truth values are passed over."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from numbers(value[key], f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield prefix, float(value)


def registered_name(config: Config, chip: str) -> str:
    """Name of the registered model for a chip; a profile given as a file counts by its stem."""
    return f"{config.tracking.registered_model}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', Path(chip).stem)}"


def _file(paths: Paths) -> Path:
    return paths.release_dir / "champion.json"
