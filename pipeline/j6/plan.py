"""The compiled plan: what runs where, when, at what cost, and where every byte lives. One versioned, canonical JSON file.

`compile_model` runs the passes; `write_plan`/`read_plan` move the result to and from disk. The same model, chip and options give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError
from pipeline.io import read_json, write_json
from pipeline.j6.assign import Assignment, assign
from pipeline.j6.chip import ChipProfile
from pipeline.j6.cost import BlockCost, Rates, block_cost, channel_waste, rates_of, shape_text
from pipeline.j6.fuse import Block, FusedGraph, fuse
from pipeline.j6.graph import import_onnx
from pipeline.j6.ir import MATRIX_KINDS
from pipeline.j6.memory import Arena, Buffer, Placed, plan_arena
from pipeline.j6.schedule import Schedule, Task, schedule
from pipeline.j6.tile import TilePlan, input_bytes, is_image, output_bytes, tensor_bytes, tile

SCHEMA = "bevj6.plan"
SCHEMA_VERSION = 1
TIME_DIGITS = 9  # ms; below a picosecond nothing is meant


@dataclass(frozen=True)
class CompileOptions:
    """Choices of one compilation. `heads`: head name -> prefixes of module paths, node names or tensor names."""

    assume_dtype: str = "int8"
    optimize_level: str = "O2"
    nv12: bool = True
    prefetch: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    heads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanBlock:
    """One block of the plan: identity, place, work, time (ms) and traffic (bytes)."""

    index: int
    name: str
    kind: str
    module: str
    head: str
    unit: str
    cpu_reason: str
    sources: tuple[str, ...]
    input_shape: str
    output_shape: str
    dtype: str
    macs: int
    padded_macs: int
    padding_waste: float
    launch_ms: float
    load_ms: float
    units: tuple[tuple[str, float], ...]
    stream_ms: float
    store_ms: float
    weight_bytes: int
    input_bytes: int
    output_bytes: int
    stream_bytes: int
    onchip_bytes: int
    producers: tuple[int, ...]

    @property
    def compute_ms(self) -> float:
        """Time on the units without memory traffic."""
        return sum(ms for _, ms in self.units)

    @property
    def ddr_bytes(self) -> int:
        """All bytes that cross the DDR bus."""
        return self.weight_bytes + self.input_bytes + self.output_bytes + self.stream_bytes

    def cost(self, ddr_scale: float = 1.0, compute_scale: float = 1.0) -> BlockCost:
        """The block's cost with DDR times and compute times stretched by the given factors (1 = as planned)."""
        on_chip = self.unit != "CPU"
        units = tuple((unit, ms * (compute_scale if on_chip else 1.0)) for unit, ms in self.units)
        return BlockCost(
            units, self.launch_ms, self.weight_bytes, self.input_bytes, self.output_bytes, self.stream_bytes,
            self.load_ms * ddr_scale, self.stream_ms * ddr_scale, self.store_ms * ddr_scale, self.macs, self.padded_macs, (),
        )  # fmt: skip


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes as the vendor's report lists them, and the two planned arenas; bytes."""

    input_bytes: int
    output_bytes: int
    static_bytes: int
    temporary: Arena
    onchip: Arena
    onchip_capacity_bytes: int


@dataclass(frozen=True)
class Plan:
    """Everything `profile` needs."""

    model: dict[str, Any]
    chip: dict[str, Any]
    options: dict[str, Any]
    host_ms: float
    resubmit_ms: float
    contention_ms: float
    blocks: tuple[PlanBlock, ...]
    memory: MemoryPlan
    schedule: Schedule
    notes: tuple[str, ...]

    @property
    def profile_hash(self) -> str:
        """Hash of the chip profile behind every figure of this plan."""
        return str(self.chip["profile_hash"])


def compile_model(path: Path, chip: ChipProfile, options: CompileOptions | None = None) -> Plan:
    """Compile an ONNX file for `chip`. Raises `ModelError` for a bad model, `ChipError` for a missing number."""
    choices = options or CompileOptions()
    graph = import_onnx(path, choices.shapes, choices.assume_dtype)
    return compile_graph(fuse(graph, enable=choices.optimize_level != "O0"), chip, choices)


