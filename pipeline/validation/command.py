"""Validate a nuScenes-format data set: measure, judge, report. Used by the validate stage and by `bevj6 validate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import DatasetConfig, ValidationConfig
from pipeline.dataset.build import IndexTables, build_index, with_verdicts
from pipeline.dataset.source import describe
from pipeline.dataset.tables import read_tables
from pipeline.paths import Paths
from pipeline.validation import report as reporting
from pipeline.validation.context import Context
from pipeline.validation.evaluate import Outcome, TidyTables, apply, measure, verdicts
from pipeline.validation.rules import rules


@dataclass(frozen=True)
class Validation:
    """Everything that one validation produced."""

    index: IndexTables  # with keep, drop_reason and frame problems filled in
    outcomes: tuple[Outcome, ...]
    tidy: TidyTables
    report: dict[str, Any]


def validate(
    dataroot: Path,
    version: str,
    splits: Mapping[str, Sequence[str]],
    provides: dict[str, Any],
    config: ValidationConfig,
    workers: int,
) -> Validation:
    """Validate one data set.

    Args:
        dataroot: directory that holds the version's tables and the sensor files.
        version: table directory.
        splits: scene names by split, for the index.
        provides: what the data set has (data/dataset.json), copied into the report.
        config: limits and policy.
        workers: processes for reading files.

    Raises:
        DataError: the tables cannot be read or joined. Everything less than that is a finding.
    """
    tables = read_tables(dataroot, version)
    index = build_index(tables, splits)
    context = Context(dataroot, tables, index, config, workers)
    tidy = measure(context)
    outcomes = tuple(apply(rule, tidy[rule.table]) for rule in rules(config))
    found = verdicts(outcomes, tidy)
    report = reporting.build(context, outcomes, tidy, found, provides)
    return Validation(with_verdicts(index, found.drop_reasons, found.bad_frames), outcomes, tidy, report)


def validate_dataset(dataroot: Path, version: str, config: ValidationConfig, workers: int = 2) -> dict[str, Any]:
    """The report of any nuScenes-format data set, without writing anything. Raises `DataError` as `validate` does."""
    description = describe(DatasetConfig(source="nuscenes", dataroot=str(dataroot.resolve()), version=version), Paths(Path.cwd()))
    result = validate(dataroot, version, description["splits"], description["provides"], config, workers)
    return {**result.report, "dataroot": str(dataroot), "version": version, "notes": description["notes"]}


def print_summary(report: dict[str, Any]) -> None:
    """One screen: verdict, samples, time stamps, and the rules that failed."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    samples, counts = report["samples"], report["counts"]
    verdict = "[green]passed[/green]" if report["passed"] else "[red]failed[/red]"
    console.print(f"Validation {verdict}: {counts['error']} errors, {counts['warning']} warnings in {len(report['rules'])} rules")
    dropped = ", ".join(f"{count} by {reason}" for reason, count in samples["dropped"].items())
    console.print(f"Samples: {samples['kept']} of {samples['total']} kept" + (f" (dropped: {dropped})" if dropped else ""))
    times = Table("camera", "phase ms", "jitter p99 ms", "jitter max ms", title="Time stamps relative to the lidar key frame", title_justify="left")
    for name, camera in report["timestamps"]["cameras"].items():
        times.add_row(name, *(f"{camera[key]:.2f}" for key in ("phase_median_ms", "jitter_p99_ms", "jitter_max_ms")))
    console.print(times)
    console.print("Samples kept by policy: " + ", ".join(f"{name} {kept}" for name, kept in report["timestamps"]["policies"].items()))
    failing = Table("rule", "severity", "failed", "limit", "first token", "value", title="Findings", title_justify="left")
    for rule in report["rules"]:
        if rule["failed"]:
            shown = (rule["name"], rule["severity"], f"{rule['failed']} of {rule['checked']}", rule["limit"])
            failing.add_row(*shown, rule["examples"][0][:32], rule["example_values"][0][:60])
    console.print(failing if failing.row_count else "No findings.")
    for note in report.get("notes", []):
        console.print(f"Note: {note}")
