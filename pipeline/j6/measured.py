"""Measured latencies: one row per model and board, and the graph that each row names."""

from __future__ import annotations

import csv
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import file_error

CHIP_OF_MARCH = {"nash-e": "j6e", "nash-m": "j6m"}
COLUMNS = ("model", "graph", "input", "precision", "march", "latency_1thread_ms", "latency_2thread_ms", "note")
TOOLCHAIN_MARK = "TOOLCHAIN estimate"  # the vendor compiler's own prediction: BPU time without the host's submit


@dataclass(frozen=True)
class Row:
    """A measured latency. `threads` submits are in flight; `bpu_only` rows leave out the host's part."""

    model: str
    family: str
    graph: Path
    march: str
    threads: int
    measured_ms: float
    dtype: str
    nv12: bool
    bpu_only: bool


def family_of(model: str) -> str:
    """Model family used for cross-validation: the name up to its size letter ("YOLO11n-seg" -> "YOLO11", "DINOv2 ViT-S/14" -> "DINOv2")."""
    first = model.replace("-", " ").split()[0]
    if first.upper().startswith("YOLO"):
        digits = first.upper().removeprefix("YOLO").removeprefix("V")
        return "YOLO" + "".join(character for character in digits if character.isdigit())
    return first


def read_measured(measured: Path, zoo: Path, marches: Collection[str] | None = None) -> tuple[list[Row], list[dict[str, str]]]:
    """Rows of `marches` (default: nash-e and nash-m) that can be simulated, and the others with the reason.

    Left out: rows without a graph, of other architectures, or whose precision the source does not state. Raises `DataError` for a file that is not
    the CSV of measured latencies or names a graph that is not in `zoo`.
    """
    rows: list[Row] = []
    skipped: list[dict[str, str]] = []
    for entry in _entries(measured):
        reason = _unusable(entry, CHIP_OF_MARCH if marches is None else marches)
        if reason:
            skipped.append({"model": entry["model"], "march": entry["march"], "reason": reason})
            continue
        graph = zoo / Path(entry["graph"]).name
        if not graph.is_file():
            raise file_error(graph, f"graph of {entry['model']!r} not found")
        rows += _rows(measured, entry, graph)
    return rows, skipped


def _entries(measured: Path) -> list[dict[str, str]]:
    try:
        with measured.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise file_error(measured, f"column {missing[0]!r} is missing")
            return [{key: value or "" for key, value in entry.items() if key} for entry in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise file_error(measured, f"cannot be read as CSV ({error})") from error


def _unusable(entry: dict[str, str], marches: Collection[str]) -> str:
    if not entry["graph"]:
        return "no graph"
    if entry["march"] not in marches:
        return f"architecture {entry['march'] or 'not stated'} has no chip profile here"
    if not entry["precision"]:
        return "precision not stated"
    return "" if entry["latency_1thread_ms"] or entry["latency_2thread_ms"] else "no latency"


def _rows(measured: Path, entry: dict[str, str], graph: Path) -> list[Row]:
    dtype = "int16" if entry["precision"].startswith("int16") else "int8"
    bpu_only = TOOLCHAIN_MARK in entry["note"]
    result = []
    for threads in (1, 2):
        text = entry[f"latency_{threads}thread_ms"]
        if not text:
            continue
        try:
            latency = float(text)
        except ValueError as error:
            raise file_error(measured, f"row {entry['model']!r}: latency_{threads}thread_ms is {text!r}, a number is needed") from error
        result.append(
            Row(entry["model"], family_of(entry["model"]), graph, entry["march"], threads, latency, dtype, "nv12" in entry["input"], bpu_only)
        )
    return result
