"""Simulated against measured latency, row by row, by family, and by cross-validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError
from pipeline.j6.fit import Simulator, fit_values
from pipeline.j6.measured import Row, read_measured


def validate(
    measured: Path, zoo: Path, rates: Path | None = None, cross_validate: bool = False, chips: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Errors of the shipped rates (or `rates`) on the rows of `measured`.

    With `cross_validate` the document gains `cross_validation`: each family predicted by a fit on all the others.
    """
    rows, skipped = read_measured(measured, zoo, chips)
    if not rows:
        raise DataError(f"{measured}: no row can be simulated")
    simulator = Simulator(rows, rates, chips)
    document = error_document(rows, simulator.simulated_ms(), skipped)
    document["profile_hashes"] = {march: chip.hash for march, chip in simulator.chips.items()}
    if cross_validate:
        document["cross_validation"] = error_document(rows, leave_family_out(simulator), [])
    return document


def leave_family_out(simulator: Simulator) -> NDArray[np.float64]:
    """Prediction of every row by a fit that saw no row of its family."""
    return leave_out(simulator, [row.family for row in simulator.rows])


def leave_out(simulator: Simulator, groups: Sequence[str]) -> NDArray[np.float64]:
    """Prediction of every row by a fit that saw no row of its group; `groups` has an entry for every row."""
    names = np.array(groups)
    predicted = np.zeros(len(names))
    for name in np.unique(names):
        held_out = names == name
        values = fit_values(simulator, ~held_out)
        predicted[held_out] = simulator.simulated_ms(values)[held_out]
    return predicted


def error_document(rows: Sequence[Row], simulated: NDArray[np.float64], skipped: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Per-row and summary errors: percent of the measured latency, and Spearman's rank correlation."""
    measured = np.array([row.measured_ms for row in rows])
    errors = 100 * (simulated / measured - 1)
    families = sorted({row.family for row in rows})
    groups = {f"family {name}": np.array([row.family == name for row in rows]) for name in families}
    groups |= {f"march {name}": np.array([row.march == name for row in rows]) for name in sorted({row.march for row in rows})}
    groups |= {f"threads {count}": np.array([row.threads == count for row in rows]) for count in (1, 2)}
    return {
        "simulated": True,
        **_summary(errors, measured, simulated),
        "groups": {name: _summary(errors[mask], measured[mask], simulated[mask]) for name, mask in groups.items() if mask.any()},
        "rows": [_row(row, value, error) for row, value, error in zip(rows, simulated, errors, strict=True)],
        "skipped": list(skipped),
    }


SUMMARY_KEYS = ("count", "median_pct", "p90_pct", "mape_pct", "max_pct", "bias_pct", "spearman")


def summary_csv(document: Mapping[str, Any]) -> str:
    """A document of `validate` as CSV of one row: errors in %, the same by families held out (empty without cross-validation), profile hashes."""
    held_out = document.get("cross_validation", {})
    row = {key: document[key] for key in SUMMARY_KEYS} | {f"held_out_{key}": held_out.get(key, "") for key in SUMMARY_KEYS[1:]}
    row |= {f"profile_{march}": digest[:12] for march, digest in sorted(document["profile_hashes"].items())}
    return f"{','.join(row)}\n{','.join(map(str, row.values()))}\n"


def _row(row: Row, simulated: float, error: float) -> dict[str, Any]:
    return {
        "model": row.model,
        "family": row.family,
        "march": row.march,
        "threads": row.threads,
        "measured_ms": row.measured_ms,
        "simulated_ms": round(float(simulated), 4),
        "error_pct": round(float(error), 2),
        "bpu_only": row.bpu_only,
    }


def _summary(errors: NDArray[np.float64], measured: NDArray[np.float64], simulated: NDArray[np.float64]) -> dict[str, Any]:
    absolute = np.abs(errors)
    return {
        "count": len(absolute),
        "median_pct": round(float(np.median(absolute)), 3),
        "p90_pct": round(float(np.percentile(absolute, 90)), 3),
        "mape_pct": round(float(absolute.mean()), 3),
        "max_pct": round(float(absolute.max()), 3),
        "bias_pct": round(float(errors.mean()), 3),
        "spearman": round(spearman(measured, simulated), 5),
    }


def spearman(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Spearman's rank correlation with average ranks for ties; 1.0 for fewer than two distinct values."""
    ranks = [_ranks(values) for values in (left, right)]
    centred = [rank - rank.mean() for rank in ranks]
    scale = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum() / scale) if scale > 0 else 1.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]
