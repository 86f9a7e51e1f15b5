"""Schedule: when each unit and the memory bus work for each block, and the makespan.

Blocks are issued in order. With `prefetch` 0 a block starts when the one before has finished, and inside it the units work beside each other on
successive rows, and the spilled activations stream on the bus beside them (double buffers); this is what the measured latencies show
(docs/j6-model.md). With `prefetch` n the weights of n blocks are fetched ahead, and independent blocks overlap on different units. The bus serves
transfers in a fixed order, so every start is a maximum of sums of durations: shortening any duration never makes the schedule longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeline.j6.cost import CONVERTER, BlockCost

BUS_LANES = ("LOAD", "STREAM", "STORE")


@dataclass(frozen=True)
class Task:
    """Work of one block on one lane. Lanes: APM (launch), the units, CPU, and LOAD, STREAM, STORE, which share the bus. Times in ms."""

    block: int
    lane: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Schedule:
    """Tasks in issue order and the end of every block, ms from the start of the first block."""

    tasks: tuple[Task, ...]
    finish_ms: tuple[float, ...]

    @cached_property
    def makespan_ms(self) -> float:
        """End of the last task."""
        return max((task.end_ms for task in self.tasks), default=0.0)

    def busy_ms(self) -> dict[str, float]:
        """Lane -> total time it works."""
        busy: dict[str, float] = {}
        for task in self.tasks:
            busy[task.lane] = busy.get(task.lane, 0.0) + task.end_ms - task.start_ms
        return busy

    def increments_ms(self) -> tuple[float, ...]:
        """Share of the makespan that each block adds, in order; sums to the makespan."""
        result, latest = [], 0.0
        for end in self.finish_ms:
            result.append(max(end - latest, 0.0))
            latest = max(latest, end)
        return tuple(result)


class _Lanes:
    """Time at which each lane is free again."""

    def __init__(self) -> None:
        self.free: dict[str, float] = {}
        self.tasks: list[Task] = []

    def run(self, block: int, lane: str, ready_ms: float, duration_ms: float) -> float:
        """Append a task as early as lane and data allow; returns its end. Nothing is recorded for an empty one."""
        resource = "BUS" if lane in BUS_LANES else lane
        start = max(ready_ms, self.free.get(resource, 0.0))
        if duration_ms <= 0.0:
            return ready_ms
        self.free[resource] = start + duration_ms
        self.tasks.append(Task(block, lane, start, start + duration_ms))
        return start + duration_ms


def schedule(costs: Sequence[BlockCost], producers: Sequence[Sequence[int]], prefetch: int = 0, resubmit_ms: float = 0.0) -> Schedule:
    """Place the tasks of all blocks.

    `producers[i]` are the blocks whose results block i reads (all smaller than i). `resubmit_ms` is the host's cost of handing work back to the
    BPU after a block on the CPU.
    """
    lanes = _Lanes()
    finish: list[float] = []
    loaded = [0.0] * len(costs)
    next_load = 0
    for index, cost in enumerate(costs):
        previous = finish[-1] if finish else 0.0
        while next_load < len(costs) and next_load <= index + prefetch:
            gate = finish[next_load - prefetch - 1] if next_load > prefetch else 0.0
            launch = lanes.run(next_load, "CPU" if _on_cpu(costs[next_load]) else "APM", gate, _launch_ms(costs, next_load, resubmit_ms))
            loaded[next_load] = lanes.run(next_load, "LOAD", launch, costs[next_load].load_ms)
            next_load += 1
        ready = max([loaded[index], *(finish[p] for p in producers[index]), *([previous] if prefetch == 0 else [])])
        finish.append(_run_block(lanes, index, cost, ready))
    return Schedule(tuple(lanes.tasks), tuple(finish))


def _on_cpu(cost: BlockCost) -> bool:
    return cost.units[0][0] == "CPU"


def _launch_ms(costs: Sequence[BlockCost], index: int, resubmit_ms: float) -> float:
    back_on_bpu = index > 0 and _on_cpu(costs[index - 1]) and not _on_cpu(costs[index])
    return costs[index].launch_ms + (resubmit_ms if back_on_bpu else 0.0)


def _run_block(lanes: _Lanes, index: int, cost: BlockCost, ready_ms: float) -> float:
    """Conversions, then the units beside each other, with the streamed traffic beside all of them, then the store; returns the end of the block."""
    units = dict(cost.units)
    converted = lanes.run(index, CONVERTER, ready_ms, units.pop(CONVERTER, 0.0))
    ends = [converted, *(lanes.run(index, unit, converted, duration) for unit, duration in units.items())]
    streamed = lanes.run(index, "STREAM", ready_ms, cost.stream_ms)
    return lanes.run(index, "STORE", max([*ends, streamed]), cost.store_ms)


def critical_path_ms(costs: Sequence[BlockCost], producers: Sequence[Sequence[int]]) -> float:
    """Longest chain of dependent blocks without any wait for a lane, ms: a lower bound of every schedule."""
    ends: list[float] = []
    for index, cost in enumerate(costs):
        start = max((ends[p] for p in producers[index]), default=0.0)
        work = max(cost.compute_ms, cost.stream_ms) + cost.store_ms
        ends.append(max(start + work, cost.launch_ms + cost.load_ms + work))
    return max(ends, default=0.0)
