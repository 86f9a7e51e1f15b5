"""Quantization errors beside simulated times: joins layer_wise_error.csv of the quantization to the layers of a profile document."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from pipeline.errors import file_error

COLUMNS = {"accumulated_sqnr_db": "sqnr_db", "own_sqnr_db": "local_sqnr_db"}  # field of a layer -> column: with all errors before it, and alone


def add_layer_errors(document: dict[str, Any], path: Path) -> None:
    """Give every layer its worst SQNR (dB) over the ONNX nodes behind it; None where the file has none of them.

    Raises `DataError` for a file without the columns node, sqnr_db and local_sqnr_db, or with a value that is no number.
    """
    worst = {field: _worst_by_node(path, column) for field, column in COLUMNS.items()}
    for row in document["layers"]:
        for field, by_node in worst.items():
            row[field] = min((by_node[node] for node in row["origin ops"] if node in by_node), default=None)


def _worst_by_node(path: Path, column: str) -> dict[str, float]:
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            entries = [(row["node"], float(row[column])) for row in csv.DictReader(stream) if row[column]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise file_error(path, f"cannot be read as CSV ({error})") from error
    except (KeyError, TypeError, ValueError) as error:
        raise file_error(path, f"column 'node' or {column!r} is missing or holds no number ({error})") from error
    worst: dict[str, float] = {}
    for node, value in entries:
        worst[node] = min(value, worst.get(node, value))
    return worst
