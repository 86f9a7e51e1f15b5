"""Figures of a plan: latency, frame rate, where the time goes, DDR traffic, memory, and what would pay most to change.

Everything here is simulated. Field names follow the vendor's static performance report where it has them (`summary`, `layer details`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from pipeline.j6.conditions import Outcome, Scenario, simulate
from pipeline.j6.plan import SCHEMA_VERSION, Plan, PlanBlock
from pipeline.j6.schedule import BUS_LANES
from pipeline.j6.suggest import bottleneck, bound_by, findings_in_words, suggestions

MODULE_DEPTH = 2
INTERVALS = 20
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


def fps_all_cores(plan: Plan) -> float:
    """Frames/s with every core of the chip busy on frames of its own: as many as the cores run, and the bus can feed."""
    teams = plan.chip["cores"] // plan.options["core_num"]
    bus_ms = sum(ms for lane, ms in plan.schedule.busy_ms().items() if lane in BUS_LANES)
    return min(teams * 2e3 / latency_ms(plan, 2), 1e3 / bus_ms if bus_ms and teams > 1 else float("inf"))


def profile(plan: Plan, scenario: Scenario | None = None, design_fps: float | None = None) -> dict[str, Any]:
    """The profile document (see docs/j6-model.md for every field)."""
    conditions = scenario or Scenario()
    single, double = latency_ms(plan), latency_ms(plan, 2)
    fps = 1e3 / single
    ddr_bytes = sum(block.ddr_bytes for block in plan.blocks)
    return {
        "simulated": True,
        "chip": plan.chip["name"],
        "march": plan.chip["march"],
        "profile_hash": plan.profile_hash,
        "plan_schema": SCHEMA_VERSION,
        "model": plan.model,
        "options": plan.options,
        "latency_ms": _r(single),
        "fps": _r(fps),
        "latency_two_in_flight_ms": _r(double),
        "fps_two_in_flight": _r(2e3 / double),
        "fps_all_cores": _r(fps_all_cores(plan)),
        "bpu_ms": _r(plan.schedule.makespan_ms),
        "host_ms": _r(plan.host_ms),
        "conditions": _conditions(conditions, simulate(plan, conditions)),
        "ddr_bytes_per_frame": ddr_bytes,
        "ddr_gbps_at_design_fps": _r(ddr_bytes * (design_fps or fps) / GB),
        "design_fps": _r(design_fps or fps),
        "by_head_ms": _grouped(plan, lambda block: block.head) | {"host": _r(plan.host_ms)},
        "by_module_ms": _grouped(plan, lambda block: ".".join(block.module.split(".")[:MODULE_DEPTH]) or "(root)"),
        "by_kind_ms": _grouped(plan, lambda block: block.kind.split("+")[0]),
        "by_op_ms": _grouped(plan, lambda block: block.kind),
        "by_unit": _by_unit(plan),
        "utilization": _utilization(plan),
        "roofline": _roofline(plan),
        "summary": _vendor_summary(plan, single, fps),
        "memory": _memory(plan),
        "layers": _layers(plan),
        "cpu_blocks": [{"name": b.name, "kind": b.kind, "reason": b.cpu_reason, "ms": _r(b.compute_ms)} for b in plan.blocks if b.unit == "CPU"],
        "chains": [_chain(plan, index) for index in range(len(plan.chains))],
        "bottleneck": bottleneck(plan),
        "findings": findings_in_words(plan),
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


def _conditions(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """The scenario, the distribution of latency under it, and what its rules did."""
    steps = [
        {key: value for key, value in asdict(step).items() if value is not None} | ({} if result is None else _rounded(asdict(result)))
        for step, result in outcome.by_step
    ]
    head = {"scenario": scenario.name, "source": scenario.source, "seed": scenario.seed, "frames": outcome.frames}
    counts = {"dropped_frames": outcome.dropped, "held_frames": outcome.held, "rule_frames": outcome.rule_frames}
    return head | _rounded(asdict(outcome.overall)) | counts | ({"steps": steps} if scenario.steps else {})


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {key: _r(value) for key, value in values.items()}


def _utilization(plan: Plan) -> dict[str, float]:
    """Share of the nominal limits: multiply rate of the cores in use, and DDR bytes over the makespan."""
    makespan = plan.schedule.makespan_ms or 1.0
    peak_tops, gbps = _limits(plan)
    operations, moved = (2 * sum(b.macs for b in plan.blocks), sum(b.ddr_bytes for b in plan.blocks))
    return {
        "tops": _r(operations / makespan / 1e9),
        "of_peak_tops": _r(operations / makespan / 1e9 / peak_tops),
        "of_ddr": _r(moved / makespan / 1e6 / gbps),
    }


def _limits(plan: Plan) -> tuple[float, float]:
    """(nominal TOPS of the cores in use, sustained DDR GB/s)."""
    tops = plan.chip["peak_tops_int8"] / plan.chip["cores"] * plan.options["core_num"]
    return tops, plan.chip["ddr_peak_gbps"] * plan.chip["ddr_efficiency"]


def _roofline(plan: Plan) -> dict[str, float]:
    """The two roofs and where they meet; every layer carries its own point."""
    tops, gbps = _limits(plan)
    return {"peak_tops": _r(tops), "ddr_gbps": _r(gbps), "ridge_ops_per_byte": _r(1e3 * tops / gbps)}


def _chain(plan: Plan, index: int) -> dict[str, Any]:
    chain = plan.chains[index]
    names = {"first": plan.blocks[chain.blocks[0]].name, "last": plan.blocks[chain.blocks[-1]].name, "blocks": len(chain.blocks)}
    sizes = {"halo_bytes": chain.halo_bytes, "workspace_bytes": chain.workspace_bytes, "weight_passes": chain.weight_passes}
    return names | {"kind": chain.kind, "pieces": chain.pieces} | sizes


def _vendor_summary(plan: Plan, single_ms: float, fps: float) -> dict[str, Any]:
    """The part of the report that has a counterpart in the vendor's hbm_perf JSON."""
    loaded, stored = (sum(getattr(block, f"{way}_bytes") for block in plan.blocks) for way in ("loaded", "stored"))
    memory = plan.memory
    segments = [{"segment": i, "latency (us)": _r(s.ms * 1e3), "blocks": s.last - s.first + 1} for i, s in enumerate(plan.segments)]
    return {
        "performance": {"FPS": _r(fps), "latency (ms)": _r(single_ms), "latency (us)": _r(single_ms * 1e3), "by segment": segments},
        "DDR access data": {
            "megabytes per run": _r((loaded + stored) / 1e6),
            "loaded bytes": loaded,
            "stored bytes": stored,
            "input memory bytes": memory.input_bytes,
            "output memory bytes": memory.output_bytes,
            "static memory bytes": memory.static_bytes,
            "dynamic memory bytes": memory.temporary.peak_bytes,
        },
        "interval info": _intervals(plan),
    }


