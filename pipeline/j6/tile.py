"""What stays in on-chip memory, and the DDR traffic of every block.

A tensor is `resident` when it fits in on-chip memory for its whole life, `striped` when the blocks of its life run depth-first over horizontal
stripes (so only a few rows of it exist at a time), and goes through `ddr` otherwise. When residents do not fit together, the one whose next use is
farthest away leaves (Belady's rule, optimal for equal sizes). Halo rows of a stripe are kept in a line buffer, not computed again; their bytes
count in the stripe.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pipeline.j6.align import aligned_bytes, nv12_layout, round_up
from pipeline.j6.chip import ChipProfile
from pipeline.j6.cost import Traffic
from pipeline.j6.fuse import ELEMENTWISE_KINDS, Block, FusedGraph
from pipeline.j6.ir import DTYPE_BYTES, MATRIX_KINDS, Tensor
from pipeline.j6.memory import Buffer, plan_arena

ROW_LOCAL_KINDS = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "Concat", "Slice", "Split", "Resize", "Upsample"}) | ELEMENTWISE_KINDS
MAX_SEGMENT_BLOCKS = 32  # a depth-first segment longer than this needs more line buffers than it saves (assumed)
MIN_STRIPE_ROWS = 4
SLICE_LOCAL_KINDS = frozenset({"MatMul", "Softmax", "LayerNormalization"}) | ELEMENTWISE_KINDS
SLICES_IN_FLIGHT = 2  # one slice is worked on while the next one fills


@dataclass(frozen=True)
class Life:
    """Blocks between which a tensor exists: written by `start` (-1: a model input), read last by `end`."""

    start: int
    end: int


@dataclass(frozen=True)
class TilePlan:
    """Placement of every activation and the traffic that follows from it."""

    placement: dict[str, str]  # storage name -> input | output | resident | striped | ddr
    lives: dict[str, Life]
    traffic: tuple[Traffic, ...]
    onchip_bytes: tuple[int, ...]  # peak on-chip bytes of activations while each block runs


def lifetimes(fused: FusedGraph) -> dict[str, Life]:
    """Life of every storage tensor that a block reads or writes; model outputs live to the end."""
    lives = {name: Life(-1, -1) for name in fused.inputs}
    for block in fused.blocks:
        for name in block.outputs:
            lives[name] = Life(block.index, block.index)
        for name in block.inputs:
            lives[name] = Life(lives[name].start if name in lives else -1, block.index)
    for name in fused.outputs:
        if name in lives:
            lives[name] = Life(lives[name].start, len(fused.blocks) - 1)
    return lives


def tensor_bytes(tensor: Tensor, channel_align: int) -> int:
    """On-chip size: channels (axis 1 of a 4-D map, the last axis otherwise) padded to the documented multiple."""
    shape = list(tensor.shape)
    if len(shape) >= 2:
        axis = 1 if len(shape) == 4 else len(shape) - 1
        shape[axis] = round_up(shape[axis], channel_align) if shape[axis] >= channel_align else shape[axis]
    size = DTYPE_BYTES[tensor.dtype]
    for dim in shape:
        size *= dim
    return size


def tile(fused: FusedGraph, chip: ChipProfile, nv12: bool = True) -> TilePlan:
    """Place every activation of `fused` and count DDR bytes. `nv12`: image inputs [N,3,H,W] arrive as NV12 (1.5 B a pixel)."""
    align = int(chip.number("channel_align"))
    capacity = int(chip.number("l1m_bytes") + chip.number("l2m_bytes"))
    lives = lifetimes(fused)
    sizes = {name: tensor_bytes(fused.tensors[name], align) for name in lives}
    placement = dict.fromkeys(fused.inputs, "input") | {name: "output" for name in fused.outputs if name not in fused.inputs}
    inner = [name for name in lives if name not in placement]
    evicted = _evict(fused, inner, lives, sizes, capacity)
    evicted |= _overflow([name for name in inner if name not in evicted], lives, sizes, capacity, int(chip.number("min_alloc")))
    for name in inner:
        striped = name in evicted and _can_stripe(fused, name, lives[name], sizes[name], capacity)
        placement[name] = "resident" if name not in evicted else "striped" if striped else "ddr"
    traffic = tuple(block_traffic(fused, block, placement, chip, nv12) for block in fused.blocks)
    return TilePlan(placement, lives, traffic, _onchip(fused, placement, lives, sizes, capacity))


def _evict(fused: FusedGraph, names: list[str], lives: dict[str, Life], sizes: dict[str, int], capacity: int) -> set[str]:
    """Names that do not stay: too large for on-chip memory, or pushed out by tensors that are needed sooner."""
    evicted = {name for name in names if sizes[name] > capacity}
    candidates = set(names) - evicted
    uses: dict[str, list[int]] = {name: [] for name in names}
    for block in fused.blocks:
        for name in block.inputs:
            if name in uses:
                uses[name].append(block.index)
    live: dict[str, int] = {}  # name -> index into its uses
    for block in fused.blocks:
        live.update({name: 0 for name in block.outputs if name in candidates})
        while sum(sizes[name] for name in live) > capacity:
            victim = max(live, key=lambda name: (_next_use(uses[name], block.index), sizes[name], name))
            evicted.add(victim)
            del live[victim]
        for name in [name for name in live if lives[name].end <= block.index]:
            del live[name]
    return evicted


def _overflow(names: list[str], lives: dict[str, Life], sizes: dict[str, int], capacity: int, alignment: int) -> set[str]:
    """Residents that fit by the sum of bytes but not at any offset: fragmentation pushes them out."""
    buffers = [Buffer(name, sizes[name], max(lives[name].start, 0), lives[name].end) for name in names]
    evicted: set[str] = set()
    while buffers:
        beyond = {placed.name for placed in plan_arena(buffers, alignment).buffers if placed.offset + placed.bytes > capacity}
        if not beyond:
            break
        evicted |= beyond
        buffers = [buffer for buffer in buffers if buffer.name not in beyond]
    return evicted


def _next_use(uses: list[int], now: int) -> int:
    return next((use for use in uses if use >= now), now)


def _can_stripe(fused: FusedGraph, name: str, life: Life, size: int, capacity: int) -> bool:
    """True when the blocks of the tensor's life can run piece by piece: over image rows, or over independent slices (attention heads)."""
    shape = fused.tensors[name].shape
    if len(shape) < 3 or life.end - life.start > MAX_SEGMENT_BLOCKS:
        return False
    segment = _between(fused, name, life)
    if len(shape) == 4 and all(_row_local(block, fused.tensors) for block in segment):
        return size * MIN_STRIPE_ROWS <= capacity * shape[2]
    slices = prod(shape[:-2])
    return all(_slice_local(block, fused.tensors, shape[:-2]) for block in segment) and size * SLICES_IN_FLIGHT <= capacity * slices


