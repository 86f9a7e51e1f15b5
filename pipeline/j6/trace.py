"""The schedule as a Chrome/Perfetto trace (open it in ui.perfetto.dev): one track per lane, one slice per task."""

from __future__ import annotations

from typing import Any

from pipeline.j6.plan import Plan

PROCESS = 1


def trace_document(plan: Plan) -> dict[str, Any]:
    """Trace Event Format document; time stamps and durations in us from the start of the first block."""
    lanes = sorted({task.lane for task in plan.schedule.tasks})
    title = f"{plan.model['name']} on {plan.chip['name']} (simulated, profile {plan.profile_hash[:12]})"
    events: list[dict[str, Any]] = [{"ph": "M", "pid": PROCESS, "tid": 0, "name": "process_name", "args": {"name": title}}]
    events += [{"ph": "M", "pid": PROCESS, "tid": 1 + number, "name": "thread_name", "args": {"name": lane}} for number, lane in enumerate(lanes)]
    for task in plan.schedule.tasks:
        block = plan.blocks[task.block]
        events.append(
            {
                "ph": "X",
                "pid": PROCESS,
                "tid": 1 + lanes.index(task.lane),
                "name": block.name,
                "cat": block.head,
                "ts": round(task.start_ms * 1e3, 6),
                "dur": round((task.end_ms - task.start_ms) * 1e3, 6),
                "args": {
                    "kind": block.kind,
                    "module": block.module,
                    "output": block.output_shape,
                    "ddr_bytes": block.ddr_bytes,
                    "segment": block.segment,
                },
            }
        )
    metadata = {"simulated": True, "profile_hash": plan.profile_hash, "chip": plan.chip["name"], "model_hash": plan.model["hash"]}
    return {"displayTimeUnit": "ns", "metadata": metadata, "traceEvents": events}
