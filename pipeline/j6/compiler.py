"""The compiler: ONNX file -> fused graph -> units -> tiling -> cost -> schedule -> memory, as one plan.

Modes and levels carry hb_compile's names. `optimize_level`: O0 keeps one block an operator and no chains, O1 fuses, O2 also tiles chains of blocks.
`compile_mode` chooses among the tilings of a level: latency takes the quickest, bandwidth the one that moves the fewest DDR bytes, balance weighs
both relative to their best by `balance_factor` (0 = bytes only, 100 = time only). `max_time_per_fc_us` cuts the plan into segments of at most that
time, so that another model gets its turn in between. What the vendor's compiler does under these names is not published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.errors import ChipError, ConfigError
from pipeline.j6.assign import Assignment, assign
from pipeline.j6.chip import ChipProfile
from pipeline.j6.cost import BlockCost, Rates, block_cost, channel_waste, compute_of, rates_of, shape_text
from pipeline.j6.fuse import Block, FusedGraph, fuse
from pipeline.j6.graph import import_onnx
from pipeline.j6.heads import head_names
from pipeline.j6.ir import MATRIX_KINDS
from pipeline.j6.memory import Buffer, plan_arena
from pipeline.j6.plan import NO_CHAIN, MemoryPlan, Plan, PlanBlock, PlanChain, Segment
from pipeline.j6.schedule import Schedule, Task, schedule
from pipeline.j6.tile import TileOptions, TilePlan, input_bytes, is_image, onchip_capacity, output_bytes, tensor_bytes, tile

TIME_DIGITS = 9  # ms; below a picosecond nothing is meant
MODES = ("latency", "bandwidth", "balance")
CHAIN_SHARES = {"O0": (0.0,), "O1": (0.0,), "O2": (0.5, 0.0)}  # tilings to try: share of on-chip memory that a chain may claim (assumed)
SEGMENT_LIMITS_US = (1000.0, 10_000_000.0)  # range of max_time_per_fc in hb_compile
SEGMENT_ROUNDS = 6  # a cut costs traffic, which can push a segment over its limit again
SEGMENT_SLACK = 0.7  # a segment may end anywhere in its last 30 % to cut where little is alive


@dataclass(frozen=True)
class CompileOptions:
    """Choices of one compilation. `heads`: head name -> prefixes of module paths, node names or tensor names."""

    assume_dtype: str = "int8"
    compile_mode: str = "latency"
    balance_factor: int = 50
    optimize_level: str = "O2"
    core_num: int = 1
    max_time_per_fc_us: float = 0.0
    max_l2m_bytes: int | None = None
    nv12: bool = True
    prefetch: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def check(self) -> None:
        """Raises `ConfigError` naming the option, the value and the rule."""
        low, high = SEGMENT_LIMITS_US
        rules = (
            ("compile_mode", self.compile_mode in MODES, f"one of {', '.join(MODES)}"),
            ("balance_factor", 0 <= self.balance_factor <= 100, "0..100"),
            ("optimize_level", self.optimize_level in CHAIN_SHARES, f"one of {', '.join(CHAIN_SHARES)}"),
            ("max_time_per_fc", self.max_time_per_fc_us == 0 or low <= self.max_time_per_fc_us <= high, f"0, or {low:.0f}..{high:.0f} us"),
            ("max_l2m_bytes", self.max_l2m_bytes is None or self.max_l2m_bytes >= 0, ">= 0"),
            ("prefetch", self.prefetch >= 0, ">= 0"),
        )
        values = {"max_time_per_fc": self.max_time_per_fc_us}
        for name, valid, rule in rules:
            if not valid:
                raise ConfigError(f"option {name} is {values.get(name, getattr(self, name, None))!r}; rule: {rule}")


@dataclass(frozen=True)
class Variant:
    """One tiling with its costs and schedule."""

    tiles: TilePlan
    costs: list[BlockCost]
    schedule: Schedule

    @property
    def ddr_bytes(self) -> int:
        """Bytes that cross the bus in a frame."""
        return sum(cost.ddr_bytes for cost in self.costs)

    @property
    def ms(self) -> float:
        """Makespan on the BPU."""
        return self.schedule.makespan_ms


class Compilation:
    """What all variants of one compilation share."""

    def __init__(self, fused: FusedGraph, chip: ChipProfile, options: CompileOptions) -> None:
        options.check()
        if options.assume_dtype == "float16" and not chip.flag("float_units"):
            raise ChipError(f"chip {chip.name}: no float units; assume_dtype must be int8 or int16")
        self.fused, self.chip, self.options = fused, chip, options
        self.rates = rates_of(chip, options.core_num)
        self.assignments = [assign(block, fused.tensors, chip) for block in fused.blocks]
        self.computes = [compute_of(b, a, fused.tensors, self.rates) for b, a in zip(fused.blocks, self.assignments, strict=True)]
        self.producers = block_producers(fused)

    def variant(self, chain_share: float, cuts: frozenset[int] = frozenset()) -> Variant:
        """Tile, cost and schedule with one share of memory for chains and given segment cuts."""
        options = self.options
        tiles = tile(self.fused, self.chip, TileOptions(chain_share, cuts, options.core_num, options.max_l2m_bytes, options.nv12))
        costs = [block_cost(compute, traffic, self.rates) for compute, traffic in zip(self.computes, tiles.traffic, strict=True)]
        for index in cuts:
            costs[index] = replace(costs[index], launch_ms=costs[index].launch_ms + self.rates.segment_ms)
        return Variant(tiles, costs, schedule(costs, self.producers, options.prefetch, self.rates.host_ms))

    def best(self, cuts: frozenset[int] = frozenset()) -> Variant:
        """The variant that the compile mode wants."""
        first, *others = CHAIN_SHARES[self.options.optimize_level]
        variants = [self.variant(first, cuts)]
        if variants[0].tiles.chains:
            variants += [self.variant(other, cuts) for other in others]
        return min(variants, key=lambda variant: self._objective(variant, variants))

    def _objective(self, variant: Variant, variants: Sequence[Variant]) -> tuple[float, float]:
        if self.options.compile_mode == "latency":
            return variant.ms, variant.ddr_bytes
        if self.options.compile_mode == "bandwidth":
            return variant.ddr_bytes, variant.ms
        time_share = self.options.balance_factor / 100
        relative_ms = variant.ms / max(min(v.ms for v in variants), 1e-12)
        relative_bytes = variant.ddr_bytes / max(min(v.ddr_bytes for v in variants), 1)
        return time_share * relative_ms + (1 - time_share) * relative_bytes, variant.ms

    def segmented(self) -> tuple[Variant, list[int]]:
        """(variant, cuts) with every segment of more than one block within `max_time_per_fc_us`."""
        chosen, limit_ms = self.best(), self.options.max_time_per_fc_us / 1e3
        cuts: list[int] = []
        target = limit_ms
        for _ in range(SEGMENT_ROUNDS if limit_ms else 0):
            cuts = cut_points(chosen.schedule.increments_ms(), _crossing_bytes(chosen.tiles, len(self.fused.blocks), self.fused), target)
            chosen = self.best(frozenset(cuts))
            over = [s.ms for s in segments_of(chosen.schedule, cuts) if s.ms > limit_ms and s.first < s.last]
            if not over:
                break
            target *= 0.98 * limit_ms / max(over)
        return chosen, cuts


def compile_model(path: Path, chip: ChipProfile, options: CompileOptions | None = None) -> Plan:
    """Compile an ONNX file for `chip`. Raises `ModelError` for a bad model, `ChipError` for a missing number, `ConfigError` for an option."""
    choices = options or CompileOptions()
    choices.check()
    graph = import_onnx(path, choices.shapes, choices.assume_dtype)
    return compile_graph(fuse(graph, enable=choices.optimize_level != "O0"), chip, choices)


def compile_graph(fused: FusedGraph, chip: ChipProfile, options: CompileOptions) -> Plan:
    """The passes after fusion: assign, tile, cost, schedule, memory."""
    work = Compilation(fused, chip, options)
    chosen, cuts = work.segmented()
    segments = segments_of(chosen.schedule, cuts)
    rates, memory = work.rates, _memory(fused, chosen.tiles, chip, options)
    return Plan(
        model={"name": fused.graph.name, "hash": fused.graph.model_hash, "opset": fused.graph.opset, "quantized": fused.graph.quantized},
        chip=_chip_facts(chip),
        options={key: getattr(options, key) for key in OPTION_KEYS},
        host_ms=_ms(rates.host_ms + memory.output_bytes * rates.host_byte_ms),
        resubmit_ms=_ms(rates.host_ms),
        contention_ms=rates.contention_ms,
        blocks=_plan_blocks(work, chosen, segments),
        chains=tuple(PlanChain(c.kind, c.blocks, c.tensors, c.pieces, c.halo_bytes, c.weight_passes, c.workspace_bytes) for c in chosen.tiles.chains),
        segments=tuple(segments),
        memory=memory,
        schedule=_rounded(chosen.schedule),
        notes=(*fused.graph.notes, *_notes(fused, options, segments)),
    )


OPTION_KEYS = (
    "assume_dtype", "compile_mode", "balance_factor", "optimize_level", "core_num", "max_time_per_fc_us", "max_l2m_bytes", "nv12", "prefetch",
)  # fmt: skip
CHIP_NUMBERS = ("peak_tops_int8", "ddr_peak_gbps", "ddr_efficiency", "channel_align", "head_dim_align", "tae_input_lanes", "tae_output_lanes")


def _chip_facts(chip: ChipProfile) -> dict[str, Any]:
    names = {"name": chip.name, "march": chip.march, "profile_hash": chip.hash, "cores": int(chip.number("cores"))}
    return names | {key: chip.number(key) for key in CHIP_NUMBERS}


def block_producers(fused: FusedGraph) -> list[tuple[int, ...]]:
    """For each block the indices of the blocks whose outputs it reads."""
    writer = {name: block.index for block in fused.blocks for name in block.outputs}
    return [tuple(sorted({writer[name] for name in block.inputs if name in writer})) for block in fused.blocks]


def cut_points(increments_ms: Sequence[float], crossing_bytes: Sequence[int], limit_ms: float) -> list[int]:
    """Blocks that begin a new segment: each segment takes at most `limit_ms` (a longer single block stays alone).

    `crossing_bytes[i]` is what lives across a cut before block i; within the last part of a segment the cheapest place is taken.
    """
    cuts, start, spent = [], 0, 0.0
    ends: list[float] = []  # time of the segment up to and including each of its blocks
    index = 0
    while index < len(increments_ms):
        spent += increments_ms[index]
        if spent <= limit_ms or index == start:
            ends.append(spent)
            index += 1
            continue
        options = [start + 1 + i for i, end in enumerate(ends) if end >= SEGMENT_SLACK * limit_ms] or [index]
        start = min(options, key=lambda cut: (crossing_bytes[cut], -cut))
        cuts.append(start)
        index, spent, ends = start, 0.0, []
    return cuts


def _crossing_bytes(tiles: TilePlan, blocks: int, fused: FusedGraph) -> list[int]:
    """For each block the bytes of activations written before it and read by it or later."""
    change = [0] * (blocks + 2)
    for name, life in tiles.lives.items():
        if life.start >= 0 and tiles.placement[name] not in ("input", "output"):
            change[life.start + 1] += fused.tensors[name].bytes
            change[life.end + 1] -= fused.tensors[name].bytes
    levels, level = [], 0
    for step in change:
        level += step
        levels.append(level)
    return levels


def segments_of(result: Schedule, cuts: Sequence[int]) -> list[Segment]:
    """The segments between cuts and their share of the makespan."""
    shares = result.increments_ms()
    starts = [0, *cuts]
    ends = [cut - 1 for cut in cuts] + [len(shares) - 1]
    return [Segment(first, last, _ms(sum(shares[first : last + 1]))) for first, last in zip(starts, ends, strict=True)]


def _notes(fused: FusedGraph, options: CompileOptions, segments: Sequence[Segment]) -> list[str]:
    """Assumptions of this compilation that a reader must know."""
    images = [name for name in fused.inputs if options.nv12 and is_image(fused.tensors[name])]
    notes = [f"input {name!r} is counted as NV12 (1.5 B a pixel)" for name in images]
    assumed = [name for block in fused.blocks for name in block.outputs if name in fused.graph.assumed]
    if not fused.graph.quantized:
        notes.append(f"the model carries no quantizers; every activation is taken as {options.assume_dtype}")
    elif assumed:
        notes.append(f"{len(assumed)} block outputs carry no quantizer and are taken as {options.assume_dtype}, the first is {assumed[0]!r}")
    limit_ms = options.max_time_per_fc_us / 1e3
    over = [fused.blocks[s.first].name for s in segments if limit_ms and s.ms > limit_ms]
    if over:
        notes.append(f"{len(over)} segments exceed max_time_per_fc and cannot be cut further, the first at {over[0]!r}")
    return notes


def _plan_blocks(work: Compilation, chosen: Variant, segments: Sequence[Segment]) -> tuple[PlanBlock, ...]:
    chain_of = {index: number for number, chain in enumerate(chosen.tiles.chains) for index in chain.blocks}
    segment_of = {index: number for number, segment in enumerate(segments) for index in range(segment.first, segment.last + 1)}
    heads = head_names(work.fused, work.options.heads)
    rows = zip(work.fused.blocks, work.assignments, chosen.costs, chosen.tiles.onchip_bytes, work.producers, strict=True)
    return tuple(
        replace(
            _plan_block(work.fused, block, assignment, cost, work.rates),
            head=heads[block.index],
            onchip_bytes=onchip,
            chain=chain_of.get(block.index, NO_CHAIN),
            segment=segment_of[block.index],
            producers=producers,
        )
        for block, assignment, cost, onchip, producers in rows
    )


def _plan_block(fused: FusedGraph, block: Block, assignment: Assignment, cost: BlockCost, rates: Rates) -> PlanBlock:
    tensors, anchor = fused.tensors, block.anchor
    first = tensors[anchor.inputs[0]] if anchor.inputs else tensors[block.outputs[0]]
    matrix = anchor.kind in MATRIX_KINDS
    return PlanBlock(
        index=block.index,
        name=block.name,
        kind="+".join(op.kind for op in block.ops),
        module=block.module,
        head="",
        unit=assignment.unit,
        cpu_reason=assignment.reason,
        sources=tuple(name for op in block.ops for name in op.sources),
        input_shape=shape_text(first.shape if anchor.inputs else ()),
        output_shape=shape_text(tensors[block.outputs[0]].shape),
        dtype=first.dtype,
        weight_dtype=tensors[anchor.weights[0]].dtype if matrix and anchor.weights else "",
        output_dtype=tensors[block.outputs[0]].dtype,
        macs=cost.macs,
        padded_macs=cost.padded_macs,
        padding_waste=round(channel_waste(anchor, tensors, rates), 4) if matrix else 0.0,
        cores=cost.cores,
        launch_ms=_ms(cost.launch_ms),
        load_ms=_ms(cost.load_ms),
        units=tuple((unit, _ms(ms)) for unit, ms in cost.units),
        stream_ms=_ms(cost.stream_ms),
        store_ms=_ms(cost.store_ms),
        weight_bytes=cost.weight_bytes,
        input_bytes=cost.input_bytes,
        output_bytes=cost.output_bytes,
        stream_in_bytes=cost.stream_in_bytes,
        stream_out_bytes=cost.stream_out_bytes,
        onchip_bytes=0,
        chain=NO_CHAIN,
        segment=0,
        producers=(),
    )


def _ms(value: float) -> float:
    return round(value, TIME_DIGITS)


def _rounded(result: Schedule) -> Schedule:
    tasks = tuple(Task(task.block, task.lane, _ms(task.start_ms), _ms(task.end_ms)) for task in result.tasks)
    return Schedule(tasks, tuple(_ms(end) for end in result.finish_ms))


def _memory(fused: FusedGraph, tiles: TilePlan, chip: ChipProfile, options: CompileOptions) -> MemoryPlan:
    channels = int(chip.number("channel_align"))
    spilled = [name for name, place in tiles.placement.items() if place == "ddr"]
    buffers = [Buffer(n, tensor_bytes(fused.tensors[n], channels), max(tiles.lives[n].start, 0), tiles.lives[n].end) for n in spilled]
    weights = {name for block in fused.blocks for name in block.weights}
    return MemoryPlan(
        input_bytes=sum(input_bytes(fused.tensors[name], chip, options.nv12) for name in fused.inputs),
        output_bytes=sum(output_bytes(fused, fused.tensors[name], chip) for name in fused.outputs),
        static_bytes=sum(fused.tensors[name].bytes for name in weights),
        temporary=plan_arena(buffers, int(chip.number("min_alloc"))),
        onchip=tiles.onchip,
        onchip_capacity_bytes=onchip_capacity(chip, options.core_num, options.max_l2m_bytes),
    )
