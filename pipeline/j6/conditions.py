"""Conditions a plan runs under: clock, bandwidth, other models on the chip, jitter; and the distribution of latency that follows.

A scenario is a YAML file: `compute_scale` (BPU clock relative to nominal), `bandwidth_cap_gbps`, `corunners` (name, gbps while active, duty 0..1),
`jitter` (relative standard deviation of the host part), `frames` and `seed`. Everything in it is an assumption of its author; the chip profile stays
untouched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline.errors import ConfigError
from pipeline.j6.plan import Plan
from pipeline.j6.schedule import schedule

LEVELS = 5  # bus shares between "alone" and "all co-runners active" at which the schedule is evaluated; latencies in between are interpolated


@dataclass(frozen=True)
class Corunner:
    """Another model: takes `gbps` of the DDR bus during a share `duty` of the time."""

    name: str
    gbps: float
    duty: float


@dataclass(frozen=True)
class Scenario:
    """Conditions of a simulation; the default is the plan alone on a nominal chip with the jitter of one submit."""

    name: str = "alone"
    compute_scale: float = 1.0
    bandwidth_cap_gbps: float | None = None
    corunners: tuple[Corunner, ...] = ()
    jitter: float = 0.05
    frames: int = 2000
    seed: int = 0
    source: str = "default"
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Distribution:
    """Latency over the simulated frames, ms."""

    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises `ConfigError` naming the field for a wrong key or value."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        runners = tuple(Corunner(**entry) for entry in content.pop("corunners", []))
        scenario = Scenario(**content, corunners=runners)
    except (OSError, yaml.YAMLError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a scenario ({error})") from error
    _check(path, scenario)
    return scenario


def _check(path: Path, scenario: Scenario) -> None:
    rules = (
        ("compute_scale", 0 < scenario.compute_scale <= 1, "0 < value <= 1"),
        ("bandwidth_cap_gbps", scenario.bandwidth_cap_gbps is None or scenario.bandwidth_cap_gbps > 0, "value > 0"),
        ("jitter", 0 <= scenario.jitter < 1, "0 <= value < 1"),
        ("frames", 1 <= scenario.frames <= 1_000_000, "1 <= value <= 1000000"),
        ("corunners", all(0 <= r.duty <= 1 and r.gbps >= 0 for r in scenario.corunners), "duty 0..1, gbps >= 0"),
    )
    for name, valid, rule in rules:
        if not valid:
            raise ConfigError(f"{path}: field {name!r} is {getattr(scenario, name)!r}; rule: {rule}")


def bpu_ms(plan: Plan, ddr_scale: float = 1.0, compute_scale: float = 1.0) -> float:
    """Makespan on the BPU with DDR and compute times stretched by the given factors, ms."""
    costs = [block.cost(ddr_scale, compute_scale) for block in plan.blocks]
    return schedule(costs, [block.producers for block in plan.blocks], int(plan.options["prefetch"]), plan.resubmit_ms).makespan_ms


def simulate(plan: Plan, scenario: Scenario) -> Distribution:
    """Latency of `scenario.frames` independent frames.

    Each frame meets every co-runner with probability `duty`; what they take of the bus stretches the DDR times, down to a fair share of
    1/(1 + active co-runners). The host part varies log-normally with relative deviation `jitter`.
    """
    generator = np.random.default_rng(scenario.seed)
    host = plan.host_ms * generator.lognormal(-(scenario.jitter**2) / 2, scenario.jitter, scenario.frames)
    nominal = plan.chip["ddr_peak_gbps"] * plan.chip["ddr_efficiency"]
    available = min(nominal, scenario.bandwidth_cap_gbps or nominal)
    active = generator.random((scenario.frames, len(scenario.corunners))) < [runner.duty for runner in scenario.corunners]
    taken = active @ np.array([runner.gbps for runner in scenario.corunners]) if scenario.corunners else np.zeros(scenario.frames)
    fair = available / (1 + active.sum(axis=1))
    stretch = nominal / np.maximum(available - taken, fair)
    levels = np.linspace(stretch.min(), stretch.max(), LEVELS) if np.ptp(stretch) > 0 else np.array([stretch.min()])
    makespans = [bpu_ms(plan, level, 1 / scenario.compute_scale) for level in levels]
    latency = np.interp(stretch, levels, makespans) + host
    p50, p90, p99 = (float(value) for value in np.percentile(latency, [50, 90, 99]))
    return Distribution(float(latency.mean()), p50, p90, p99, float(latency.max()))
