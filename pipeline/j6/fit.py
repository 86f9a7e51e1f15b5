"""Fit of the rates that no document gives, on measured latencies of nash-e and nash-m boards.

The model is the one of `cost.py` with the schedule's default (blocks in order), so a latency is a sum over blocks of maxima of terms that are linear
in the inverse rates. Seven inverse rates are fitted on the relative error in log space (so they stay positive and inside a plausible range) by
Levenberg-Marquardt with a robust loss: rows off by more than `ROBUST_PCT` pull linearly, not quadratically. Both boards share all rates; they differ
in documented numbers only (TOPS, CPU clock, bus).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from pipeline.errors import DataError
from pipeline.io import sha256_file, write_text
from pipeline.j6.assign import UNITS
from pipeline.j6.chip import CHIP_DIR, FITTED_RATES, ChipProfile, load_chip
from pipeline.j6.compiler import Compilation, CompileOptions
from pipeline.j6.cost import CONVERTER, WORK_RATES, Rates, rates_of
from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_onnx
from pipeline.j6.measured import CHIP_OF_MARCH, Row, read_measured

ROBUST_PCT = 4.0
TWO_THREAD_WEIGHT = 0.5  # the two rows of a model and board are nearly the same information
MAX_STEPS = 60
FIT_ROUNDS = 3


@dataclass(frozen=True)
class Parameter:
    """A fitted quantity of the chip profile: plausible range, and what it means physically."""

    key: str
    low: float
    high: float
    meaning: str


PARAMETERS = (
    Parameter("tae_utilization", 0.05, 1.0, "sustained share of the nominal TOPS on padded MACs"),
    Parameter("tae_matmul_utilization", 0.01, 1.0, "the same for products of two activations, whose right-hand side is not a stored weight"),
    Parameter("element_gbytes_per_tops", 0.05, 20.0, "bytes that VAE, AAE and DTE write to on-chip memory, per nominal TOPS"),
    Parameter("launch_us_tops", 1.0, 500.0, "time to start a block, at 1 TOPS"),
    Parameter("host_us_ghz", 100.0, 1500.0, "CPU work of one submit"),
    Parameter("host_us_ghz_per_mb", 0.1, 200.0, "CPU work for each MB of model output (cache maintenance of the output buffers)"),
    Parameter("contention_us", 5.0, 300.0, "extra latency of a submit while another is being prepared"),
)


@dataclass(frozen=True)
class Features:
    """Work of a graph by (unit of UNITS, block, kind of WORK_RATES), and the DDR bytes of each block; independent of all fitted rates."""

    work: NDArray[np.float64]
    exposed_bytes: NDArray[np.float64]
    stream_bytes: NDArray[np.float64]
    on_cpu: NDArray[np.bool_]
    output_bytes: float


def features_of(path: Path, dtype: str, nv12: bool, chip: ChipProfile) -> Features:
    """Extract the work of a graph on `chip`, tiled as the compiler does with the chip's present rates."""
    work = Compilation(fuse(import_onnx(path, assume_dtype=dtype)), chip, CompileOptions(nv12=nv12))
    traffic = work.best().tiles.traffic
    kinds = list(WORK_RATES)
    amounts = np.zeros((len(UNITS), len(work.computes), len(kinds)))
    for index, compute in enumerate(work.computes):
        for unit, kind, amount in compute.work:
            amounts[UNITS.index(unit), index, kinds.index(kind)] += amount
    return Features(
        work=amounts,
        exposed_bytes=np.array([t.weights + t.inputs + t.outputs for t in traffic], float),
        stream_bytes=np.array([t.stream for t in traffic], float),
        on_cpu=np.array([assignment.unit == "CPU" for assignment in work.assignments]),
        output_bytes=float(sum(t.outputs for t in traffic)),
    )


def simulate_features(features: Features, rates: Rates, threads: int, bpu_only: bool) -> float:
    """Latency, ms: the same arithmetic as `cost.block_cost`, `schedule.schedule` (prefetch 0) and `profile.latency_ms`, vectorised."""
    per_unit = np.array([getattr(rates, field) for field in WORK_RATES.values()])
    times = features.work @ per_unit
    converter = UNITS.index(CONVERTER)
    compute = times[converter] + np.delete(times, converter, axis=0).max(axis=0)  # as `cost.busiest_ms`
    blocks = np.maximum(compute, features.stream_bytes * rates.ddr_ms) + features.exposed_bytes * rates.ddr_ms
    resubmits = int(np.sum(features.on_cpu[:-1] & ~features.on_cpu[1:]))
    launches = np.where(features.on_cpu, rates.host_ms, rates.launch_ms).sum() + resubmits * rates.host_ms
    bpu = float(blocks.sum() + launches)
    if bpu_only:
        return bpu
    alone = bpu + rates.host_ms + features.output_bytes * rates.host_byte_ms
    return alone if threads == 1 else max(2 * bpu, alone + rates.contention_ms)


class Simulator:
    """Simulates measured rows for any values of the fitted quantities; features are extracted once per graph."""

    def __init__(self, rows: Sequence[Row], rates_file: Path | None = None, chips: Mapping[str, str] | None = None) -> None:
        self.rows = list(rows)
        self.chips = {march: load_chip(name, rates=rates_file) for march, name in (chips or CHIP_OF_MARCH).items()}
        cache: dict[tuple[Path, str, bool, str], Features] = {}
        for row in self.rows:
            key = (row.graph, row.dtype, row.nv12, row.march)
            if key not in cache:
                cache[key] = features_of(row.graph, row.dtype, row.nv12, self.chips[row.march])
        self.features = [cache[row.graph, row.dtype, row.nv12, row.march] for row in self.rows]

    def simulated_ms(self, values: Mapping[str, float] | None = None) -> NDArray[np.float64]:
        """Latency of every row, ms; `values` replaces quantities of the chip profiles."""
        rates = {march: rates_of(with_values(chip, values or {})) for march, chip in self.chips.items()}
        return np.array([simulate_features(f, rates[row.march], row.threads, row.bpu_only) for row, f in zip(self.rows, self.features, strict=True)])


