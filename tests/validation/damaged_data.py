"""A private copy of a real data set that tests may damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.config import ValidationConfig
from pipeline.validation.command import Validation, validate

SPLITS = {"train": ["scene-0061"], "val": ["scene-0103", "scene-0003"]}


class DataSet:
    """A private copy of real tables beside the real sensor files (links); `edit` changes a table, `own` makes a file private."""

    def __init__(self, source: Path, folder: Path, version: str, files: tuple[str, ...]) -> None:
        self.root, self.version = folder, version
        shutil.copytree(source / version, folder / version)
        for path in (folder / version, *(folder / version).iterdir()):
            path.chmod(0o755)
        for name in files:
            for file in (source / name).rglob("*.*"):
                if file.is_file():
                    link = folder / file.relative_to(source)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(file)

    def edit(self, table: str, change: Callable[[list[dict[str, Any]]], Any]) -> None:
        path = self.root / self.version / f"{table}.json"
        records = json.loads(path.read_text())
        change(records)
        path.write_text(json.dumps(records))

    def records(self, table: str) -> list[dict[str, Any]]:
        return json.loads((self.root / self.version / f"{table}.json").read_text())

    def own(self, name: str) -> Path:
        path = self.root / name
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        return path

    def calibrations(self, channel: str) -> list[str]:
        """Tokens of the calibrated_sensor records of a channel, in table order."""
        (sensor,) = (record["token"] for record in self.records("sensor") if record["channel"] == channel)
        return [record["token"] for record in self.records("calibrated_sensor") if record["sensor_token"] == sensor]

    def frames(self, channel: str) -> list[dict[str, Any]]:
        """Key frames of a channel, in table order."""
        tokens = set(self.calibrations(channel))
        return [r for r in self.records("sample_data") if r["calibrated_sensor_token"] in tokens and r["is_key_frame"]]

    def validate(self, splits: Mapping[str, list[str]] = SPLITS, **config: Any) -> Validation:
        return validate(self.root, self.version, splits, {}, ValidationConfig(**config), workers=1)


def failures(result: Validation) -> dict[str, tuple[str, ...]]:
    """Tokens of the failing rows by rule."""
    return {outcome.rule.name: outcome.tokens for outcome in result.outcomes if outcome.tokens}
