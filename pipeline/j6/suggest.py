"""What limits a plan, in words, and the changes that would pay most.

A saving is what the change could give at best, in simulated ms of the makespan's parts; changes of one kind are added up over the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.j6.cost import busiest_ms
from pipeline.j6.plan import Plan, PlanBlock

PAYING_CHANGES = 3
PADDING_WORTH_NAMING = 0.1
WIDE_SHARE_WORTH_NAMING = 0.3
LAYOUT_KINDS = ("Transpose", "Concat", "Slice", "Split", "Expand", "Tile", "Pad")
ISLANDS = "int16 islands: conversions between int8 and int16; end them at convolutions and products, which take either width, or drop them"
VECTOR_UNITS = frozenset({"VAE", "DTE", "AAE"})
LIMITS = {
    "DDR": "blocks limited by the DDR bus",
    "launch": "blocks too small to pay for their launch",
    "host": "the host's submit overhead",
    "CPU": "operators on the CPU",
}


@dataclass(frozen=True)
class Finding:
    """A possible change at one block; `key` joins findings of one kind."""

    key: str
    layer: str
    saves_ms: float
    change: str


def bound_by(block: PlanBlock) -> str:
    """What most of the block's time goes into: its busiest unit, DDR, launch."""
    times = {"launch": block.launch_ms, "DDR": block.load_ms + block.store_ms + max(block.stream_ms - block.compute_ms, 0.0)}
    for unit, ms in block.units:
        times[unit] = times.get(unit, 0.0) + ms
    return max(times, key=lambda name: (times[name], name))


def bottleneck(plan: Plan) -> str:
    """One sentence: what limits the frame rate."""
    shares: dict[str, float] = {"host": plan.host_ms}
    for block, share in zip(plan.blocks, plan.schedule.increments_ms(), strict=True):
        shares[bound_by(block)] = shares.get(bound_by(block), 0.0) + share
    name = max(shares, key=lambda key: (shares[key], key))
    percent = 100 * shares[name] / sum(shares.values())
    return f"{percent:.0f} % of the simulated latency goes into {LIMITS.get(name, f'blocks limited by the {name}')}"


def suggestions(plan: Plan) -> list[dict[str, Any]]:
    """The changes that would save most, largest first, one entry a kind of change with the number of layers it concerns."""
    groups: dict[str, list[Finding]] = {}
    for block in plan.blocks:
        for finding in findings(plan, block):
            groups.setdefault(finding.key, []).append(finding)
    entries = [_entry(found) for found in groups.values()]
    entries.sort(key=lambda entry: (-entry["saves_ms"], entry["layer"]))
    return entries[:PAYING_CHANGES]


def _entry(found: list[Finding]) -> dict[str, Any]:
    worst = max(found, key=lambda finding: finding.saves_ms)
    return {"layer": worst.layer, "layers": len(found), "saves_ms": round(sum(f.saves_ms for f in found), 6), "change": worst.change}


def findings(plan: Plan, block: PlanBlock) -> Iterator[Finding]:
    """Everything that a change of one block could save."""
    tae = sum(ms for unit, ms in block.units if unit == "TAE")
    if block.padding_waste > PADDING_WORTH_NAMING:
        yield _padding(plan, block, tae)
    if tae and block.dtype in ("int16", "float16"):
        text = "products of int16 activations: int8 would at least halve their multiply time"
        yield Finding("int16 products", block.name, _saved_ms(block, "TAE", tae / 2), text)
    if block.kind == "Requantize":
        yield Finding("islands", block.name, block.compute_ms + block.launch_ms, ISLANDS)
    elif not block.kind.endswith("QuantizeLinear") and any(unit == "VPU" for unit, _ in block.units):
        yield Finding("islands", block.name, _saved_ms(block, "VPU", block.compute_ms), ISLANDS)
    if block.unit == "CPU":
        text = f"{block.kind} runs on the CPU ({block.cpu_reason}): express it with operators of the BPU"
        yield Finding(f"CPU {block.kind}", block.name, block.compute_ms + block.launch_ms + plan.resubmit_ms, text)
    if block.unit == "SPU":
        text = f"{block.kind} runs on the scalar unit: a slice, a product with a selection matrix or GridSample runs on DTE, TAE or AAE"
        yield Finding(f"SPU {block.kind}", block.name, block.compute_ms, text)
    if block.stream_ms > block.compute_ms:
        text = "activations that do not fit on chip keep their blocks waiting for DDR: smaller tensors (fewer channels, more steps) would stay"
        yield Finding("round trips", block.name, block.stream_ms - block.compute_ms, text)
    first = block.kind.split("+")[0]
    if first in LAYOUT_KINDS:
        text = f"{first} only moves data: choose a layout in which the next layer can read its input as it is"
        yield Finding(f"layout {first}", block.name, block.launch_ms + max(block.compute_ms, block.stream_ms), text)
    elif block.unit in VECTOR_UNITS and bound_by(block) == "launch":
        yield Finding("launches", block.name, block.launch_ms, "element-wise blocks too small for their launch: fold them into the layer before")


