"""`python -m pipeline.j6`: see `cli.py` for the commands."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipeline.errors import BevError
from pipeline.io import print_answer
from pipeline.j6 import cli
from pipeline.j6.compiler import CHAIN_SHARES, MODES, CompileOptions

TABLE_ROWS = 15


def build_parser() -> argparse.ArgumentParser:
    """Parser of all sub-commands."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.j6", description="Hardware model of the Journey 6 family; every figure is simulated.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_compiler(commands)
    for name in ("fit", "validate"):
        sub = commands.add_parser(name)
        sub.add_argument("--measured", type=Path, required=True, help="CSV of measured latencies")
        sub.add_argument("--zoo", type=Path, required=True, help="folder of the graphs the CSV names")
        sub.add_argument(
            "--chip", action="append", nargs="+", default=[], help="profiles to use, one an architecture (default: j6e j6m); others skip"
        )
    commands.choices["fit"].add_argument("--out", type=Path, required=True, help="rates file to write")
    commands.choices["validate"].add_argument("--rates", type=Path, help="rates file to use instead of the one that ships with the project")
    commands.choices["validate"].add_argument("--cross-validate", action="store_true", help="predict each family with a fit that never saw it")
    commands.choices["validate"].add_argument("--summary", type=Path, metavar="CSV", help="file for the errors of all rows, as one row")
    commands.add_parser("chips")
    for sub in commands.choices.values():
        sub.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_compiler(commands: Any) -> None:
    """`compile` and `profile`, and the options of a compilation under hb_compile's names."""
    for name in ("profile", "compile"):
        sub = commands.add_parser(name)
        sub.add_argument("model", type=Path, help="ONNX file" if name == "compile" else "ONNX file or plan.json")
        sub.add_argument("--chip", default="j6m", help="profile name or YAML file (default: j6m)")
        sub.add_argument("--shape", action="append", default=[], metavar="NAME=1x3xHxW", help="fix a dynamic input or a custom operator's output")
        sub.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="override one number of the chip profile")
        sub.add_argument("--assume-dtype", choices=("int8", "int16", "float16"), default="int8", help="activation dtype of a float model")
        sub.add_argument("--compile-mode", choices=MODES, default="latency", help="what the tiling is chosen for (default: latency)")
        sub.add_argument("--balance-factor", type=int, default=50, metavar="0-100", help="for balance: 0 fewest DDR bytes, 100 least time")
        sub.add_argument("--optimize-level", choices=tuple(CHAIN_SHARES), default="O2", help="O0: no fusion, O1: fusion, O2: and chains in pieces")
        sub.add_argument("--core-num", type=int, default=1, help="cores that share one frame")
        sub.add_argument("--max-time-per-fc", type=float, default=0.0, metavar="US", help="longest segment, us (0: one segment)")
        sub.add_argument("--max-l2m-size", type=int, metavar="BYTES", help="shared on-chip memory to use, where the chip has it")
    commands.choices["compile"].add_argument("--out", type=Path, required=True)
    profile = commands.choices["profile"]
    profile.add_argument("--html", type=Path)
    profile.add_argument("--trace", type=Path)
    profile.add_argument("--csv", type=Path, help="layers as CSV")
    profile.add_argument("--errors", type=Path, metavar="CSV", help="layer_wise_error.csv: gives every layer its SQNR")
    profile.add_argument("--against", type=Path, help="second ONNX file or plan to compare with")
    profile.add_argument("--scenario", type=Path, help="conditions file")
    profile.add_argument("--design-fps", type=float)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Execute a parsed command line."""
    if options.command == "chips":
        return cli.chips_command()
    if options.command in ("fit", "validate"):
        chips = cli.chips_by_march([name for names in options.chip for name in names])
        if options.command == "fit":
            return cli.fit_command(options.measured, options.zoo, options.out, chips)
        return cli.validate_command(options.measured, options.zoo, options.rates, options.cross_validate, chips, options.summary)
    overrides, choices = cli.parse_overrides(options.overrides), _compile_options(options)
    if options.command == "compile":
        return cli.compile_command(options.model, options.chip, options.out, choices, overrides)
    outputs = cli.Outputs(options.html, options.trace, options.csv)
    return cli.profile_command(
        options.model, options.chip, choices, overrides, options.against, options.scenario, options.design_fps, outputs, options.errors
    )  # fmt: skip


def _compile_options(options: argparse.Namespace) -> CompileOptions:
    return CompileOptions(
        assume_dtype=options.assume_dtype,
        compile_mode=options.compile_mode,
        balance_factor=options.balance_factor,
        optimize_level=options.optimize_level,
        core_num=options.core_num,
        max_time_per_fc_us=options.max_time_per_fc,
        max_l2m_bytes=options.max_l2m_size,
        shapes=cli.parse_shapes(options.shape),
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
    conditions = document["conditions"]
    lines = [
        f"{document['model']['name']} on {document['chip']}: {document['latency_ms']:.3f} ms, {document['fps']:.1f} FPS "
        f"({document['fps_two_in_flight']:.1f} with two in flight), simulated, profile {document['profile_hash'][:12]}",
        f"DDR {document['ddr_bytes_per_frame'] / 1e6:.1f} MB a frame, "
        f"{document['ddr_gbps_at_design_fps']:.2f} GB/s at {document['design_fps']:.1f} FPS; "
        f"{document['bottleneck']}",
        f"{conditions['scenario']}: p50 {conditions['p50_ms']:.3f}, p99 {conditions['p99_ms']:.3f}, max {conditions['max_ms']:.3f} ms",
        "heads: " + ", ".join(f"{name} {ms:.3f}" for name, ms in document["by_head_ms"].items()) + " ms",
        *document["findings"],
        "",
        f"{'ms':>9} {'%':>6}  {'unit':4} {'bound':6} layer (slowest first)",
    ]
    rows = sorted(document["layers"], key=lambda row: -row["ms"])[:TABLE_ROWS]
    lines += [
        f"{row['ms']:9.4f} {row['percent']:6.2f}  {row['unit']:4} {row['bound_by']:6} {row['layer']} {row['op']} {row['output_shape']}"
        for row in rows
    ]
    lines += [f"would pay at most {e['saves_ms']:.3f} ms in {e['layers']} layers, worst {e['layer']}: {e['change']}" for e in document["suggestions"]]
    return "\n".join(lines + _comparison_text(document.get("comparison")))


def _comparison_text(comparison: dict[str, Any] | None) -> list[str]:
    if comparison is None:
        return []
    heads = ", ".join(f"{name} {ms:+.3f}" for name, ms in comparison["by_head_ms"].items() if ms)
    lines = [
        "",
        f"against the other: {comparison['latency_ms']:+.3f} ms, {comparison['ddr_bytes_per_frame'] / 1e6:+.2f} MB DDR; {heads or 'no head differs'}",
    ]
    for row in comparison["layers"][:TABLE_ROWS]:
        why = row["only_in"] and f"only in {row['only_in']}"
        why = why or "; ".join(f"{key} {old} -> {new}" for key, (old, new) in row["changed"].items())
        lines.append(f"{row['ms']:+9.4f}  {row['layer']}  {row['before_ms']:.4f} -> {row['after_ms']:.4f}  {why}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        document = run(options)
    except BevError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_answer(json.dumps(document, sort_keys=True, allow_nan=False) if options.json else summary(options.command, document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
