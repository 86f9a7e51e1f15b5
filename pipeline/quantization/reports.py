"""What a quantization leaves behind for people: the plan as applied, the sensitivity report with the search log, tables and figures."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import DataError, ModelError, file_error
from pipeline.io import atomic_path, write_json, write_text
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.compare import sqnr_db, to_csv
from pipeline.quantization.figures import draw_distributions, draw_front
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, hint
from pipeline.quantization.qdq import StoredBias, WeightChoice, stored_bias, weight_choice, weight_scales
from pipeline.quantization.quantize import FORMS, Quantized
from pipeline.quantization.search import SearchResult, Step
from pipeline.quantization.sensitivity import Sensitivity


@dataclass(frozen=True)
class PlanRow:
    """One line of quant_plan.csv. `scale` is the largest of a per-channel tensor; `root` is the tensor whose storage an activation shares."""

    tensor: str
    kind: str
    dtype: str
    threshold: float | None
    scale: float | None
    channels: int
    root: str
    node: str
    module: str
    rule: str


@dataclass(frozen=True)
class ReportFiles:
    """Where the reports of one quantization go."""

    errors: Path
    sensitivity: Path
    plan: Path
    front_csv: Path
    front_figure: Path
    distributions_figure: Path


def write_results(result: Quantized, calibration: Calibration, model_path: Path, files: ReportFiles) -> None:
    """Write the model and its reports."""
    content = result.proto.SerializeToString(deterministic=True)
    with atomic_path(model_path) as temporary:
        temporary.write_bytes(content)
    write_text(files.errors, to_csv(result.errors))
    write_json(files.sensitivity, sensitivity_report(result))
    write_text(files.plan, to_csv(applied_plan(result.model, result.plan), PlanRow))
    write_text(files.front_csv, to_csv(_front_rows(result.promotion.search), FrontRow))
    draw_front(files.front_figure, result.promotion.search)
    draw_distributions(files.distributions_figure, result.errors, result.plan, calibration.statistics)


# ------------------------------------------------------------------------------------------------------------- plan as applied
def applied_plan(model: FloatModel, plan: QuantPlan) -> list[PlanRow]:
    """Every float activation in graph order, then every stored constant, with the rule that decided."""
    rows = [_activation_row(model, plan, name) for name in plan.tensors]
    modules = {node.name: model.module_of(node.output[0]) for node in model.nodes}
    seen: set[tuple[str, str]] = set()
    for node in model.nodes:
        for position in range(len(node.input)):
            choice = weight_choice(model, plan, node, position)
            if choice is not None and (choice.constant, choice.dtype) not in seen:
                seen.add((choice.constant, choice.dtype))
                rows.append(_constant_row(model, plan, node.name, modules[node.name], choice, weight_scales(model, plan, node, choice)))
        bias = stored_bias(model, plan, node)
        if bias is not None:
            rows.append(_bias_row(plan, modules[bias.product], bias))
    return rows


def _activation_row(model: FloatModel, plan: QuantPlan, name: str) -> PlanRow:
    decision = plan.tensors[name]
    node = model.producer.get(name)
    scale = decision.scale if decision.threshold is not None else None
    maker = node.name if node is not None else ""
    return PlanRow(name, "activation", decision.dtype, decision.threshold, scale, 1, decision.root, maker, model.module_of(name), decision.rule)


def _constant_row(model: FloatModel, plan: QuantPlan, node: str, module: str, choice: WeightChoice, scales: np.ndarray) -> PlanRow:
    kind, rule = ("constant", "dtype of the result")
    if choice.axis is not None:
        kind, rule = ("weight", f"{choice.dtype} for weights, a scale for each output channel")
    if choice.constant in plan.weights:
        rule += "; roundings chosen by repair.rounding"
    largest = float(scales.max())
    threshold = float(np.abs(model.constants[choice.constant]).max(initial=0.0))
    return PlanRow(choice.constant, kind, choice.dtype, threshold, largest, int(scales.size), choice.constant, node, module, rule)


def _bias_row(plan: QuantPlan, module: str, bias: StoredBias) -> PlanRow:
    rule = "int32 in the scale of the accumulator, input scale x weight scale"
    if bias.product in plan.bias_shifts:
        rule += "; shifted by repair.bias_correction"
    largest = float(bias.scales.max())
    return PlanRow(bias.constant, "bias", "int32", None, largest, int(bias.scales.size), bias.constant, bias.product, module, rule)


def explain(rows: Sequence[PlanRow], tensor: str) -> str:
    """One line for each row about `tensor`: what was decided and why. Raises `ModelError` for a name that is not in the plan."""
    found = [row for row in rows if row.tensor == tensor]
    if not found:
        raise ModelError(f"tensor {tensor!r}: not in the plan{hint(tensor, [row.tensor for row in rows])}")
    return "\n".join(_explanation(row) for row in found)


def _explanation(row: PlanRow) -> str:
    place = f" ({row.module})" if row.module else ""
    if row.scale is None:
        return f"{row.tensor}{place}: {row.kind}, {row.dtype}; {row.rule}"
    span = f", threshold {row.threshold:.6g}" if row.threshold is not None else ""
    scale = f"scale {row.scale:.6g}" if row.channels == 1 else f"{row.channels} scales up to {row.scale:.6g}"
    return f"{row.tensor}{place}: {row.kind}, {row.dtype}{span}, {scale}; {row.rule}"


def read_plan(path: Path) -> list[PlanRow]:
    """Rows of quant_plan.csv. Raises `DataError` for a missing or damaged file."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return [_plan_row(row) for row in csv.DictReader(stream)]
    except FileNotFoundError as error:
        raise file_error(path, "file not found", "run the stage quantize") from error
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise DataError(f"{path}: not a quantization plan, or cut short ({error})") from error


