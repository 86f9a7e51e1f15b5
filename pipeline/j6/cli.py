"""Typed entry points of the `bevj6` command line: each takes plain arguments and returns the JSON document it prints.

python -m pipeline.j6 profile MODEL.onnx|PLAN.json --chip j6m [--json] [--html FILE] [--trace FILE] [--csv FILE] [--against OTHER]
python -m pipeline.j6 compile MODEL.onnx --chip j6m --out PLAN.json
python -m pipeline.j6 fit --measured CSV --zoo DIR --out FILE
python -m pipeline.j6 validate --measured CSV --zoo DIR [--cross-validate] [--summary FILE.csv] [--json]
python -m pipeline.j6 chips
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.io import write_json, write_text
from pipeline.j6.chip import Value, known_chips, load_chip
from pipeline.j6.compiler import CompileOptions, compile_model
from pipeline.j6.plan import Plan, read_plan, write_plan


def parse_shapes(entries: list[str]) -> dict[str, tuple[int, ...]]:
    """["images=1x3x640x640"] -> {"images": (1, 3, 640, 640)}. Raises `ConfigError` naming the entry."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        name, separator, text = entry.partition("=")
        sizes = text.split("x")
        if not separator or not name or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ConfigError(f"--shape {entry!r}: expected NAME=1x3x640x640")
        shapes[name] = tuple(int(size) for size in sizes)
    return shapes


def parse_overrides(entries: list[str]) -> dict[str, Value]:
    """["ddr_peak_gbps=51.2"] -> {"ddr_peak_gbps": 51.2}. Raises `ConfigError` naming the entry."""
    overrides: dict[str, Value] = {}
    for entry in entries:
        name, separator, text = entry.partition("=")
        try:
            overrides[name] = {"true": True, "false": False}[text] if text in ("true", "false") else float(text)
        except ValueError:
            separator = ""
        if not separator or not name:
            raise ConfigError(f"--set {entry!r}: expected NAME=NUMBER")
    return overrides


def load_or_compile(model: Path, chip: str, options: CompileOptions, overrides: Mapping[str, Value] | None = None) -> Plan:
    """A plan from a plan file (.json) or by compiling an ONNX file."""
    if model.suffix == ".json":
        return read_plan(model)
    return compile_model(model, load_chip(chip, overrides), options)


def compile_command(
    model: Path, chip: str, out: Path, options: CompileOptions | None = None, overrides: Mapping[str, Value] | None = None
) -> dict[str, Any]:
    """Compile `model` and write the plan to `out`; returns a summary."""
    plan = load_or_compile(model, chip, options or CompileOptions(), overrides)
    write_plan(plan, out)
    blocks = {"total": len(plan.blocks), "cpu": sum(block.unit == "CPU" for block in plan.blocks)}
    return {
        "simulated": True,
        "plan": str(out),
        "chip": plan.chip["name"],
        "profile_hash": plan.profile_hash,
        "bpu_ms": plan.schedule.makespan_ms,
        "blocks": blocks,
    }


@dataclass(frozen=True)
class Outputs:
    """Files that `profile` writes beside the document it returns."""

    html: Path | None = None
    trace: Path | None = None
    layers: Path | None = None


def profile_command(
    model: Path,
    chip: str = "j6m",
    options: CompileOptions | None = None,
    overrides: Mapping[str, Value] | None = None,
    against: Path | None = None,
    scenario: Path | None = None,
    design_fps: float | None = None,
    outputs: Outputs | None = None,
    errors: Path | None = None,
) -> dict[str, Any]:
    """Profile an ONNX file or a plan; with `against` the document gains `comparison`, with `errors` (layer_wise_error.csv) layers gain their SQNR."""
    from pipeline.j6.conditions import load_scenario
    from pipeline.j6.profile import compare, layers_csv, profile

    choices, files = options or CompileOptions(), outputs or Outputs()
    plan = load_or_compile(model, chip, choices, overrides)
    conditions = load_scenario(scenario) if scenario else None
    document = profile(plan, conditions, design_fps)
    if errors:
        from pipeline.j6.layer_errors import add_layer_errors

        add_layer_errors(document, errors)
    if files.html:
        from pipeline.j6.report import html_report

        write_text(files.html, html_report(plan, document))
    if files.trace:
        from pipeline.j6.trace import trace_document

        write_json(files.trace, trace_document(plan))
    if files.layers:
        write_text(files.layers, layers_csv(document))
    if against:
        other = load_or_compile(against, chip, choices, overrides)
        document["comparison"] = compare(document, profile(other, conditions, design_fps))
    return document


def fit_command(measured: Path, zoo: Path, out: Path, chips: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Fit the rates that no document gives and write them as a rates file; returns parameters and errors."""
    from pipeline.j6.fit import fit

    return fit(measured, zoo, out, chips)


def validate_command(
    measured: Path,
    zoo: Path,
    rates: Path | None = None,
    cross_validate: bool = False,
    chips: Mapping[str, str] | None = None,
    summary: Path | None = None,
) -> dict[str, Any]:
    """Simulated against measured latency, row by row; with `cross_validate` each family is predicted by a fit that never saw it.

    `summary`: file for the errors of all rows as CSV of one row.
    """
    from pipeline.j6.validate import summary_csv, validate

    document = validate(measured, zoo, rates, cross_validate, chips)
    if summary:
        write_text(summary, summary_csv(document))
    return document


def chips_by_march(names: list[str]) -> dict[str, str] | None:
    """["j6e", "mine.yaml"] -> {"nash-e": "j6e", "nash-m": "mine.yaml"}; None for the shipped profiles. Raises `ConfigError` for two of one march."""
    chips: dict[str, str] = {}
    for name in names:
        march = load_chip(name).march
        if march in chips:
            raise ConfigError(f"--chip {name}: {chips[march]} is {march} as well")
        chips[march] = name
    return chips or None


def chips_command() -> dict[str, Any]:
    """Name, architecture and profile hash of every chip that ships with the project."""
    profiles = [load_chip(name) for name in known_chips()]
    return {"chips": [{"name": p.name, "march": p.march, "profile_hash": p.hash, "provenance": p.provenance} for p in profiles]}