def _between(fused: FusedGraph, name: str, life: Life) -> list[Block]:
    """Writer and readers of a tensor, and the blocks on the way from it to its last reader; what only happens to run in between can move."""
    blocks = fused.blocks[max(life.start, 0) : life.end + 1]
    reached, downstream = {name}, []
    for block in blocks[1:] if life.start >= 0 else blocks:
        if reached.intersection(block.inputs):
            reached.update(block.outputs)
            downstream.append(block)
    needed, segment = set(blocks[-1].inputs), [blocks[-1]]
    for block in reversed(downstream[:-1]):
        if name in block.inputs or needed.intersection(block.outputs):
            needed.update(block.inputs)
            segment.append(block)
    return [*segment, blocks[0]] if life.start >= 0 else segment


def _slice_local(block: Block, tensors: dict[str, Tensor], leading: tuple[int, ...]) -> bool:
    """Slice-local: every slice over the leading axes (batch, heads) depends on the same slice of the inputs only."""
    if block.kind == "Transpose":
        order = tuple(block.anchor.attrs.get("perm", ()))
        if order[: len(leading)] != tuple(range(len(leading))):
            return False
    elif block.kind not in SLICE_LOCAL_KINDS or (block.kind == "MatMul" and block.weights):
        return False
    return tensors[block.outputs[0]].shape[:-2] == leading


