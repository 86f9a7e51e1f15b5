"""How much of the float model's accuracy another form of it keeps."""

from __future__ import annotations

from typing import Any

from pipeline.taxonomy import TASKS

# Metrics where more is better, by head; errors (ATE and so on) have no meaningful ratio.
_SCORES = {"detection": ("mAP", "NDS"), "map": ("AP",), "occupancy": ("mIoU", "geometric_IoU")}
_CLASS_SCORE = {"detection": "AP", "map": "AP", "occupancy": "IoU"}


def retention(report: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Ratios report / reference of every head that both hold: headline scores, per class and, for detection, per size and range.

    A ratio is None where the reference is 0 or undefined: nothing can be kept of it.
    """
    return {head: _head(head, report[head], reference[head]) for head in TASKS if head in report and head in reference}


def _head(head: str, value: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    score = _CLASS_SCORE[head]
    result: dict[str, Any] = {name: _ratio(value[name], reference[name]) for name in _SCORES[head]}
    result["per_class"] = {name: _ratio(row[score], reference["per_class"][name][score]) for name, row in value["per_class"].items()}
    if head == "detection":
        for table in ("per_size", "per_range"):
            result[table] = {name: _ratio(row["mAP"], reference[table][name]["mAP"]) for name, row in value[table].items()}
    return result


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None
