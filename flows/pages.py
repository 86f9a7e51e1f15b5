"""What flows show in Prefect: tables from files, as lists of rows or Markdown. Nothing here knows Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.champion import COMPARED_REPORTS, Champion, reports_numbers
from pipeline.io import read_json
from pipeline.paths import Paths
from pipeline.tracking.revision import read_lock

Rows = list[dict[str, Any]]
HEADLINE_DEPTH = 2  # "detection.mAP" yes, "detection.per_class.car.AP" no: that is in the report


def stage_table(lines: list[tuple[str, str, float | None]]) -> str:
    """One row per stage: name, what happened, seconds (empty where not measured by itself)."""
    rows = [f"| {name} | {state} | {'' if seconds is None else f'{seconds:.1f}'} |" for name, state, seconds in lines]
    return "\n".join(["| stage | state | seconds |", "|---|---|---|", *rows])


def field_table(fields: Mapping[str, Any]) -> str:
    """One row per field."""
    return "\n".join(["| field | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in fields.items())])


def stage_reports(root: Path, stage: str) -> tuple[str, ...]:
    """Reports with comparable numbers that a stage of dvc.lock has written."""
    outputs = [Path(output["path"]) for output in read_lock(root).get(stage, {}).get("outs", [])]
    return tuple(path.stem for path in outputs if path.parent.name == "reports" and path.suffix == ".json" and path.stem in COMPARED_REPORTS)


def metric_rows(paths: Paths, reports: tuple[str, ...], champion: Champion | None) -> Rows:
    """The headline numbers of some reports, beside the champion's."""
    now = reports_numbers(paths.reports)
    rows: Rows = []
    for report in reports:
        before = champion.reports.get(report, {}) if champion else {}
        for name, value in now.get(report, {}).items():
            if name.count(".") < HEADLINE_DEPTH and not name.startswith("prior."):
                old = before.get(name)
                rows.append({"metric": f"{report}:{name}", "value": value, "champion": old, "difference": None if old is None else value - old})
    return rows


def gate_rows(paths: Paths) -> Rows:
    """Each rule of the last gate with its value, limit and verdict."""
    fields = ("name", "verdict", "value", "op", "limit", "relative_to", "severity", "reason")
    return [{field: rule.get(field) for field in fields} for rule in read_json(paths.report("gate.json")).get("rules", [])]


def checklist_rows(paths: Paths) -> Rows:
    """Each item of the release checklist with its verdict and what decided it."""
    fields = ("item", "verdict", "reason")
    return [{field: item[field] for field in fields} for item in read_json(paths.report("gate.json")).get("checklist", [])]


def finding_rows(report: Mapping[str, Any]) -> Rows:
    """Validation rules that found something."""
    fields = ("name", "severity", "field", "failed", "checked", "examples")
    return [{field: rule.get(field) for field in fields} for rule in report["rules"] if rule["failed"]]