def _intervals(plan: Plan) -> list[dict[str, Any]]:
    """Equal parts of the makespan: share of time that a unit computes, and DDR GB/s loaded and stored."""
    width = plan.schedule.makespan_ms / INTERVALS
    if not width:
        return []
    compute, load, store = ([0.0] * INTERVALS for _ in range(3))
    for task in plan.schedule.tasks:
        block, length = plan.blocks[task.block], task.end_ms - task.start_ms
        for index in range(int(task.start_ms / width), min(int(task.end_ms / width), INTERVALS - 1) + 1):
            part = max(min(task.end_ms, (index + 1) * width) - max(task.start_ms, index * width), 0.0)
            if task.lane == "LOAD":
                load[index] += (block.weight_bytes + block.input_bytes) * part / length
            elif task.lane == "STREAM":
                load[index] += block.stream_in_bytes * part / length
                store[index] += block.stream_out_bytes * part / length
            elif task.lane == "STORE":
                store[index] += block.output_bytes * part / length
            elif task.lane != "APM":
                compute[index] += part
    return [
        {
            "number": index,
            "time (us)": _r(width * 1e3),
            "computing unit utilization": _r(compute[index] / width),
            "ddr loading bandwidth (GB/s)": _r(load[index] / width / 1e6),
            "ddr storing bandwidth (GB/s)": _r(store[index] / width / 1e6),
        }
        for index in range(INTERVALS)
    ]


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


def _layers(plan: Plan) -> list[dict[str, Any]]:
    """One row per block in execution order."""
    starts = [0.0, *plan.schedule.finish_ms[:-1]]
    return [_layer(plan, block, share, start) for block, share, start in zip(plan.blocks, plan.schedule.increments_ms(), starts, strict=False)]


