"""Scenarios: temperature steps, other models, dropped frames, fail-safe rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.j6.compiler import CompileOptions, compile_model
from pipeline.j6.conditions import Corunner, Rule, Scenario, Step, bpu_ms, in_module, load_scenario, simulate
from pipeline.j6.profile import profile

QUIET = Scenario(jitter=0.0, frames=200, frame_rate_fps=100.0)
SCENARIOS = Path(__file__).parents[2] / "pipeline" / "j6" / "scenarios"


@pytest.fixture
def plan(multitask: Path, j6m):
    return compile_model(multitask, j6m, CompileOptions())


def test_clock_steps_show_one_by_one(plan):
    steps = (Step(1.0, 25.0), Step(1.0, 95.0, compute_scale=0.5))
    outcome = simulate(plan, replace(QUIET, steps=steps))
    (_, cool), (_, hot) = outcome.by_step
    assert outcome.frames == 200
    assert cool.p50_ms == pytest.approx(plan.host_ms + bpu_ms(plan), rel=1e-9)
    assert hot.p50_ms == pytest.approx(plan.host_ms + bpu_ms(plan, compute_scale=2.0), rel=1e-9)


def test_a_hot_chip_runs_without_the_disabled_modules(plan):
    rule = Rule("no detection when hot", temperature_above_c=85.0, disable=("det_head",))
    outcome = simulate(plan, replace(QUIET, steps=(Step(1.0, 85.0), Step(1.0, 86.0)), rules=(rule,)))
    (_, cool), (_, hot) = outcome.by_step
    assert outcome.rule_frames == {"no detection when hot": 100}
    assert hot.p50_ms < cool.p50_ms


def test_three_frames_over_budget_hold_the_last_result(plan):
    """Every frame is over: three run, five are held, and so on."""
    rule = Rule("fall back", frames_over=3, budget_ms=1e-6, hold_frames=5)
    outcome = simulate(plan, replace(QUIET, frames=80, rules=(rule,)))
    assert (outcome.held, outcome.rule_frames["fall back"]) == (50, 50)


def test_a_busy_chip_makes_frames_wait_and_drops_them_at_last(plan):
    fast = simulate(plan, replace(QUIET, frame_rate_fps=1e3 / (plan.host_ms + bpu_ms(plan)) * 3))
    assert fast.dropped > 0 and fast.overall.max_ms > plan.host_ms + bpu_ms(plan)
    assert simulate(plan, replace(QUIET, frame_rate_fps=1.0)).dropped == 0


def test_without_preemption_a_frame_waits_for_the_running_segment(plan):
    """A neighbour on the BPU half of the time: half of the frames wait, at most for its whole frame, or for one of its segments."""
    neighbour = Corunner("other", fps=10.0, bpu_ms=50.0)
    alone, beside = simulate(plan, QUIET), simulate(plan, replace(QUIET, frame_rate_fps=1.0, frames=4000, corunners=(neighbour,)))
    assert beside.overall.mean_ms - alone.overall.mean_ms == pytest.approx(0.5 * 25.0, rel=0.1)
    assert beside.overall.max_ms <= alone.overall.max_ms + 50.0
    cut = simulate(plan, replace(QUIET, frame_rate_fps=1.0, frames=4000, corunners=(replace(neighbour, segment_ms=5.0),)))
    assert cut.overall.max_ms <= alone.overall.max_ms + 5.0


def test_same_seed_same_frames(plan):
    noisy = replace(QUIET, jitter=0.1, jitter_ms=1.0, corunners=(Corunner("a", fps=7.0, bpu_ms=3.0, gbps=10.0),))
    assert simulate(plan, noisy) == simulate(plan, noisy)
    assert simulate(plan, noisy) != simulate(plan, replace(noisy, seed=1))


def test_module_patterns():
    assert in_module("detection.layers.1.refine.velocity.0", "detection.layers.*.refine.velocity")
    assert in_module("det_head", "det_head") and not in_module("det_header", "det_head")


def test_shipped_scenarios_load_and_say_that_they_are_not_facts(plan):
    for path in sorted(SCENARIOS.glob("*.yaml")):
        scenario = load_scenario(path)
        assert "unverified" in scenario.source or "assumed" in scenario.source
        conditions = profile(plan, scenario)["conditions"]
        assert conditions["scenario"] == scenario.name and conditions["p50_ms"] <= conditions["p99_ms"] <= conditions["max_ms"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [{seconds: 1}]", "'frame_rate_fps' is None; rule: needed by steps"),
        ("corunners: [{name: a, fps: 100, bpu_ms: 20}]", "busy at most all the time"),
        ("rules: [{name: a, frames_over: 3}]", "field 'rules'"),
        ("rules: [{name: a, temperature_above_c: 85}]", "field 'rules'"),
        ("steps: [{seconds: 1, temp: 3}]", "not a scenario"),
    ],
)
def test_bad_scenarios_name_the_field(tmp_path: Path, text, message):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_scenario(path)
