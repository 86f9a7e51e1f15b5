"""Which execution unit runs a block, and what falls back to the CPU.

TAE multiplies (Conv, MatMul, Linear), VAE does element-wise work and table look-ups, AAE pools, resizes and warps, DTE moves data, SPU does
scalar work (TopK), VPU converts to and from float (deployment guides of the vendor, facts section 1.1). Where no document names the unit of an
operator the entry says `assumed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from pipeline.j6.chip import ChipProfile
from pipeline.j6.fuse import ELEMENTWISE_KINDS, Block
from pipeline.j6.ir import Op, Tensor

UNITS = ("TAE", "VAE", "AAE", "DTE", "SPU", "VPU", "CPU")
MAX_REDUCED_AXIS = 65535  # operator list j6em: length of a reduced axis 1..65535
MAX_ARGMAX_AXIS = 32767  # operator list j6em: the index must fit int16


@dataclass(frozen=True)
class UnitRule:
    """Unit of one operator kind, whether a document says so, and its known limit."""

    unit: str
    documented: bool
    note: str = ""


def _rules(unit: str, documented: bool, kinds: str, note: str = "") -> dict[str, UnitRule]:
    return {kind: UnitRule(unit, documented, note) for kind in kinds.split()}


UNIT_RULES: dict[str, UnitRule] = {
    **_rules("TAE", True, "Conv ConvTranspose Gemm MatMul", "int8 or int16 in and out; int32 only as a model output on E/M"),
    **_rules("TAE", False, "Einsum"),
    **{kind: UnitRule("VAE", True, "int8: a table; int16: a piecewise table of up to 64 segments") for kind in sorted(ELEMENTWISE_KINDS)},
    **_rules("VAE", False, "Softmax LogSoftmax LayerNormalization InstanceNormalization GroupNormalization LpNormalization RMSNormalization"),
    **_rules("VAE", False, "LRN CumSum"),
    **_rules("VAE", True, "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceProd", "reduced axis 1..65535"),
    **_rules("VAE", False, "ReduceSumSquare ReduceLogSumExp", "reduced axis 1..65535"),
    **_rules("AAE", True, "MaxPool AveragePool GlobalAveragePool GlobalMaxPool Resize Upsample"),
    **_rules("AAE", True, "GridSample", "the grid and what computes it in int16"),
    **_rules("DTE", True, "Transpose Concat Slice Split Pad DepthToSpace SpaceToDepth"),
    **_rules("DTE", False, "Expand Tile ScatterND Gather ConstantOfShape"),
    **_rules("SPU", True, "TopK", "moves to the CPU where the chip has no SPU"),
    **_rules("SPU", False, "ArgMax ArgMin GatherElements GatherND ScatterElements NonZero OneHot", "argmax axis 1..32767"),
    **_rules("VPU", True, "QuantizeLinear DequantizeLinear"),
    **_rules("VPU", False, "Requantize", "int8 to int16 and back; on the VAE where the chip has no VPU"),
}  # fmt: skip


def operator_table(chips: Sequence[ChipProfile]) -> str:
    """The table of docs/j6-model.md: where every known operator runs on each chip, in which dtypes, whether a document says so, and its limit."""
    lines = ["| operators | " + " | ".join(chip.name.upper() for chip in chips) + " | source | limit |", "|---" * (len(chips) + 3) + "|"]
    groups: dict[UnitRule, list[str]] = {}
    for kind, rule in UNIT_RULES.items():
        if kind != "GridSample":
            groups.setdefault(rule, []).append(kind)
    rows = [(sorted(kinds), rule) for rule, kinds in groups.items()] + [(["GridSample"], UNIT_RULES["GridSample"])]
    for kinds, rule in rows:
        cells = [_cell(kinds[0], chip) for chip in chips]
        lines.append(f"| {', '.join(kinds)} | {' | '.join(cells)} | {'documented' if rule.documented else 'assumed'} | {rule.note} |")
    cpu = " | ".join("CPU" for _ in chips)
    lines.append(f"| every other operator | {cpu} | - | one host submit each way, then a fixed rate (assumed) |")
    return "\n".join(lines)


def unit_on(kind: str, chip: ChipProfile) -> str:
    """Unit that runs a known operator on `chip` if the chip has it; a conversion between widths needs no VPU."""
    return "VAE" if kind == "Requantize" and not chip.flag("has_vpu") else UNIT_RULES[kind].unit


def _cell(kind: str, chip: ChipProfile) -> str:
    unit = unit_on(kind, chip)
    if missing_unit(unit, kind, chip):
        return "CPU"
    return f"{unit}: {', '.join(activation_dtypes(chip))}"


def activation_dtypes(chip: ChipProfile) -> tuple[str, ...]:
    """Activation dtypes that a chip computes with; on chips without float units an int32 appears only as a model output."""
    return ("int8", "int16", "float16") if chip.flag("float_units") else ("int8", "int16")


def missing_unit(unit: str, kind: str, chip: ChipProfile) -> str:
    """Why `chip` cannot run `kind` on `unit`, "" when it can."""
    for flag, name in (("has_spu", "SPU"), ("has_vpu", "VPU")):
        if unit == name and not chip.flag(flag):
            return f"{chip.name} has no {name} for {kind}"
    if kind == "GridSample" and not chip.flag("has_warp"):
        return f"{chip.name} has no warping unit for GridSample"
    return ""


@dataclass(frozen=True)
class Assignment:
    """Unit of a block; `reason` is set when it runs on the CPU."""

    unit: str
    reason: str = ""


def assign(block: Block, tensors: Mapping[str, Tensor], chip: ChipProfile) -> Assignment:
    """Unit that runs `block` on `chip`; the CPU, with the reason, for what the BPU cannot do."""
    if block.kind not in UNIT_RULES:
        return Assignment("CPU", f"{block.kind} has no BPU implementation")
    unit = unit_on(block.kind, chip)
    reason = missing_unit(unit, block.kind, chip) or _broken_limit(block.anchor, tensors)
    return Assignment("CPU", reason) if reason else Assignment(unit)


def _broken_limit(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """The limit of the operator list that `op` breaks, "" when none."""
    if not op.inputs:
        return ""
    shape = tensors[op.inputs[0]].shape
    if op.kind.startswith("Reduce"):
        longest = _longest_reduced_axis(shape, tensors[op.outputs[0]].elements)
        if longest > MAX_REDUCED_AXIS:
            return f"{op.kind} over an axis of {longest}; the limit is {MAX_REDUCED_AXIS}"
    if op.kind in ("ArgMax", "ArgMin"):
        length = shape[int(op.attrs.get("axis", 0))]
        if length > MAX_ARGMAX_AXIS:
            return f"{op.kind} over an axis of {length}; the limit is {MAX_ARGMAX_AXIS}"
    return ""


def _longest_reduced_axis(shape: tuple[int, ...], kept_elements: int) -> int:
    """Length of the longest axis that a reduction to `kept_elements` can have taken away, 0 when there is none.

    The limit holds for each axis: a mean over a 512x512 plane takes away two axes of 512. An axis that is gone divides the ratio of elements;
    the axes themselves are an attribute or an input, by opset.
    """
    ratio = prod(shape) // kept_elements if kept_elements else 0
    return max((length for length in shape if length and ratio % length == 0), default=0) if ratio else 0
