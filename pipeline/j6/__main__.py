"""`python -m pipeline.j6`: see `cli.py` for the commands."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipeline.errors import BevError
from pipeline.j6 import cli
from pipeline.j6.plan import CompileOptions

TABLE_ROWS = 15


def build_parser() -> argparse.ArgumentParser:
    """Parser of all sub-commands."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.j6", description="Hardware model of the Journey 6 family; every figure is simulated.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("profile", "compile"):
        sub = commands.add_parser(name)
        sub.add_argument("model", type=Path, help="ONNX file" if name == "compile" else "ONNX file or plan.json")
        sub.add_argument("--chip", default="j6m", help="profile name or YAML file (default: j6m)")
        sub.add_argument("--shape", action="append", default=[], metavar="NAME=1x3xHxW", help="fix a dynamic input")
        sub.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="override one number of the chip profile")
        sub.add_argument("--assume-dtype", choices=("int8", "int16"), default="int8", help="activation dtype of a float model")
    commands.choices["compile"].add_argument("--out", type=Path, required=True)
    profile = commands.choices["profile"]
    profile.add_argument("--html", type=Path)
    profile.add_argument("--trace", type=Path)
    profile.add_argument("--against", type=Path, help="second ONNX file or plan to compare with")
    profile.add_argument("--scenario", type=Path, help="conditions file")
    profile.add_argument("--design-fps", type=float)
    for name in ("fit", "validate"):
        sub = commands.add_parser(name)
        sub.add_argument("--measured", type=Path, required=True, help="CSV of measured latencies")
        sub.add_argument("--zoo", type=Path, required=True, help="folder of the graphs the CSV names")
    commands.choices["fit"].add_argument("--out", type=Path, required=True, help="rates file to write")
    commands.choices["validate"].add_argument("--rates", type=Path, help="rates file to use instead of the one that ships with the project")
    commands.choices["validate"].add_argument("--cross-validate", action="store_true", help="predict each family with a fit that never saw it")
    commands.add_parser("chips")
    for sub in commands.choices.values():
        sub.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Execute a parsed command line."""
    if options.command == "chips":
        return cli.chips_command()
    if options.command == "fit":
        return cli.fit_command(options.measured, options.zoo, options.out)
    if options.command == "validate":
        return cli.validate_command(options.measured, options.zoo, options.rates, options.cross_validate)
    shapes, overrides = cli.parse_shapes(options.shape), cli.parse_overrides(options.overrides)
    if options.command == "compile":
        return cli.compile_command(options.model, options.chip, options.out, CompileOptions(options.assume_dtype, shapes=shapes), overrides)
    return cli.profile_command(
        options.model,
        options.chip,
        shapes,
        options.html,
        options.trace,
        options.against,
        options.assume_dtype,
        options.scenario,
        options.design_fps,
        overrides,
    )


def summary(command: str, document: dict[str, Any]) -> str:
    """A few lines for people."""
    if command == "profile":
        return _profile_text(document)
    if command in ("fit", "validate"):
        errors = ("median_pct", "p90_pct", "mape_pct", "spearman")
        return "simulated against measured: " + ", ".join(f"{name} {document[name]:.3f}" for name in errors) + f", {len(document['rows'])} rows"
    return json.dumps(document, indent=2, sort_keys=True)


def _profile_text(document: dict[str, Any]) -> str:
    lines = [
        f"{document['model']['name']} on {document['chip']}: {document['latency_ms']:.3f} ms, {document['fps']:.1f} FPS "
        f"({document['fps_two_in_flight']:.1f} with two in flight), simulated, profile {document['profile_hash'][:12]}",
        f"DDR {document['ddr_bytes_per_frame'] / 1e6:.1f} MB a frame; {document['bottleneck']}",
        "",
        f"{'ms':>9} {'%':>6}  {'unit':4} {'bound':6} layer (slowest first)",
    ]
    rows = sorted(document["layers"], key=lambda row: -row["ms"])[:TABLE_ROWS]
    lines += [
        f"{row['ms']:9.4f} {row['percent']:6.2f}  {row['unit']:4} {row['bound_by']:6} {row['layer']} {row['op']} {row['output_shape']}"
        for row in rows
    ]
    lines += [f"would pay: {entry['saves_ms']:.3f} ms  {entry['layer']}: {entry['change']}" for entry in document["suggestions"]]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        document = run(options)
    except BevError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(document, sort_keys=True, allow_nan=False) if options.json else summary(options.command, document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