def _saved_ms(block: PlanBlock, unit: str, less_ms: float) -> float:
    """What the block gains when one of its units works `less_ms` less, and the others beside it as before."""
    return block.compute_ms - busiest_ms((name, max(ms - less_ms, 0.0) if name == unit else ms) for name, ms in block.units)


def _padding(plan: Plan, block: PlanBlock, tae_ms: float) -> Finding:
    """Lanes that multiply zeros: attention by its head dimension, grouped convolutions by their groups, anything else by its channels."""
    lanes = int(plan.chip["tae_input_lanes"])
    narrow, wide = _channels(block)
    saves, filled = _saved_ms(block, "TAE", tae_ms * block.padding_waste), f"{1 - block.padding_waste:.0%} of the lanes"
    shapes = f"{block.input_shape} -> {block.output_shape}"
    if not block.weight_dtype and min(narrow, wide) < int(plan.chip["channel_align"]):
        text = f"product of activations {shapes} fills {filled}: so few columns are cheaper as element-wise multiply-adds on the VAE"
        return Finding("few columns", block.name, saves, text)
    if not block.weight_dtype:
        text = f"products of activations {shapes} fill {filled}: take a head_dim that is a multiple of {int(plan.chip['head_dim_align'])}"
        return Finding("head_dim", block.name, saves, text)
    if narrow % lanes == 0 and wide % lanes == 0:
        text = f"grouped convolution {shapes} fills {filled}: its groups are narrower than the {lanes} lanes; dense, depthwise or wider groups pay"
        return Finding("groups", block.name, saves, text)
    text = (
        f"{narrow} -> {wide} channels fill {filled}; multiples of {lanes} ({_nearest(narrow, lanes)} -> {_nearest(wide, lanes)}) "
        "do more work in the same time, or the same work in less"
    )
    return Finding(f"channels {narrow}-{wide}", block.name, saves, text)


def _channels(block: PlanBlock) -> tuple[int, int]:
    """(channels in, channels out) of a convolution, (columns in, columns out) of a product."""
    shapes = [[int(size) for size in text.split("x")] if text[:1].isdigit() else [1] for text in (block.input_shape, block.output_shape)]
    axis = 1 if len(shapes[0]) == 4 and block.kind.startswith("Conv") else -1
    return shapes[0][axis], shapes[1][axis]


def _nearest(channels: int, lanes: int) -> int:
    return max(round(channels / lanes), 1) * lanes


def findings_in_words(plan: Plan) -> list[str]:
    """What a reader should know first: the three largest costs, CPU operators, misaligned channels and head dimensions, the share of int16."""
    shares = plan.schedule.increments_ms()
    makespan = plan.schedule.makespan_ms or 1.0
    largest = sorted(plan.blocks, key=lambda block: -shares[block.index])[:3]
    words = ["largest: " + ", ".join(f"{b.name} ({b.unit}, {shares[b.index]:.3f} ms, {100 * shares[b.index] / makespan:.1f} %)" for b in largest)]
    on_cpu = [block.kind for block in plan.blocks if block.unit == "CPU"]
    if on_cpu:
        words.append(f"{len(on_cpu)} blocks on the CPU: {', '.join(sorted(set(on_cpu)))}")
    matrices = [block for block in plan.blocks if block.macs]
    align = int(plan.chip["channel_align"])
    odd = [block for block in matrices if block.weight_dtype and any(size % align for size in _channels(block))]
    if odd:
        words.append(f"{len(odd)} of {len(matrices)} matrix blocks have channels that are no multiple of {align}, the first is {odd[0].name}")
    wide = sum(block.macs for block in matrices if block.dtype != "int8") / max(sum(block.macs for block in matrices), 1)
    if wide > WIDE_SHARE_WORTH_NAMING:
        words.append(f"{100 * wide:.0f} % of the multiplications are wider than int8")
    return words