def _plan_row(row: dict[str, str]) -> PlanRow:
    numbers = {name: float(row[name]) if row[name] else None for name in ("threshold", "scale")}
    return PlanRow(**{**row, **numbers, "channels": int(row["channels"])})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------------- sensitivity
def sensitivity_report(result: Quantized) -> dict[str, Any]:
    """Content of reports/sensitivity.json."""
    promotion = result.promotion
    return {
        "tensors": result.counts(),
        "outputs": {
            name: {
                "sqnr_planned_db": db(result.forms["planned"][name]),
                "sqnr_repaired_db": db(result.forms["repaired"][name]),
                "sqnr_db": db(noise),
                "target_db": result.targets_db[name],
            }
            for name, noise in result.noise.items()
        },
        "forms": [
            {"form": form, "meaning": FORMS[form], "sqnr_db": {name: db(noise) for name, noise in result.forms[form].items()}}
            for form in FORMS
            if form in result.forms
        ],
        "first_lost": first_lost(result),
        "training": {
            "reason": result.training.reason, "used": result.training.used, "kept_without": dict(result.kept),
            "epoch_sqnr_db": [round(level, 3) for level in result.training.log],
        },
        "promoted": [{"tensor": name, "reason": reason} for name, reason in promotion.reasons.items()],
        "simulated_us": {"blocks": round(promotion.base_us, 3), "promotions": round(promotion.extra_us, 3)},
        "search": _search_log(promotion.search),
        "ranking": [_ranking_row(row) for row in promotion.ranking],
        "modules": _by_module(promotion.ranking),
        "findings": [str(finding) for finding in result.findings],
    }


def first_lost(result: Quantized) -> dict[str, str | None]:
    """Output -> first form below the output's target; None where no form is."""
    return {
        name: next((form for form in FORMS if form in result.forms and sqnr_db(1.0, result.forms[form][name]) < target), None)
        for name, target in result.targets_db.items()
    }


def db(noise: float) -> float:
    """Signal to noise in dB, rounded for reports."""
    return round(sqnr_db(1.0, noise), 3)


def _ranking_row(row: Sensitivity) -> dict[str, Any]:
    by_output = {name: db(noise) for name, noise in row.by_output.items()}
    return {"tensor": row.tensor, "module": row.module, "op": row.op, "sqnr_db": db(row.noise), "sqnr_by_output_db": by_output}


def _by_module(rows: Sequence[Sensitivity], depth: int = 2) -> list[dict[str, Any]]:
    """Summed noise of the tensors of each module (first `depth` parts of its path), strongest first: independent noises add up."""
    totals: dict[str, float] = {}
    for row in rows:
        module = ".".join(row.module.split(".")[:depth])
        totals[module] = totals.get(module, 0.0) + row.noise
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return [{"module": name, "sqnr_db": db(noise)} for name, noise in ranked]


def _search_log(found: SearchResult | None) -> dict[str, Any] | None:
    if found is None:
        return None
    front = {step.number for step in found.front()}
    return {
        "chosen_step": found.chosen.number,
        "reached": found.chosen.reached,
        "steps": [_step_row(step, step.number in front) for step in found.steps],
    }


def _step_row(step: Step, on_front: bool) -> dict[str, Any]:
    return {
        "step": step.number, "added": list(step.added), "promoted": len(step.promoted), "extra_us": round(step.extra_us, 3),
        "sqnr_db": {name: round(level, 3) for name, level in step.sqnr_db.items()}, "margin_db": round(step.margin_db, 3), "on_front": on_front,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------------- front
@dataclass(frozen=True)
class FrontRow:
    """One line of mixed_precision.csv: a point that nothing beats in both simulated time and accuracy."""

    step: int
    promoted: int
    simulated_ms: float
    extra_us: float
    worst_output: str
    worst_sqnr_db: float
    margin_db: float
    chosen: bool


def _front_rows(found: SearchResult | None) -> list[FrontRow]:
    if found is None:
        return []
    rows = []
    for step in found.front():
        worst = min(step.sqnr_db, key=lambda name: step.sqnr_db[name])
        total = (found.base_us + step.extra_us) / 1e3
        rows.append(FrontRow(step.number, len(step.promoted), total, step.extra_us, worst, step.sqnr_db[worst], step.margin_db, step is found.chosen))
    return rows


def front_text(found: SearchResult) -> str:
    """The front as a table for people."""
    lines = ["simulated ms  extra us  int16  worst output SQNR dB  margin dB"]
    for row in _front_rows(found):
        mark = "  <- chosen" if row.chosen else ""
        accuracy = f"{row.worst_output:>16s} {row.worst_sqnr_db:5.1f} {row.margin_db:+9.1f}"
        lines.append(f"{row.simulated_ms:12.4f} {row.extra_us:9.2f} {row.promoted:6d} {accuracy}{mark}")
    return "\n".join(lines)
