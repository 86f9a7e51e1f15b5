"""What flows show in Prefect: tables from files, as lists of rows or Markdown. Nothing here knows Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.champion import Champion
from pipeline.io import read_json
from pipeline.paths import Paths
from pipeline.tracking.numbers import SOURCES, source_numbers
from pipeline.tracking.revision import read_lock

Rows = list[dict[str, Any]]
DETAIL = ("prior.", "by_kind_ms.", "by_op_ms.", "by_module_ms.", "options.", "summary.")  # groups of numbers that are left to the reports


def stage_table(lines: list[tuple[str, str, float | None]]) -> str:
    """One row per stage: name, what happened, seconds (empty where not measured by itself)."""
    rows = [f"| {name} | {state} | {'' if seconds is None else f'{seconds:.1f}'} |" for name, state, seconds in lines]
    return "\n".join(["| stage | state | seconds |", "|---|---|---|", *rows])


def field_table(fields: Mapping[str, Any]) -> str:
    """One row per field."""
    return "\n".join(["| field | value |", "|---|---|", *(f"| {key} | {value} |" for key, value in fields.items())])


def stage_outputs(root: Path, stage: str) -> list[Path]:
    """What a stage of dvc.lock has written, relative to the project."""
    return [Path(output["path"]) for output in read_lock(root).get(stage, {}).get("outs", [])]


def metric_rows(paths: Paths, stage: str, champion: Champion | None) -> Rows:
    """The headline numbers of what a stage has written, beside the champion's; none for a stage that measures nothing."""
    outputs = stage_outputs(paths.root, stage)
    sources = [source for source in SOURCES if any(Path(source.output).is_relative_to(output) for output in outputs)]
    rows: Rows = []
    for source in sources:
        before = champion.reports.get(source.name, {}) if champion else {}
        for name, value in source_numbers(source, paths.root).items():
            if name.count(".") < source.depth and not name.startswith(DETAIL):
                old = before.get(name)
                rows.append({"metric": f"{source.name}:{name}", "value": value, "champion": old, "difference": None if old is None else value - old})
    return rows


def gate_rows(paths: Paths, champion: Champion | None) -> Rows:
    """Each rule of the last gate with its value, the value that the champion had, limit and verdict."""
    fields = ("name", "verdict", "value", "champion", "op", "limit", "relative_to", "severity", "reason")
    before = champion.reports.get("gate", {}) if champion else {}
    rules = read_json(paths.report("gate.json")).get("rules", [])
    return [{field: before.get(rule["name"]) if field == "champion" else rule.get(field) for field in fields} for rule in rules]


def checklist_rows(paths: Paths) -> Rows:
    """Each item of the release checklist with its verdict and what decided it."""
    fields = ("item", "verdict", "reason")
    return [{field: item[field] for field in fields} for item in read_json(paths.report("gate.json")).get("checklist", [])]


def finding_rows(report: Mapping[str, Any]) -> Rows:
    """Validation rules that found something."""
    fields = ("name", "severity", "field", "failed", "checked", "examples")
    return [{field: rule.get(field) for field in fields} for rule in report["rules"] if rule["failed"]]
