"""Mixed precision: the least simulated time that reaches the target."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import combinations

import pytest

from pipeline.config import QuantizationConfig
from pipeline.errors import ConfigError
from pipeline.j6.chip import ChipProfile
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.compare import sqnr_db
from pipeline.quantization.mixed import MixedModel
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import make_plan
from pipeline.quantization.promotion import promoted_plan
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.quantize import Quantized, quantize_network
from pipeline.quantization.reports import front_text, sensitivity_report
from pipeline.quantization.search import J6Prices, Search
from pipeline.quantization.sessions import Runner, output_noise

Build = Callable[..., QuantizationConfig]

# Noise ratio at the one output that each tensor causes; independent noises add up.
EFFECTS = {"a": 4e-4, "b": 3e-4, "c": 2e-4, "d": 1e-4}
FLOOR = 1e-6


PRICES_US = {"a": 50.0, "b": 4.0, "c": 4.0, "d": 1.0}


class Table:
    """A world of known noises and prices. `b` and `c` are the operands of one addition: one alone costs a requantization on top."""

    def noise(self, promoted: Collection[str]) -> dict[str, float]:
        return {"out": FLOOR + sum(value for name, value in EFFECTS.items() if name not in promoted)}

    def extra_us(self, promoted: Collection[str]) -> float:
        lone = ("b" in promoted) != ("c" in promoted)
        return sum(PRICES_US[name] for name in promoted) + (30.0 if lone else 0.0)


def run(target_db: float, max_extra_us: float | None = None) -> Search:
    world = Table()
    moves = [frozenset(name) for name in EFFECTS] + [frozenset("bc")]
    walk = Search(moves, {name: {"out": value} for name, value in EFFECTS.items()}, {"out": target_db}, world, world.noise)
    walk.chosen = walk.run(max_extra_us)  # type: ignore[attr-defined]
    return walk


def cheapest(target_db: float) -> float:
    """By trying all sets."""
    world = Table()
    sets = [set(names) for size in range(5) for names in combinations(EFFECTS, size)]
    return min(world.extra_us(chosen) for chosen in sets if world.noise(chosen)["out"] <= 10 ** (-target_db / 10))


@pytest.mark.parametrize("target_db", [30.0, 32.9, 35.0, 40.0, 50.0])
def test_reaches_the_target_as_cheaply_as_trying_everything(target_db: float) -> None:
    chosen = run(target_db).chosen  # type: ignore[attr-defined]
    assert chosen.reached
    assert chosen.extra_us == cheapest(target_db)


def test_borders_are_charged_so_both_operands_go_together() -> None:
    chosen = run(33.0).chosen  # type: ignore[attr-defined]
    assert {"b", "c"} <= chosen.promoted and "a" not in chosen.promoted  # though a has the largest error


def test_unreachable_target_gives_the_nearest() -> None:
    chosen = run(90.0).chosen  # type: ignore[attr-defined]
    assert not chosen.reached and chosen.promoted == frozenset(EFFECTS)


def test_budget_is_kept() -> None:
    walk = run(90.0, max_extra_us=10.0)
    assert all(step.extra_us <= 10.0 for step in walk.steps) and walk.chosen.promoted == frozenset("bcd")  # type: ignore[attr-defined]


def test_mixed_session_is_the_written_model(deformable_model: FloatModel, deformable_calibration: Calibration, config: QuantizationConfig) -> None:
    """Switching a tensor to int16 at run time gives the noise of the file in which it is int16."""
    base = make_plan(deformable_model, config, deformable_calibration.statistics)
    names = [name for name, decision in base.roots().items() if decision.dtype == "int8"]
    wide = promoted_plan(deformable_model, base, deformable_calibration, config, dict.fromkeys(names, "test"))
    mixed = MixedModel(deformable_model, base, wide, names, deformable_calibration.analysis, 1)
    for chosen in ([], ["/GridSample_output_0"], names):
        plan = promoted_plan(deformable_model, base, deformable_calibration, config, dict.fromkeys(chosen, "test"))
        exact, rounded = Runner(deformable_model.proto, mixed.outputs, 1), Runner(write_qdq(deformable_model, plan), mixed.outputs, 1)
        pairs = [(exact.run(batch), rounded.run(batch)) for batch in deformable_calibration.analysis]
        expected = {name: output_noise([x[name] for x, _ in pairs], [y[name] for _, y in pairs]) for name in mixed.outputs}
        assert mixed.noise(chosen) == pytest.approx(expected, rel=0.05)  # biases keep the scale of int8 inputs


def test_prices_are_those_of_the_chip_model(
    deformable_model: FloatModel, deformable_calibration: Calibration, config: QuantizationConfig, chip: ChipProfile
) -> None:
    base = make_plan(deformable_model, config, deformable_calibration.statistics)
    prices = J6Prices(deformable_model, base, chip)
    assert prices.base_us > 0.0 and prices.extra_us([]) == 0.0
    assert prices.extra_us(["/GridSample_output_0"]) > 0.0


@pytest.fixture(scope="module")
def searched(deformable_model: FloatModel, deformable_calibration: Calibration, with_config: Build, chip: ChipProfile) -> Quantized:
    promotion = {"method": "search", "target_sqnr_db": 44.0}
    return quantize_network(deformable_model, deformable_calibration, with_config(promotion=promotion), chip)


def test_network_reaches_its_target(searched: Quantized) -> None:
    found = searched.promotion.search
    assert found is not None and found.chosen.reached and found.chosen.promoted == set(searched.promotion.reasons)
    assert all(searched.plan.tensors[name].dtype == "int16" for name in found.chosen.promoted)
    assert found.steps[0].margin_db < 0.0  # it was needed


def test_log_says_metric_and_microseconds_of_every_step(searched: Quantized) -> None:
    log = sensitivity_report(searched)["search"]
    assert [row["step"] for row in log["steps"]] == list(range(len(log["steps"])))
    assert all({"added", "extra_us", "sqnr_db", "margin_db"} <= set(row) for row in log["steps"])
    front = [row for row in log["steps"] if row["on_front"]]
    assert front and "<- chosen" in front_text(searched.promotion.search)  # type: ignore[arg-type]


def test_no_point_of_the_front_is_beaten(searched: Quantized) -> None:
    found = searched.promotion.search
    assert found is not None
    for point in found.front():
        assert not any(s.extra_us <= point.extra_us and s.margin_db > point.margin_db for s in found.steps)


def test_search_is_no_dearer_than_the_plain_rule_at_its_accuracy(
    deformable_model: FloatModel, deformable_calibration: Calibration, with_config: Build, chip: ChipProfile
) -> None:
    plain = quantize_network(deformable_model, deformable_calibration, with_config(promotion={"method": "top", "top": 3}), chip)
    level = min(sqnr_db(1.0, value) for value in plain.noise.values())
    promotion: Mapping[str, object] = {"method": "search", "target_sqnr_db": level - 0.1}
    ours = quantize_network(deformable_model, deformable_calibration, with_config(promotion=promotion), chip)
    assert ours.promotion.extra_us <= plain.promotion.extra_us


def test_pattern_of_the_template_limits_and_must_match(
    deformable_model: FloatModel, deformable_calibration: Calibration, with_config: Build, chip: ChipProfile
) -> None:
    promotion = {"method": "top", "top": 3, "patterns": ["/value/*", "/query/*"]}
    result = quantize_network(deformable_model, deformable_calibration, with_config(promotion=promotion), chip)
    assert {row.tensor for row in result.promotion.ranking} == {"/value/Add_output_0", "/query/Add_output_0"}
    with pytest.raises(ConfigError, match=r"promotion\.patterns: 'haed\*' matches no node"):
        quantize_network(deformable_model, deformable_calibration, with_config(promotion={"patterns": ["haed*"]}), chip)