def compile_graph(fused: FusedGraph, chip: ChipProfile, options: CompileOptions) -> Plan:
    """The passes after fusion: tile, assign, cost, schedule, memory."""
    rates = rates_of(chip)
    tiles = tile(fused, chip, options.nv12)
    assignments = [assign(block, fused.tensors, chip) for block in fused.blocks]
    costs = [block_cost(b, a, fused.tensors, t, rates) for b, a, t in zip(fused.blocks, assignments, tiles.traffic, strict=True)]
    producers = block_producers(fused)
    memory = _memory(fused, tiles, chip, options)
    blocks = tuple(
        _plan_block(fused, block, assignment, cost, tiles.onchip_bytes[block.index], producers[block.index], rates, options.heads)
        for block, assignment, cost in zip(fused.blocks, assignments, costs, strict=True)
    )
    return Plan(
        model={"name": fused.graph.name, "hash": fused.graph.model_hash, "opset": fused.graph.opset, "quantized": fused.graph.quantized},
        chip={"name": chip.name, "march": chip.march, "profile_hash": chip.hash, "cores": int(chip.number("cores"))}
        | {key: chip.number(key) for key in ("peak_tops_int8", "ddr_peak_gbps", "ddr_efficiency")},
        options={"assume_dtype": options.assume_dtype, "optimize_level": options.optimize_level, "nv12": options.nv12, "prefetch": options.prefetch},
        host_ms=_ms(rates.host_ms + memory.output_bytes * rates.host_byte_ms),
        resubmit_ms=_ms(rates.host_ms),
        contention_ms=rates.contention_ms,
        blocks=blocks,
        memory=memory,
        schedule=_rounded(schedule(costs, producers, options.prefetch, rates.host_ms)),
        notes=(*fused.graph.notes, *_notes(fused, options)),
    )


def block_producers(fused: FusedGraph) -> list[tuple[int, ...]]:
    """For each block the indices of the blocks whose outputs it reads."""
    writer = {name: block.index for block in fused.blocks for name in block.outputs}
    return [tuple(sorted({writer[name] for name in block.inputs if name in writer})) for block in fused.blocks]


def _notes(fused: FusedGraph, options: CompileOptions) -> list[str]:
    """Assumptions of this compilation that a reader must know."""
    images = [name for name in fused.inputs if options.nv12 and is_image(fused.tensors[name])]
    notes = [f"input {name!r} is counted as NV12 (1.5 B a pixel)" for name in images]
    assumed = [name for block in fused.blocks for name in block.outputs if name in fused.graph.assumed]
    if not fused.graph.quantized:
        notes.append(f"the model carries no quantizers; every activation is taken as {options.assume_dtype}")
    elif assumed:
        notes.append(f"{len(assumed)} block outputs carry no quantizer and are taken as {options.assume_dtype}, the first is {assumed[0]!r}")
    return notes


def head_of(names: Sequence[str], heads: Mapping[str, tuple[str, ...]]) -> str:
    """Head whose prefix matches one of the names (module path, node name, tensor name); "shared" when none does."""
    dotted = [name.strip("/").replace("/", ".") for name in names if name]
    for head, prefixes in heads.items():
        clean = [prefix.strip("/").replace("/", ".") for prefix in prefixes]
        if any(name == prefix or name.startswith(prefix + ".") for name in dotted for prefix in clean if prefix):
            return head
    return "shared"


def _plan_block(
    fused: FusedGraph,
    block: Block,
    assignment: Assignment,
    cost: BlockCost,
    onchip: int,
    producers: tuple[int, ...],
    rates: Rates,
    heads: Mapping[str, tuple[str, ...]],
) -> PlanBlock:
    tensors, anchor = fused.tensors, block.anchor
    first = tensors[anchor.inputs[0]].shape if anchor.inputs else ()
    return PlanBlock(
        index=block.index,
        name=block.name,
        kind="+".join(op.kind for op in block.ops),
        module=block.module,
        head=head_of((block.module, *anchor.sources, *block.outputs), heads),
        unit=assignment.unit,
        cpu_reason=assignment.reason,
        sources=tuple(name for op in block.ops for name in op.sources),
        input_shape=shape_text(first),
        output_shape=shape_text(tensors[block.outputs[0]].shape),
        dtype=tensors[anchor.inputs[0]].dtype if anchor.inputs else tensors[block.outputs[0]].dtype,
        macs=cost.macs,
        padded_macs=cost.padded_macs,
        padding_waste=round(channel_waste(anchor, tensors, rates), 4) if anchor.kind in MATRIX_KINDS else 0.0,
        launch_ms=_ms(cost.launch_ms),
        load_ms=_ms(cost.load_ms),
        units=tuple((unit, _ms(ms)) for unit, ms in cost.units),
        stream_ms=_ms(cost.stream_ms),
        store_ms=_ms(cost.store_ms),
        weight_bytes=cost.weight_bytes,
        input_bytes=cost.input_bytes,
        output_bytes=cost.output_bytes,
        stream_bytes=cost.stream_bytes,
        onchip_bytes=onchip,
        producers=producers,
    )


