"""Which int8 tensors become int16 beyond the rules, by the configured method, and what that costs on the chip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config import PromotionConfig, QuantizationConfig
from pipeline.errors import ConfigError
from pipeline.j6.chip import ChipProfile
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.compare import local_errors_db
from pipeline.quantization.mixed import MixedModel
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, hint, is_named, make_plan
from pipeline.quantization.search import J6Prices, SearchResult, Step, search
from pipeline.quantization.sensitivity import Sensitivity, choose_promotions, measure, worst_by_own_error

WIDE = "candidate for int16"


@dataclass(frozen=True)
class Promotion:
    """The decision. `reasons`: promoted root tensor -> why; `search` is None unless the method is search."""

    plan: QuantPlan
    ranking: list[Sensitivity]
    reasons: Mapping[str, str]
    base_us: float
    extra_us: float
    search: SearchResult | None


def promote(model: FloatModel, base: QuantPlan, calibration: Calibration, config: QuantizationConfig, chip: ChipProfile) -> Promotion:
    """Measure the sensitivity of the int8 tensors of `base` and promote by `config.promotion`.

    Raises:
        ConfigError: a pattern names no tensor.
    """
    ranking = _ranking(model, base, calibration, config)
    prices = J6Prices(model, base, chip)
    found: SearchResult | None = None
    reasons: dict[str, str] = {}
    if config.promotion.method == "top":
        int8 = sum(decision.dtype == "int8" for decision in base.roots().values())
        reasons = choose_promotions(ranking, _count(config.promotion, int8))
    elif config.promotion.method == "search" and ranking:
        found = _search(model, base, ranking, prices, calibration, config)
        reasons = _reasons(found)
    plan = promoted_plan(model, base, calibration, config, reasons)
    return Promotion(plan, ranking, reasons, prices.base_us, prices.extra_us(reasons), found)


def promoted_plan(model: FloatModel, base: QuantPlan, calibration: Calibration, config: QuantizationConfig, reasons: Mapping[str, str]) -> QuantPlan:
    """The plan with these int8 tensors as int16; repaired weights and biases stay."""
    if not reasons:
        return base
    return replace(base, tensors=make_plan(model, config, calibration.statistics, reasons).tensors)


def _ranking(model: FloatModel, plan: QuantPlan, calibration: Calibration, config: QuantizationConfig) -> list[Sensitivity]:
    first = calibration.analysis[:1]
    own = local_errors_db(model, plan, first, config.threads)
    allowed = _allowed(model, plan, config.promotion.patterns)
    candidates = [name for name in worst_by_own_error(own, plan) if name in allowed][: config.promotion.candidates]
    return measure(model, plan, candidates, first, config.threads)


def _allowed(model: FloatModel, plan: QuantPlan, patterns: Sequence[str]) -> set[str]:
    """Root tensors with a member that a pattern names."""
    allowed: set[str] = set()
    for pattern in patterns:
        hits = {decision.root for name, decision in plan.quantized().items() if is_named(model, pattern, name)}
        if not hits:
            raise ConfigError(f"quantization.promotion.patterns: {pattern!r} matches no node, tensor or module of {model.path}")
        allowed |= hits
    return allowed


def _count(config: PromotionConfig, int8_tensors: int) -> int:
    return math.ceil(config.top * int8_tensors) if config.top < 1.0 else int(config.top)


def _search(
    model: FloatModel, base: QuantPlan, ranking: Sequence[Sensitivity], prices: J6Prices, calibration: Calibration, config: QuantizationConfig
) -> SearchResult:
    names = [row.tensor for row in ranking]
    wide = promoted_plan(model, base, calibration, config, dict.fromkeys(names, WIDE))
    mixed = MixedModel(model, base, wide, names, calibration.analysis, config.threads)
    return search(model, base, ranking, output_targets_db(model, config.promotion), prices, mixed.noise, config.promotion.max_extra_us)


def output_targets_db(model: FloatModel, config: PromotionConfig) -> dict[str, float]:
    """Float output -> signal to noise that it should reach, dB. Raises `ConfigError` for a target of an output that the model does not have."""
    outputs = model.float_outputs
    for name in config.output_targets_db:
        if name not in outputs:
            raise ConfigError(f"quantization.promotion.output_targets_db: {name!r} is no float output of {model.path}{hint(name, outputs)}")
    return {name: config.output_targets_db.get(name, config.target_sqnr_db) for name in outputs}


def _reasons(found: SearchResult) -> dict[str, str]:
    """Promoted tensor -> the step of the log that brought it in, with what the step cost."""
    reasons = {}
    for before, step in zip(found.steps, found.steps[1:], strict=False):
        for name in step.added:
            if name in found.chosen.promoted:
                price = f"{step.extra_us - before.extra_us:+.2f} us"
                reasons[name] = f"search step {step.number}, {price}, worst margin {_margin(before)} to {_margin(step)}"
    return reasons


def _margin(step: Step) -> str:
    return f"{step.margin_db:+.1f} dB"