def _row_local(block: Block, tensors: dict[str, Tensor]) -> bool:
    """Row-local: an output row depends on a few input rows only."""
    if block.kind in ("Concat", "Split"):
        return int(block.anchor.attrs.get("axis", 0)) in (1, -3)
    if block.kind in MATRIX_KINDS and block.kind not in ("Conv", "ConvTranspose"):
        return False
    return block.kind in ROW_LOCAL_KINDS and len(tensors[block.outputs[0]].shape) == 4


def block_traffic(fused: FusedGraph, block: Block, placement: dict[str, str], chip: ChipProfile, nv12: bool) -> Traffic:
    """Weights once a frame, model inputs by each reader, model outputs once, spilled activations per reader and writer."""
    weights = sum(fused.tensors[name].bytes for name in block.weights)
    inputs = sum(input_bytes(fused.tensors[name], chip, nv12) for name in block.inputs if placement.get(name) == "input")
    outputs = sum(output_bytes(fused, name, chip) for name in block.outputs if placement[name] == "output")
    moved = [name for name in (*block.inputs, *block.outputs) if placement.get(name) == "ddr"]
    moved += [name for name in block.inputs if placement.get(name) == "output"]
    stream = sum(tensor_bytes(fused.tensors[name], int(chip.number("channel_align"))) for name in moved)
    return Traffic(weights, inputs, outputs, stream)


def is_image(tensor: Tensor) -> bool:
    """A model input [N,3,H,W] with even H and W, which the camera delivers as NV12."""
    shape = tensor.shape
    return len(shape) == 4 and shape[1] == 3 and shape[2] >= 32 and shape[2] % 2 == 0 and shape[3] % 2 == 0


def input_bytes(tensor: Tensor, chip: ChipProfile, nv12: bool) -> int:
    """Bytes that the BPU reads for a model input."""
    stride_align, min_alloc = int(chip.number("stride_align")), int(chip.number("min_alloc"))
    if nv12 and is_image(tensor):
        return tensor.shape[0] * nv12_layout(tensor.shape[2], tensor.shape[3], stride_align).bytes
    return aligned_bytes(tensor.shape, DTYPE_BYTES[tensor.dtype], stride_align, min_alloc, planar=True)


def output_bytes(fused: FusedGraph, name: str, chip: ChipProfile) -> int:
    """Bytes that the BPU writes for a model output; an unquantized output of a matrix operator leaves in the chip's wide format."""
    tensor = fused.tensors[name]
    element = DTYPE_BYTES[tensor.dtype]
    if not fused.graph.quantized and _made_by_matrix(fused, name):
        element = max(element, int(chip.number("conv_output_bytes")))
    return aligned_bytes(tensor.shape, element, int(chip.number("stride_align")), int(chip.number("min_alloc")))


def _made_by_matrix(fused: FusedGraph, name: str) -> bool:
    """True when only layout changes lie between a convolution or matrix product and `name`."""
    writer = {output: block for block in fused.blocks for output in block.outputs}
    block = writer.get(name)
    while block is not None and block.kind in ("Transpose", "Concat", "Slice", "Split") and len(block.ops) == 1:
        block = writer.get(block.inputs[0]) if block.inputs else None
    return block is not None and block.kind in MATRIX_KINDS and len(block.ops) == 1


def _onchip(fused: FusedGraph, placement: dict[str, str], lives: dict[str, Life], sizes: dict[str, int], capacity: int) -> tuple[int, ...]:
    """On-chip activation bytes while each block runs: whole residents, and what is left for stripes at most."""
    change = [0] * (len(fused.blocks) + 1)
    for name, kind in placement.items():
        if kind == "resident":
            change[max(lives[name].start, 0)] += sizes[name]
            change[lives[name].end + 1] -= sizes[name]
    result, level = [], 0
    for block in fused.blocks:
        level += change[block.index]
        moving = sum(sizes[name] for name in (*block.inputs, *block.outputs) if placement.get(name) != "resident" and name in sizes)
        result.append(min(level + moving, max(capacity, level)))
    return tuple(result)
