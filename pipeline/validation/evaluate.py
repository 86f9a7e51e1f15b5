"""Measure a data set, apply the rules, and say which samples are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.validation import annotations as annotation_checks
from pipeline.validation import blobs, calibration, edges, maps, occupancy, projection, timestamps
from pipeline.validation.context import Context
from pipeline.validation.rules import Rule

TidyTables = dict[str, pa.Table]


@dataclass(frozen=True)
class Outcome:
    """One rule applied: how many rows could be judged, which failed and with what value."""

    rule: Rule
    checked: int
    tokens: tuple[str, ...]
    values: tuple[str, ...]
    sample_tokens: tuple[str, ...]  # "" where a row belongs to no single sample


@dataclass(frozen=True)
class Verdicts:
    """What validation decides: rule name by token of each dropped sample, and the problem of each unusable key frame file."""

    drop_reasons: dict[str, str]
    bad_frames: dict[str, str]


def measure(context: Context) -> TidyTables:
    """All tidy tables of a data set, by name."""
    frames = timestamps.measure_frames(context)
    return {
        "tokens": annotation_checks.measure_tokens(context.tables),
        "scenes": timestamps.measure_scenes(context),
        "samples": timestamps.measure_samples(context, frames),
        "frames": frames,
        "sample_data": timestamps.measure_sample_data(context),
        "calibrations": calibration.measure(context),
        "coverage": calibration.measure_coverage(context),
        "projection": projection.measure(context),
        "edges": edges.measure(context),
        "boxes": annotation_checks.measure_boxes(context),
        "instances": annotation_checks.measure_instances(context),
        "images": blobs.measure_images(context),
        "lidar": blobs.measure_lidar(context),
        "occupancy": occupancy.measure(context),
        "maps": maps.measure(context),
    }


def apply(rule: Rule, table: pa.Table) -> Outcome:
    """Failing rows of one rule; null rows are not judged."""
    column = table[rule.column].combine_chunks()
    failed = np.flatnonzero(_fails(rule, column))
    rows = table.take(pa.array(failed))
    tokens = tuple(rows["token"].to_pylist())
    if "sample_token" in table.column_names:
        samples = tuple(rows["sample_token"].to_pylist())
    else:
        samples = tokens if rule.table in ("samples", "coverage") else ("",) * len(tokens)
    values = tuple(_text(value) for value in rows[rule.column].to_pylist())
    return Outcome(rule, len(column) - column.null_count, tokens, values, samples)


def _fails(rule: Rule, column: pa.Array) -> NDArray[np.bool_]:
    if rule.is_text:
        return pc.not_equal(column, "").to_numpy(zero_copy_only=False).astype(bool)
    values = pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False)
    fails = np.zeros(len(values), dtype=bool)
    # Arrow's nulls are NaN here: a comparison with NaN is False, so they pass.
    if rule.minimum is not None:
        fails |= values < rule.minimum
    if rule.maximum is not None:
        fails |= values > rule.maximum
    return fails


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def verdicts(outcomes: Sequence[Outcome], tables: Mapping[str, pa.Table]) -> Verdicts:
    """Dropped samples with the first reason in rule order, and unusable files."""
    reasons: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.rule.drops:
            for token in outcome.sample_tokens:
                reasons.setdefault(token, outcome.rule.name)
    bad: dict[str, str] = {}
    for name in ("images", "lidar"):
        rows = tables[name].filter(pc.not_equal(tables[name]["file_problem"], ""))
        bad.update(zip(rows["token"].to_pylist(), rows["file_problem"].to_pylist(), strict=True))
    return Verdicts(reasons, bad)