def _layer(plan: Plan, block: PlanBlock, share_ms: float, start_ms: float) -> dict[str, Any]:
    peak_tops, _ = _limits(plan)
    tops = 2 * block.macs / share_ms / 1e9 if share_ms else 0.0
    where = {"block": block.index, "layer": block.name, "module": block.module, "head": block.head, "op": block.kind, "unit": block.unit}
    what = {"input_shape": block.input_shape, "output_shape": block.output_shape, "dtype": block.dtype, "weight_dtype": block.weight_dtype}
    time = {
        "ms": _r(share_ms),
        "percent": _r(100 * share_ms / (plan.schedule.makespan_ms or 1.0)),
        "active period": [_r(start_ms), _r(start_ms + share_ms)],
        "computing cost (no DDR)": _r(block.compute_ms),
        "load cost": _r(block.load_ms),
        "stream cost": _r(block.stream_ms),
        "store cost": _r(block.store_ms),
        "launch cost": _r(block.launch_ms),
        "bound_by": bound_by(block),
    }
    work = {
        "macs": block.macs,
        "tops": _r(tops),
        "utilization": _r(tops / peak_tops),
        "padding_waste": block.padding_waste,
        "cores": block.cores,
    }
    data = {
        "weight_bytes": block.weight_bytes,
        "loaded_bytes": block.loaded_bytes,
        "stored_bytes": block.stored_bytes,
        "ddr_bytes": block.ddr_bytes,
        "ops_per_ddr_byte": _r(2 * block.macs / block.ddr_bytes) if block.ddr_bytes else None,
        "onchip_bytes": block.onchip_bytes,
        "pieces": plan.chains[block.chain].pieces if block.chain >= 0 else 1,
        "segment": block.segment,
    }
    origin = {"output_dtype": block.output_dtype, "units": _unit_ms(block), "origin ops": list(block.sources)}
    return where | what | time | work | data | origin


def _unit_ms(block: PlanBlock) -> dict[str, float]:
    times: dict[str, float] = {}
    for unit, ms in block.units:
        times[unit] = _r(times.get(unit, 0.0) + ms)
    return times


def layers_csv(document: dict[str, Any]) -> str:
    """The layers of a profile document as CSV, one row a block; the head of every row says which model and chip profile it belongs to."""
    stream = io.StringIO()
    identity = {"model_hash": document["model"]["hash"][:12], "chip": document["chip"], "profile_hash": document["profile_hash"][:12]}
    rows = [identity | row | {"origin ops": " ".join(row["origin ops"])} for row in document["layers"]]
    names = [name for name in rows[0] if name not in ("units", "active period")] if rows else list(identity)
    writer = csv.DictWriter(stream, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def compare(current: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What differs between two profile documents: totals, heads, units, and the layers whose time changed most (current minus other, ms)."""
    here, there = ({row["layer"]: row for row in doc["layers"]} for doc in (current, other))
    changes = [_changed(name, here.get(name), there.get(name)) for name in sorted(here.keys() | there.keys())]
    changes = [entry for entry in changes if entry["ms"] != 0.0 or entry["only_in"] or entry["changed"]]
    return {
        "simulated": True,
        "latency_ms": _r(current["latency_ms"] - other["latency_ms"]),
        "ddr_bytes_per_frame": current["ddr_bytes_per_frame"] - other["ddr_bytes_per_frame"],
        "models": [current["model"]["hash"], other["model"]["hash"]],
        "profile_hashes": [current["profile_hash"], other["profile_hash"]],
        "by_head_ms": _difference(current["by_head_ms"], other["by_head_ms"]),
        "by_unit_ms": _difference(*({name: unit["busy_ms"] for name, unit in doc["by_unit"].items()} for doc in (current, other))),
        "layers": sorted(changes, key=lambda entry: (-abs(entry["ms"]), entry["layer"])),
    }


def _difference(here: dict[str, float], there: dict[str, float]) -> dict[str, float]:
    return {name: _r(here.get(name, 0.0) - there.get(name, 0.0)) for name in sorted(here.keys() | there.keys())}


COMPARED = ("op", "unit", "dtype", "weight_dtype", "output_shape", "ddr_bytes", "pieces", "bound_by")


def _changed(name: str, here: dict[str, Any] | None, there: dict[str, Any] | None) -> dict[str, Any]:
    """One layer of a comparison; `changed` names the properties that differ, as [other, current]."""
    now, before = (row["ms"] if row else 0.0 for row in (here, there))
    differs = {key: [there[key], here[key]] for key in COMPARED if here[key] != there[key]} if here and there else {}
    only_in = "" if here and there else "current" if here else "other"
    return {"layer": name, "ms": _r(now - before), "before_ms": before, "after_ms": now, "only_in": only_in, "changed": differs}
