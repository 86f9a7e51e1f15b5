"""Figures of a plan: latency, frame rate, where the time goes, DDR traffic, memory, and what would pay most to change.

Everything here is simulated. Field names follow the vendor's static performance report where it has them (`summary`, `layer details`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.j6.conditions import Scenario, simulate
from pipeline.j6.plan import Plan, PlanBlock

MODULE_DEPTH = 2
PAYING_CHANGES = 3
GB = 1e9


def latency_ms(plan: Plan, in_flight: int = 1) -> float:
    """Latency of one submit with 1 or 2 submits in flight, ms.

    One: host work plus the makespan on the BPU. Two: the BPU is the bottleneck and each submit waits for the other (2 x makespan), unless
    the network is so small that the host work dominates; then preparing one submit delays the other by `contention_ms`.
    """
    alone = plan.host_ms + plan.schedule.makespan_ms
    if in_flight == 1:
        return alone
    return max(in_flight * plan.schedule.makespan_ms, alone + plan.contention_ms)


def profile(plan: Plan, scenario: Scenario | None = None, design_fps: float | None = None) -> dict[str, Any]:
    """The profile document (see docs/j6-model.md for every field)."""
    conditions = scenario or Scenario()
    single, double = latency_ms(plan), latency_ms(plan, 2)
    distribution = simulate(plan, conditions)
    fps = 1e3 / single
    return {
        "simulated": True,
        "chip": plan.chip["name"],
        "march": plan.chip["march"],
        "profile_hash": plan.profile_hash,
        "model": plan.model,
        "latency_ms": _r(single),
        "fps": _r(fps),
        "latency_two_in_flight_ms": _r(double),
        "fps_two_in_flight": _r(2e3 / double),
        "bpu_ms": _r(plan.schedule.makespan_ms),
        "host_ms": _r(plan.host_ms),
        "conditions": {"scenario": conditions.name, "source": conditions.source, "seed": conditions.seed, "frames": conditions.frames}
        | {key: _r(value) for key, value in asdict(distribution).items()},
        "ddr_bytes_per_frame": sum(block.ddr_bytes for block in plan.blocks),
        "ddr_gbps_at_design_fps": _r(sum(block.ddr_bytes for block in plan.blocks) * (design_fps or fps) / GB),
        "design_fps": _r(design_fps or fps),
        "by_head_ms": _grouped(plan, lambda block: block.head) | {"host": _r(plan.host_ms)},
        "by_module_ms": _grouped(plan, lambda block: ".".join(block.module.split(".")[:MODULE_DEPTH]) or "(root)"),
        "by_kind_ms": _grouped(plan, lambda block: block.kind.split("+")[0]),
        "by_unit": _by_unit(plan),
        "summary": _vendor_summary(plan, single, fps),
        "memory": _memory(plan),
        "layers": _layers(plan),
        "cpu_blocks": [{"name": b.name, "kind": b.kind, "reason": b.cpu_reason, "ms": _r(b.compute_ms)} for b in plan.blocks if b.unit == "CPU"],
        "bottleneck": bottleneck(plan),
        "suggestions": suggestions(plan),
        "notes": list(plan.notes),
    }


def _r(value: float) -> float:
    return round(value, 6)


def _grouped(plan: Plan, key: Callable[[PlanBlock], str]) -> dict[str, float]:
    """Sum of the makespan's increments by a key of the block."""
    groups: dict[str, float] = {}
    for block, share in zip(plan.blocks, plan.schedule.increments_ms(), strict=True):
        groups[key(block)] = groups.get(key(block), 0.0) + share
    return {name: _r(value) for name, value in sorted(groups.items())}


def _by_unit(plan: Plan) -> dict[str, dict[str, float]]:
    """Busy time of every lane and its share of the makespan."""
    makespan = plan.schedule.makespan_ms or 1.0
    return {lane: {"busy_ms": _r(ms), "utilization": _r(ms / makespan)} for lane, ms in sorted(plan.schedule.busy_ms().items())}


def _vendor_summary(plan: Plan, single_ms: float, fps: float) -> dict[str, Any]:
    """The part of the report that has a counterpart in the vendor's hbm_perf JSON."""
    loaded = sum(b.weight_bytes + b.input_bytes for b in plan.blocks) + _stream(plan.blocks) // 2
    stored = sum(b.output_bytes for b in plan.blocks) + _stream(plan.blocks) - _stream(plan.blocks) // 2
    memory = plan.memory
    return {
        "performance": {"FPS": _r(fps), "latency (ms)": _r(single_ms), "latency (us)": _r(single_ms * 1e3)},
        "DDR access data": {
            "megabytes per run": _r((loaded + stored) / 1e6),
            "loaded bytes": loaded,
            "stored bytes": stored,
            "input memory bytes": memory.input_bytes,
            "output memory bytes": memory.output_bytes,
            "static memory bytes": memory.static_bytes,
            "dynamic memory bytes": memory.temporary.peak_bytes,
        },
    }


def _stream(blocks: Iterable[PlanBlock]) -> int:
    return sum(block.stream_bytes for block in blocks)


