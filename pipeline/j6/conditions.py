"""Conditions a plan runs under: temperature and clock over time, bandwidth, other models on the chip, jitter, fail-safe rules; and the distribution
of latency that follows.

A scenario is a YAML file with the fields of `Scenario`. Everything in it is an assumption of its author; the chip profile stays untouched. Frames
arrive at `frame_rate_fps`, one is worked on at a time; a frame that finds the chip busy waits, and is dropped when the next one arrives first.
Other models share the BPU without preemption: a frame waits for their running segment, and they get their turn between the segments of this plan.
On the bus they slow down the DDR part of what runs beside them. All random draws come from one generator with the scenario's seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from pipeline.errors import ConfigError
from pipeline.j6.plan import Plan
from pipeline.j6.schedule import schedule

LEVELS = 5  # bus shares between the best and the worst frame at which the schedule is evaluated; latencies in between are interpolated
MAX_FRAMES = 1_000_000


@dataclass(frozen=True)
class Step:
    """`seconds` at one temperature: BPU clock relative to nominal, and a cap on the DDR bandwidth (GB/s)."""

    seconds: float
    temperature_c: float = 25.0
    compute_scale: float = 1.0
    bandwidth_cap_gbps: float | None = None


@dataclass(frozen=True)
class Corunner:
    """Another model at `fps` frames/s. Each of its frames takes `bpu_ms` of the BPU, in segments of `segment_ms` (default: one), and draws `gbps`
    from DDR for `active_ms` (default: while it is on the BPU)."""

    name: str
    fps: float
    bpu_ms: float = 0.0
    gbps: float = 0.0
    active_ms: float | None = None
    segment_ms: float | None = None

    @property
    def busy_ms(self) -> float:
        """Time a frame of it draws from DDR, ms."""
        return self.bpu_ms if self.active_ms is None else self.active_ms

    @property
    def longest_segment_ms(self) -> float:
        """Longest time that it cannot be interrupted, ms."""
        return self.bpu_ms if self.segment_ms is None else self.segment_ms


@dataclass(frozen=True)
class Rule:
    """A fail-safe. While the temperature is above `temperature_above_c`, the blocks of modules that match `disable` do not run. After
    `frames_over` frames in a row longer than `budget_ms`, the next `hold_frames` frames are answered with the last result."""

    name: str
    temperature_above_c: float | None = None
    frames_over: int = 0
    budget_ms: float = 0.0
    disable: tuple[str, ...] = ()
    hold_frames: int = 0


@dataclass(frozen=True)
class Scenario:
    """Conditions of a simulation; the default is the plan alone on a nominal chip with the jitter of one submit.

    `jitter`: relative standard deviation of the host part; `jitter_ms`: standard deviation of a disturbance of the whole frame.
    """

    name: str = "alone"
    compute_scale: float = 1.0
    bandwidth_cap_gbps: float | None = None
    frame_rate_fps: float | None = None
    steps: tuple[Step, ...] = ()
    corunners: tuple[Corunner, ...] = ()
    rules: tuple[Rule, ...] = ()
    jitter: float = 0.05
    jitter_ms: float = 0.0
    frames: int = 2000
    seed: int = 0
    source: str = "default"

    @cached_property
    def timeline(self) -> list[tuple[Step, int]]:
        """Steps and their numbers of frames."""
        if not self.steps:
            return [(Step(0.0, compute_scale=self.compute_scale, bandwidth_cap_gbps=self.bandwidth_cap_gbps), self.frames)]
        return [(step, max(round(step.seconds * (self.frame_rate_fps or 0.0)), 1)) for step in self.steps]


@dataclass(frozen=True)
class Distribution:
    """Latency of the frames that ran, ms."""

    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True)
class Outcome:
    """Result of a simulation: all frames, frames by step, and how many frames were dropped, held or touched by a rule."""

    overall: Distribution
    by_step: tuple[tuple[Step, Distribution | None], ...]
    frames: int
    dropped: int
    held: int
    rule_frames: dict[str, int]


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises `ConfigError` naming the field for a wrong key or value."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        steps = tuple(Step(**entry) for entry in content.pop("steps", []))
        runners = tuple(Corunner(**entry) for entry in content.pop("corunners", []))
        rules = tuple(Rule(**(entry | {"disable": tuple(entry.get("disable", ()))})) for entry in content.pop("rules", []))
        scenario = Scenario(**content, steps=steps, corunners=runners, rules=rules)
        _check(path, scenario)
    except (OSError, yaml.YAMLError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a scenario ({error})") from error
    return scenario


def _check(path: Path, scenario: Scenario) -> None:
    steps = scenario.steps
    caps = [scenario.bandwidth_cap_gbps, *(step.bandwidth_cap_gbps for step in steps)]
    rules: tuple[tuple[str, Any, bool, str], ...] = (
        (
            "compute_scale",
            scenario.compute_scale,
            all(0 < s <= 1 for s in (scenario.compute_scale, *(x.compute_scale for x in steps))),
            "0 < value <= 1",
        ),
        ("bandwidth_cap_gbps", caps, all(cap is None or cap > 0 for cap in caps), "value > 0"),
        ("frame_rate_fps", scenario.frame_rate_fps, scenario.frame_rate_fps is None or scenario.frame_rate_fps > 0, "value > 0"),
        ("frame_rate_fps", scenario.frame_rate_fps, scenario.frame_rate_fps is not None or not steps, "needed by steps"),
        ("steps", steps, all(step.seconds > 0 for step in steps), "seconds > 0"),
        ("corunners", scenario.corunners, all(_plausible(r) for r in scenario.corunners), "fps > 0, gbps and times >= 0, busy at most all the time"),
        (
            "rules",
            scenario.rules,
            all(_complete(rule) for rule in scenario.rules),
            "temperature_above_c with disable, or frames_over with hold_frames",
        ),
        ("jitter", scenario.jitter, 0 <= scenario.jitter < 1, "0 <= value < 1"),
        ("jitter_ms", scenario.jitter_ms, scenario.jitter_ms >= 0, "value >= 0"),
        ("frames", scenario.frames, 1 <= sum(count for _, count in scenario.timeline) <= MAX_FRAMES, f"1 <= value <= {MAX_FRAMES}"),
    )
    for name, value, valid, rule in rules:
        if not valid:
            raise ConfigError(f"{path}: field {name!r} is {value!r}; rule: {rule}")


def _plausible(runner: Corunner) -> bool:
    return runner.fps > 0 and runner.gbps >= 0 and runner.bpu_ms >= 0 and 0 <= runner.busy_ms * runner.fps <= 1e3 and runner.longest_segment_ms >= 0


def _complete(rule: Rule) -> bool:
    thermal = rule.temperature_above_c is not None and bool(rule.disable) and not rule.frames_over
    overrun = rule.temperature_above_c is None and rule.frames_over > 0 and rule.budget_ms > 0 and rule.hold_frames > 0
    return thermal or overrun


def bpu_ms(plan: Plan, ddr_scale: float = 1.0, compute_scale: float = 1.0, disabled: Sequence[str] = ()) -> float:
    """Makespan on the BPU with DDR and compute times stretched by the given factors, without the blocks of `disabled` modules, ms."""
    costs = [block.cost(ddr_scale, compute_scale) for block in plan.blocks]
    for block in plan.blocks:
        if any(in_module(block.module, pattern) for pattern in disabled):
            idle = tuple((unit, 0.0) for unit, _ in block.units)
            costs[block.index] = replace(costs[block.index], units=idle, launch_ms=0.0, load_ms=0.0, stream_ms=0.0, store_ms=0.0)
    return schedule(costs, [block.producers for block in plan.blocks], int(plan.options["prefetch"]), plan.resubmit_ms).makespan_ms


def in_module(module: str, pattern: str) -> bool:
    """True when a dotted module path matches `pattern` (* stands for anything) or lies below what matches."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def simulate(plan: Plan, scenario: Scenario) -> Outcome:
    """Run the scenario's frames through the plan."""
    return _Run(plan, scenario).outcome()


