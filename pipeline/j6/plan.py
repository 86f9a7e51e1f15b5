"""The compiled plan: what runs where, when, at what cost, and where every byte lives. One versioned, canonical JSON file.

`compiler.py` makes a plan; `write_plan`/`read_plan` move it to and from disk. The same model, chip and options give the same bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ModelError
from pipeline.io import read_json, write_json
from pipeline.j6.cost import BlockCost, busiest_ms
from pipeline.j6.memory import Arena, Placed
from pipeline.j6.schedule import Schedule, Task

SCHEMA = "bevj6.plan"
SCHEMA_VERSION = 2
NO_CHAIN = -1


@dataclass(frozen=True)
class PlanBlock:
    """One block of the plan: identity, place, work, time (ms) and traffic (bytes). `chain`: index into the plan's chains, -1 for none."""

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
    weight_dtype: str
    output_dtype: str
    macs: int
    padded_macs: int
    padding_waste: float
    cores: int
    launch_ms: float
    load_ms: float
    units: tuple[tuple[str, float], ...]
    stream_ms: float
    store_ms: float
    weight_bytes: int
    input_bytes: int
    output_bytes: int
    stream_in_bytes: int
    stream_out_bytes: int
    onchip_bytes: int
    chain: int
    segment: int
    producers: tuple[int, ...]

    @property
    def compute_ms(self) -> float:
        """Time of the units without memory traffic."""
        return busiest_ms(self.units)

    @property
    def stream_bytes(self) -> int:
        """Activation bytes that do not stay on chip, both directions."""
        return self.stream_in_bytes + self.stream_out_bytes

    @property
    def loaded_bytes(self) -> int:
        """Bytes read from DDR."""
        return self.weight_bytes + self.input_bytes + self.stream_in_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes written to DDR."""
        return self.output_bytes + self.stream_out_bytes

    @property
    def ddr_bytes(self) -> int:
        """All bytes that cross the DDR bus."""
        return self.loaded_bytes + self.stored_bytes

    def cost(self, ddr_scale: float = 1.0, compute_scale: float = 1.0) -> BlockCost:
        """The block's cost with DDR times and compute times stretched by the given factors (1 = as planned)."""
        on_chip = self.unit != "CPU"
        units = tuple((unit, ms * (compute_scale if on_chip else 1.0)) for unit, ms in self.units)
        return BlockCost(
            units, self.launch_ms, self.weight_bytes, self.input_bytes, self.output_bytes, self.stream_in_bytes, self.stream_out_bytes,
            self.load_ms * ddr_scale, self.stream_ms * ddr_scale, self.store_ms * ddr_scale, self.macs, self.padded_macs, self.cores,
        )  # fmt: skip


@dataclass(frozen=True)
class PlanChain:
    """Blocks that run depth-first over pieces (stripes.py); `halo_bytes` are kept from band to band, `weight_passes` loads of the weights a frame."""

    kind: str
    blocks: tuple[int, ...]
    tensors: tuple[str, ...]
    pieces: int
    halo_bytes: int
    weight_passes: int
    workspace_bytes: int


@dataclass(frozen=True)
class Segment:
    """Blocks `first`..`last` that run without a break; other models may use the BPU between segments."""

    first: int
    last: int
    ms: float


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
    chains: tuple[PlanChain, ...]
    segments: tuple[Segment, ...]
    memory: MemoryPlan
    schedule: Schedule
    notes: tuple[str, ...]

    @property
    def profile_hash(self) -> str:
        """Hash of the chip profile behind every figure of this plan."""
        return str(self.chip["profile_hash"])


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
        chains=tuple(PlanChain(**(entry | {key: tuple(entry[key]) for key in ("blocks", "tensors")})) for entry in document["chains"]),
        segments=tuple(Segment(**entry) for entry in document["segments"]),
        memory=MemoryPlan(**(memory | arenas)),
        schedule=Schedule(tasks, tuple(document["schedule"]["finish_ms"])),
        notes=tuple(document["notes"]),
    )


def _placed(entry: dict[str, Any]) -> Placed:
    return Placed(**entry)


def _block_from(entry: dict[str, Any]) -> PlanBlock:
    lists = {"sources": tuple(entry["sources"]), "producers": tuple(entry["producers"]), "units": tuple((unit, ms) for unit, ms in entry["units"])}
    return PlanBlock(**(entry | lists))