def _memory(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    arenas = {
        name: {
            "peak_bytes": arena.peak_bytes,
            "lower_bound_bytes": arena.lower_bound_bytes,
            "first_fit_bytes": arena.first_fit_bytes,
            "buffers": len(arena.buffers),
        }
        for name, arena in (("temporary", memory.temporary), ("onchip", memory.onchip))
    }
    total = memory.input_bytes + memory.output_bytes + memory.static_bytes + memory.temporary.peak_bytes
    sizes = {"input_bytes": memory.input_bytes, "output_bytes": memory.output_bytes, "static_bytes": memory.static_bytes}
    return sizes | {"total_ddr_bytes": total, "onchip_capacity_bytes": memory.onchip_capacity_bytes} | arenas


def bound_by(block: PlanBlock) -> str:
    """What most of the block's time goes into: its busiest unit, DDR, launch."""
    times = {"launch": block.launch_ms, "DDR": block.load_ms + block.store_ms + max(block.stream_ms - block.compute_ms, 0.0)}
    for unit, ms in block.units:
        times[unit] = times.get(unit, 0.0) + ms
    return max(times, key=lambda name: (times[name], name))


def _layers(plan: Plan) -> list[dict[str, Any]]:
    """One row per block in execution order."""
    makespan = plan.schedule.makespan_ms or 1.0
    rows = []
    for block, share in zip(plan.blocks, plan.schedule.increments_ms(), strict=True):
        rows.append(
            {
                "layer": block.name,
                "module": block.module,
                "head": block.head,
                "op": block.kind,
                "unit": block.unit,
                "input_shape": block.input_shape,
                "output_shape": block.output_shape,
                "dtype": block.dtype,
                "ms": _r(share),
                "percent": _r(100 * share / makespan),
                "computing cost (no DDR)": _r(block.compute_ms),
                "load cost": _r(block.load_ms),
                "stream cost": _r(block.stream_ms),
                "store cost": _r(block.store_ms),
                "launch cost": _r(block.launch_ms),
                "bound_by": bound_by(block),
                "macs": block.macs,
                "padding_waste": block.padding_waste,
                "weight_bytes": block.weight_bytes,
                "ddr_bytes": block.ddr_bytes,
                "onchip_bytes": block.onchip_bytes,
                "origin ops": list(block.sources),
            }
        )
    return rows


def bottleneck(plan: Plan) -> str:
    """One sentence: what limits the frame rate."""
    shares: dict[str, float] = {"host": plan.host_ms}
    for block, share in zip(plan.blocks, plan.schedule.increments_ms(), strict=True):
        shares[bound_by(block)] = shares.get(bound_by(block), 0.0) + share
    names = {
        "DDR": "blocks limited by the DDR bus",
        "launch": "blocks too small to pay for their launch",
        "host": "the host's submit overhead",
        "CPU": "operators on the CPU",
    }
    name = max(shares, key=lambda key: (shares[key], key))
    return f"{names.get(name, f'blocks limited by the {name}')} take {100 * shares[name] / sum(shares.values()):.0f} % of the simulated latency"


def suggestions(plan: Plan) -> list[dict[str, Any]]:
    """The changes that would save most, largest first: padding of channels, CPU fallbacks, DDR round trips, int16 on the TAE."""
    found = [entry for block in plan.blocks for entry in _suggestions(block)]
    found.sort(key=lambda entry: (-entry["saves_ms"], entry["layer"]))
    return found[:PAYING_CHANGES]


def _suggestions(block: PlanBlock) -> Sequence[dict[str, Any]]:
    entries = []
    tae = sum(ms for unit, ms in block.units if unit == "TAE")
    if block.padding_waste > 0.1:
        shapes = f"input {block.input_shape}, output {block.output_shape}"
        text = f"{block.padding_waste:.0%} of the multiply work is padding ({shapes}): use channel counts that fill the array"
        entries.append((tae * block.padding_waste, text))
    if block.dtype == "int16" and tae:
        entries.append((tae / 2, f"{block.kind} runs in int16; int8 would at least halve its multiply time"))
    if block.unit == "CPU":
        entries.append((block.compute_ms + block.launch_ms, f"{block.kind} runs on the CPU ({block.cpu_reason})"))
    if block.stream_ms > block.compute_ms:
        entries.append(
            (
                block.stream_ms - block.compute_ms,
                f"{block.kind} waits for {block.stream_bytes / 1e6:.1f} MB that do not fit on chip; smaller tensors would stay there",
            )
        )
    return [{"layer": block.name, "saves_ms": _r(ms), "change": text} for ms, text in entries]


def compare(current: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What differs between two profile documents: totals, heads, and the layers whose time changed most (current minus other, ms)."""
    here, there = ({row["layer"]: row["ms"] for row in doc["layers"]} for doc in (current, other))
    changes = [
        {"layer": name, "ms": _r(here.get(name, 0.0) - there.get(name, 0.0)), "only_in": _only_in(name, here, there)}
        for name in sorted(here.keys() | there.keys())
    ]
    changes = [entry for entry in changes if entry["ms"] != 0.0 or entry["only_in"]]
    heads = sorted(current["by_head_ms"].keys() | other["by_head_ms"].keys())
    return {
        "simulated": True,
        "latency_ms": _r(current["latency_ms"] - other["latency_ms"]),
        "ddr_bytes_per_frame": current["ddr_bytes_per_frame"] - other["ddr_bytes_per_frame"],
        "profile_hashes": [current["profile_hash"], other["profile_hash"]],
        "by_head_ms": {head: _r(current["by_head_ms"].get(head, 0.0) - other["by_head_ms"].get(head, 0.0)) for head in heads},
        "layers": sorted(changes, key=lambda entry: (-abs(entry["ms"]), entry["layer"])),
    }


def _only_in(name: str, here: dict[str, float], there: dict[str, float]) -> str:
    if name in here and name in there:
        return ""
    return "current" if name in here else "other"