def with_values(chip: ChipProfile, values: Mapping[str, float]) -> ChipProfile:
    """A chip profile with some quantities replaced."""
    changed = {key: replace(chip.quantities[key], value=value) for key, value in values.items()}
    return replace(chip, quantities={**chip.quantities, **changed})


def fit_values(simulator: Simulator, chosen: NDArray[np.bool_] | None = None) -> dict[str, float]:
    """Values of `PARAMETERS` that minimise the robust relative error over the chosen rows (all by default)."""
    mask = np.ones(len(simulator.rows), bool) if chosen is None else chosen
    if mask.sum() < len(PARAMETERS):
        raise DataError(f"{int(mask.sum())} rows cannot determine {len(PARAMETERS)} rates")
    measured = np.array([row.measured_ms for row in simulator.rows])
    weights = np.array([1.0 if row.threads == 1 else TWO_THREAD_WEIGHT for row in simulator.rows])[mask]
    low, high = (np.log([getattr(p, side) for p in PARAMETERS]) for side in ("low", "high"))

    def residuals(point: NDArray[np.float64]) -> NDArray[np.float64]:
        values = dict(zip((p.key for p in PARAMETERS), np.exp(point), strict=True))
        error = 100 * (simulator.simulated_ms(values)[mask] / measured[mask] - 1) * weights
        # Soft-L1: quadratic near zero, linear far away. |r| * this factor squared is 2 s^2 (sqrt(1 + r^2/s^2) - 1).
        scaled = error / ROBUST_PCT
        return np.sign(error) * ROBUST_PCT * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))

    start = np.log([next(iter(simulator.chips.values())).number(p.key) for p in PARAMETERS])
    point = levenberg_marquardt(residuals, np.clip(start, low, high), low, high)
    return dict(zip((p.key for p in PARAMETERS), (float(v) for v in np.exp(point)), strict=True))


def levenberg_marquardt(
    residuals: Any, start: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64], max_steps: int = MAX_STEPS
) -> NDArray[np.float64]:
    """Minimise the sum of squared residuals inside a box; numerical Jacobian, Marquardt's diagonal damping."""
    point, damping = start, 1e-2
    current = residuals(point)
    for _ in range(max_steps):
        step = 1e-5
        jacobian = np.stack([(residuals(point + step * unit) - current) / step for unit in np.eye(len(point))], axis=1)
        gradient, hessian = jacobian.T @ current, jacobian.T @ jacobian
        improved = False
        while damping < 1e8:
            scale = np.diag(np.diag(hessian) + 1e-9)
            candidate = np.clip(point - np.linalg.solve(hessian + damping * scale, gradient), low, high)
            trial = residuals(candidate)
            if trial @ trial < current @ current:
                improved = (current @ current - trial @ trial) > 1e-7 * (current @ current)
                point, current, damping = candidate, trial, damping / 5
                break
            damping *= 4
        if not improved:
            break
    return point


def fit(measured: Path, zoo: Path, out: Path, chips: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Fit on all rows of `measured`, write the rates file `out`, return parameters, errors and the rows.

    `chips`: architecture -> profile, of the rows to use (default: nash-e and nash-m). The tiling depends on the rates: it is made again with the
    fitted rates until they stay.
    """
    from pipeline.j6.validate import error_document

    rows, skipped = read_measured(measured, zoo, chips)
    simulator = Simulator(rows, chips=chips)
    values: dict[str, float] = {}
    for _ in range(FIT_ROUNDS):
        before, values = values, {key: float(f"{value:.4g}") for key, value in fit_values(simulator).items()}
        write_text(out, rates_text(values, measured, error_document(rows, simulator.simulated_ms(values), [])))
        simulator = Simulator(rows, out, chips)
        if before == values:
            break
    document = error_document(rows, simulator.simulated_ms(), skipped)
    write_text(out, rates_text(values, measured, document))
    ranges = {p.key: {"low": p.low, "high": p.high, "meaning": p.meaning} for p in PARAMETERS}
    return {"out": str(out), "values": values, "parameters": ranges, **document}


def rates_text(values: Mapping[str, float], measured: Path, document: Mapping[str, Any]) -> str:
    """The rates file: fitted quantities with date, data and error of the fit, and the others of the shipped file unchanged."""
    content = yaml.safe_load((CHIP_DIR / f"{FITTED_RATES}.yaml").read_text(encoding="utf-8"))
    count, digest = len(document["rows"]), sha256_file(measured)[:12]
    for parameter in PARAMETERS:
        source = (
            f"{parameter.meaning}; fitted {date.today().isoformat()} on {count} rows of {measured.name} (sha256 {digest}), "
            f"median error {document['median_pct']:.1f} %, p90 {document['p90_pct']:.1f} % in sample; plausible {parameter.low:g}-{parameter.high:g}"
        )
        content["quantities"][parameter.key].update({"value": values[parameter.key], "source": source, "confidence": "fitted"})
    return yaml.safe_dump(content, sort_keys=False, width=180)