def _ms(value: float) -> float:
    return round(value, TIME_DIGITS)


def _rounded(result: Schedule) -> Schedule:
    tasks = tuple(Task(task.block, task.lane, _ms(task.start_ms), _ms(task.end_ms)) for task in result.tasks)
    return Schedule(tasks, tuple(_ms(end) for end in result.finish_ms))


def _memory(fused: FusedGraph, tiles: TilePlan, chip: ChipProfile, options: CompileOptions) -> MemoryPlan:
    min_alloc, channels = int(chip.number("min_alloc")), int(chip.number("channel_align"))

    def arena(kind: str) -> Arena:
        names = [name for name, place in tiles.placement.items() if place == kind]
        buffers = [Buffer(n, tensor_bytes(fused.tensors[n], channels), max(tiles.lives[n].start, 0), tiles.lives[n].end) for n in names]
        return plan_arena(buffers, min_alloc)

    weights = {name for block in fused.blocks for name in block.weights}
    return MemoryPlan(
        input_bytes=sum(input_bytes(fused.tensors[name], chip, options.nv12) for name in fused.inputs),
        output_bytes=sum(output_bytes(fused, name, chip) for name in fused.outputs),
        static_bytes=sum(fused.tensors[name].bytes for name in weights),
        temporary=arena("ddr"),
        onchip=arena("resident"),
        onchip_capacity_bytes=int(chip.number("l1m_bytes") + chip.number("l2m_bytes")),
    )


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values."""
    return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "simulated": True, **asdict(plan)}


def write_plan(plan: Plan, path: Path) -> None:
    """Write the canonical plan file atomically."""
    write_json(path, plan_document(plan))


def read_plan(path: Path) -> Plan:
    """Read a plan file. Raises `DataError` for broken JSON, `ModelError` for another schema or a missing field."""
    document = read_json(path)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ModelError(f"{path}: field 'schema' is not {SCHEMA!r}; this is not a plan")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise ModelError(f"{path}: plan schema version {document.get('schema_version')}, this program reads {SCHEMA_VERSION}; compile again")
    try:
        return _plan_from(document)
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path}: not a complete plan ({error}); compile again") from error


def _plan_from(document: dict[str, Any]) -> Plan:
    memory = document["memory"]
    arenas = {key: Arena(**(memory[key] | {"buffers": tuple(_placed(b) for b in memory[key]["buffers"])})) for key in ("temporary", "onchip")}
    tasks = tuple(Task(**task) for task in document["schedule"]["tasks"])
    return Plan(
        model=document["model"],
        chip=document["chip"],
        options=document["options"],
        host_ms=document["host_ms"],
        resubmit_ms=document["resubmit_ms"],
        contention_ms=document["contention_ms"],
        blocks=tuple(_block_from(entry) for entry in document["blocks"]),
        memory=MemoryPlan(**(memory | arenas)),
        schedule=Schedule(tasks, tuple(document["schedule"]["finish_ms"])),
        notes=tuple(document["notes"]),
    )


def _placed(entry: dict[str, Any]) -> Placed:
    return Placed(**entry)


def _block_from(entry: dict[str, Any]) -> PlanBlock:
    lists = {"sources": tuple(entry["sources"]), "producers": tuple(entry["producers"]), "units": tuple((unit, ms) for unit, ms in entry["units"])}
    return PlanBlock(**(entry | lists))