class _Run:
    """State of one simulation: random draws first, then the frames in time order."""

    def __init__(self, plan: Plan, scenario: Scenario) -> None:
        self.plan, self.scenario = plan, scenario
        self.count = sum(count for _, count in scenario.timeline)
        generator = np.random.default_rng(scenario.seed)
        self.host_ms = plan.host_ms * generator.lognormal(-(scenario.jitter**2) / 2, scenario.jitter, self.count)
        self.disturbance_ms = np.abs(generator.normal(0.0, scenario.jitter_ms, self.count)) if scenario.jitter_ms else np.zeros(self.count)
        self.phase = generator.random((self.count, len(scenario.corunners)))  # clocks drift: every frame meets a co-runner at any point of its period
        self.step_of = np.repeat(np.arange(len(scenario.timeline)), [count for _, count in scenario.timeline])

    def outcome(self) -> Outcome:
        """Latencies of all frames, with the rules applied in time order."""
        thermal = [self._thermal(step) for step, _ in self.scenario.timeline]
        normal = self._frame_ms([tuple(pattern for rule in rules for pattern in rule.disable) for rules in thermal])
        latency, state, fired = self._queue(normal)
        ran = state == _RAN
        rule_frames = {rule.name: int(fired.get(rule.name, 0)) for rule in self.scenario.rules}
        for rules, (_, count) in zip(thermal, self.scenario.timeline, strict=True):
            for rule in rules:
                rule_frames[rule.name] += count
        steps = tuple((step, distribution(latency[ran & (self.step_of == index)])) for index, (step, _) in enumerate(self.scenario.timeline))
        overall = distribution(latency[ran]) or Distribution(0.0, 0.0, 0.0, 0.0, 0.0)
        return Outcome(overall, steps, self.count, int((state == _DROPPED).sum()), int((state == _HELD).sum()), rule_frames)

    def _thermal(self, step: Step) -> list[Rule]:
        return [rule for rule in self.scenario.rules if rule.temperature_above_c is not None and step.temperature_c > rule.temperature_above_c]

    def _frame_ms(self, disabled: Sequence[tuple[str, ...]]) -> NDArray[np.float64]:
        """Time of every frame alone in the queue: host, wait for the BPU, BPU, turns of others between segments, disturbance."""
        stretch = self._bus_stretch()
        total = self.host_ms + self.disturbance_ms
        for index, (step, _) in enumerate(self.scenario.timeline):
            chosen = self.step_of == index
            low, high = stretch[chosen].min(), stretch[chosen].max()
            levels = np.linspace(low, high, LEVELS) if high > low else np.array([low])
            makespans = [bpu_ms(self.plan, float(level), 1 / step.compute_scale, disabled[index]) for level in levels]
            total[chosen] += np.interp(stretch[chosen], levels, makespans)
        return total + self._wait_ms()

    def _bus_stretch(self) -> NDArray[np.float64]:
        """Factor on DDR times of every frame; what others draw leaves at least a fair share of 1/(1 + active co-runners)."""
        nominal = self.plan.chip["ddr_peak_gbps"] * self.plan.chip["ddr_efficiency"]
        caps = np.array([min(nominal, step.bandwidth_cap_gbps or nominal) for step, _ in self.scenario.timeline])[self.step_of]
        if not self.scenario.corunners:
            return nominal / caps
        window = self.plan.host_ms + self.plan.schedule.makespan_ms
        share = np.stack([_overlap(runner, phase, window) for runner, phase in zip(self.scenario.corunners, self.phase.T, strict=True)], axis=1)
        taken = share @ np.array([runner.gbps for runner in self.scenario.corunners])
        return nominal / np.maximum(caps - taken, caps / (1 + share.sum(axis=1)))

    def _wait_ms(self) -> NDArray[np.float64]:
        """Wait of every frame for the BPU: the rest of a running segment, and the turns that others get between the segments of this plan."""
        wait = np.zeros(self.count)
        gaps = len(self.plan.segments) - 1
        for runner, phase in zip(self.scenario.corunners, self.phase.T, strict=True):
            into_ms = phase * 1e3 / runner.fps  # since its last frame came
            running = into_ms < runner.bpu_ms
            left = np.where(running, runner.bpu_ms - into_ms, 0.0)
            segment = max(runner.longest_segment_ms, 1e-9)
            first = np.minimum(left, np.where(running, segment - np.mod(into_ms, segment), 0.0))
            arrivals = np.floor((into_ms + self.plan.schedule.makespan_ms) * runner.fps / 1e3)
            between = np.minimum(left - first + arrivals * runner.bpu_ms, gaps * segment)
            wait += first + between
        return wait

    def _queue(self, frame_ms: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int8], dict[str, int]]:
        """(latency, state of every frame, frames by overrun rule): waiting, dropping, and rules on overruns."""
        period = 1e3 / self.scenario.frame_rate_fps if self.scenario.frame_rate_fps else None
        overrun = [rule for rule in self.scenario.rules if rule.frames_over]
        latency, state = np.zeros(self.count), np.zeros(self.count, np.int8)
        late, hold, fired = dict.fromkeys((rule.name for rule in overrun), 0), 0, dict.fromkeys((rule.name for rule in overrun), 0)
        free_ms = 0.0
        for index in range(self.count):
            arrival = index * period if period else free_ms
            start = max(arrival, free_ms)
            if hold or (period and start >= arrival + period):
                state[index] = _HELD if hold else _DROPPED
                hold = max(hold - 1, 0)
                continue
            free_ms = start + frame_ms[index]
            latency[index] = free_ms - arrival
            for rule in overrun:
                late[rule.name] = late[rule.name] + 1 if latency[index] > rule.budget_ms else 0
                if late[rule.name] >= rule.frames_over:
                    late[rule.name], hold = 0, rule.hold_frames
                    fired[rule.name] += rule.hold_frames
        return latency, state, fired


_RAN, _DROPPED, _HELD = 0, 1, 2


def _overlap(runner: Corunner, phase: NDArray[np.float64], window_ms: float) -> NDArray[np.float64]:
    """Share of a window during which a co-runner draws from DDR; `phase` 0..1 says where in its period the window begins."""
    period = 1e3 / runner.fps
    begin = phase * period
    end = begin + window_ms

    def active_until(moment: NDArray[np.float64]) -> NDArray[np.float64]:
        whole = np.floor(moment / period)
        return whole * runner.busy_ms + np.minimum(moment - whole * period, runner.busy_ms)

    return (active_until(end) - active_until(begin)) / window_ms


def distribution(latency_ms: NDArray[np.float64]) -> Distribution | None:
    """Mean and percentiles; None for no frames."""
    if not len(latency_ms):
        return None
    p50, p90, p99 = (float(value) for value in np.percentile(latency_ms, [50, 90, 99]))
    return Distribution(float(latency_ms.mean()), p50, p90, p99, float(latency_ms.max()))
