"""reports/validation.json and the list of findings."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.taxonomy import CAMERAS
from pipeline.validation import annotations as annotation_checks
from pipeline.validation import timestamps
from pipeline.validation.context import Context
from pipeline.validation.evaluate import Outcome, TidyTables, Verdicts

_EXAMPLES = 5
_LISTED_FINDINGS = 10_000
# Standard deviation of ImageNet's colour channels on the 0..255 scale, mean of the three: the unit in which networks see brightness.
_NORMALISATION = 57.6


def build(context: Context, outcomes: Sequence[Outcome], tables: TidyTables, found: Verdicts, provides: dict[str, Any]) -> dict[str, Any]:
    """The report (see docs/validation.md for every field)."""
    failed = {severity: sum(len(o.tokens) for o in outcomes if o.rule.severity == severity) for severity in ("error", "warning")}
    total = context.index.samples.num_rows
    reasons = Counter(found.drop_reasons.values())
    return {
        "passed": not _blocks(context.config.fail_on, failed),
        "fail_on": context.config.fail_on,
        "counts": failed,
        "samples": {"total": total, "kept": total - len(found.drop_reasons), "dropped": dict(sorted(reasons.items()))},
        "rules": [_rule(outcome) for outcome in outcomes],
        "timestamps": timestamps.statistics(context, tables["frames"], tables["samples"]),
        "annotations": annotation_checks.statistics(context),
        "checklist": _checklist(tables),
        "provides": provides,
    }


def _blocks(fail_on: str, failed: dict[str, int]) -> bool:
    return fail_on != "never" and (failed["error"] > 0 or (fail_on == "warning" and failed["warning"] > 0))


def _rule(outcome: Outcome) -> dict[str, Any]:
    rule = outcome.rule
    return {
        "name": rule.name,
        "severity": rule.severity,
        "table": rule.table,
        "field": rule.column,
        "meaning": rule.meaning,
        "limit": rule.limit,
        "drops_sample": rule.drops,
        "checked": outcome.checked,
        "failed": len(outcome.tokens),
        "examples": list(outcome.tokens[:_EXAMPLES]),
        "example_values": list(outcome.values[:_EXAMPLES]),
    }


def _checklist(tables: TidyTables) -> dict[str, float | None]:
    """Items of the release checklist that the data alone decides.

    coordinate_consistency_rms_m: RMS over camera frames of the residual motion error, how far the views are apart in the BEV frame.
    sensor_timestamps_ms: largest jitter of a camera frame.
    channel_alignment_std: brightness of the six views of a sample in units of the network's input normalisation, standard deviation over
    the views, largest of the colour channels, median over samples.
    """
    is_camera = tables["frames"]["phase_ms"].is_valid()
    frames = tables["frames"].filter(is_camera)
    error, jitter = (frames[name].drop_null().to_numpy() for name in ("pose_error_m", "jitter_ms"))
    return {
        "coordinate_consistency_rms_m": _rounded(np.sqrt(np.mean(error**2))) if len(error) else None,
        "sensor_timestamps_ms": _rounded(jitter.max()) if len(jitter) else None,
        "channel_alignment_std": _channel_alignment(tables["images"]),
    }


def _channel_alignment(images: pa.Table) -> float | None:
    by_sample = images.group_by("sample_token", use_threads=False).aggregate(
        [("mean_red", "count"), *((f"mean_{name}", "stddev") for name in ("red", "green", "blue"))]
    )
    complete = by_sample.filter(pa.array(by_sample["mean_red_count"].to_numpy() == len(CAMERAS)))
    if not complete.num_rows:
        return None
    spread = np.max([complete[f"mean_{name}_stddev"].to_numpy() for name in ("red", "green", "blue")], axis=0)
    return _rounded(np.median(spread) / _NORMALISATION)


def findings_csv(outcomes: Sequence[Outcome]) -> str:
    """All findings as CSV: rule, severity, table, token, sample, field, value, limit (at most 10,000 a rule)."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["rule", "severity", "table", "token", "sample_token", "field", "value", "limit"])
    for outcome in outcomes:
        rule = outcome.rule
        rows = list(zip(outcome.tokens, outcome.sample_tokens, outcome.values, strict=True))[:_LISTED_FINDINGS]
        writer.writerows([rule.name, rule.severity, rule.table, token, sample, rule.column, value, rule.limit] for token, sample, value in rows)
    return stream.getvalue()


def _rounded(value: Any) -> float:
    return round(float(value), 5) + 0.0
