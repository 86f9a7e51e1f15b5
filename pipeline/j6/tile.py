"""What stays in on-chip memory, and the DDR traffic of every block.

A tensor is `resident` when it fits in on-chip memory for its whole life, `tiled` when the blocks of its life run depth-first over pieces of it
(`stripes.py`), and goes through `ddr` otherwise. When residents do not fit together, the one whose next use is farthest away leaves (Belady's rule,
optimal for equal sizes). Where a network is cut into segments, nothing stays on chip across the cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pipeline.j6.align import aligned_bytes, nv12_layout, round_up
from pipeline.j6.chip import ChipProfile
from pipeline.j6.cost import Traffic
from pipeline.j6.fuse import Block, FusedGraph
from pipeline.j6.ir import DTYPE_BYTES, MATRIX_KINDS, Tensor
from pipeline.j6.memory import Arena, Buffer, plan_arena
from pipeline.j6.stripes import Chain, ChainLimits, ChainPlanner, Life

IN_PLACE_KINDS = frozenset({"Concat", "Split", "Slice"})


@dataclass(frozen=True)
class TileOptions:
    """Choices of one tiling. A chain may claim `chain_share` of on-chip memory before residents are placed (0: no chains); `cuts` are blocks that
    begin a new segment; the on-chip memories of `cores` are used together, `l2m_bytes` limits the shared one."""

    chain_share: float = 0.5
    cuts: frozenset[int] = frozenset()
    cores: int = 1
    l2m_bytes: float | None = None
    nv12: bool = True


@dataclass(frozen=True)
class TilePlan:
    """Placement of every activation and the traffic that follows from it. `onchip_bytes`: in use while each block runs."""

    placement: dict[str, str]  # storage name -> input | output | resident | tiled | ddr
    lives: dict[str, Life]
    chains: tuple[Chain, ...]
    traffic: tuple[Traffic, ...]
    onchip: Arena
    onchip_bytes: tuple[int, ...]


def onchip_capacity(chip: ChipProfile, cores: int = 1, l2m_bytes: float | None = None) -> int:
    """Bytes of on-chip memory for activations: L1M of every core in use, and the shared L2M or the part of it that the options allow."""
    shared = chip.number("l2m_bytes")
    return int(cores * chip.number("l1m_bytes") + (shared if l2m_bytes is None else min(shared, l2m_bytes)))


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


def tile(fused: FusedGraph, chip: ChipProfile, options: TileOptions | None = None) -> TilePlan:
    """Place every activation of `fused` and count DDR bytes."""
    choices = options or TileOptions()
    lives = lifetimes(fused)
    align = int(chip.number("channel_align"))
    sizes = {name: tensor_bytes(fused.tensors[name], align) for name in lives}
    placement = dict.fromkeys(fused.inputs, "input") | {name: "output" for name in fused.outputs if name not in fused.inputs}
    inner = [name for name in lives if name not in placement]
    planner = _Placer(fused, lives, sizes, chip, choices)
    chains, arena = planner.place(inner)
    tiled = {name for chain in chains for name in chain.tensors}
    resident = {buffer.name for buffer in arena.buffers}
    placement |= {name: "resident" if name in resident else "tiled" if name in tiled else "ddr" for name in inner}
    passes = {index: chain.weight_passes for chain in chains for index in chain.blocks}
    traffic = tuple(block_traffic(fused, block, placement, chip, choices.nv12, passes.get(block.index, 1)) for block in fused.blocks)
    return TilePlan(placement, lives, tuple(chains), traffic, arena, _levels(arena, len(fused.blocks)))


class _Placer:
    """One tiling: chains for what is too large, residents in the room that is left, chains again for what had to leave."""

    def __init__(self, fused: FusedGraph, lives: Mapping[str, Life], sizes: Mapping[str, int], chip: ChipProfile, options: TileOptions) -> None:
        self.fused, self.lives, self.sizes, self.options = fused, lives, sizes, options
        self.capacity, self.alignment = onchip_capacity(chip, options.cores, options.l2m_bytes), int(chip.number("min_alloc"))
        self.weight_buffer = None if chip.value("weight_buffer_bytes") is None else int(chip.number("weight_buffer_bytes"))
        self.uses: dict[str, list[int]] = {}
        for block in fused.blocks:
            for name in block.inputs:
                self.uses.setdefault(name, []).append(block.index)

    def place(self, names: Collection[str]) -> tuple[list[Chain], Arena]:
        """Chains, and the arena of residents and chain workspaces."""
        candidates = [name for name in names if not self._is_cut(name)]
        gone: set[str] = set()
        chains: list[Chain] = []
        for _ in range(2):  # what the first chains push out may join them
            gone |= self._evicted([name for name in candidates if name not in gone], self._reserved(chains))
            chains = self._chains(gone)
        gone |= self._evicted([name for name in candidates if name not in gone], self._reserved(chains))
        return self._settle(chains, [name for name in candidates if name not in gone])

    def _is_cut(self, name: str) -> bool:
        life = self.lives[name]
        return any(life.start < cut <= life.end for cut in self.options.cuts)

    def _chains(self, names: Collection[str]) -> list[Chain]:
        if not self.options.chain_share:
            return []
        limits = ChainLimits(int(self.capacity * self.options.chain_share), self.weight_buffer, self.options.cuts)
        planner = ChainPlanner(self.fused, self.lives, self.sizes, limits)
        for name in sorted(names, key=lambda name: (self.lives[name].start, name)):
            planner.add(name)
        return planner.chains()

    def _reserved(self, chains: Iterable[Chain]) -> list[int]:
        """Bytes that chains occupy while each block runs."""
        level = [0] * len(self.fused.blocks)
        for chain in chains:
            for index in range(chain.first, chain.last + 1):
                level[index] += chain.workspace_bytes
        return level

    def _evicted(self, names: Collection[str], reserved: list[int]) -> set[str]:
        """Names that do not stay: too large for what is free, or pushed out by tensors that are needed sooner."""
        evicted = {name for name in names if self.sizes[name] > self.capacity}
        candidates = set(names) - evicted
        live: dict[str, None] = {}
        level = 0
        for block in self.fused.blocks:
            fresh = [name for name in block.outputs if name in candidates]
            live.update(dict.fromkeys(fresh))
            level += sum(self.sizes[name] for name in fresh)
            while level + reserved[block.index] > self.capacity and live:
                victim = max(live, key=lambda name: (self._next_use(name, block.index), self.sizes[name], name))
                evicted.add(victim)
                level -= self.sizes[victim]
                del live[victim]
            for name in [name for name in live if self.lives[name].end <= block.index]:
                level -= self.sizes[name]
                del live[name]
        return evicted

    def _next_use(self, name: str, now: int) -> int:
        return next((use for use in self.uses.get(name, ()) if use >= now), now)

    def _settle(self, chains: list[Chain], residents: list[str]) -> tuple[list[Chain], Arena]:
        """Give offsets; what fits by the sum of bytes but at no offset (fragmentation) leaves: residents first, then chains."""
        while True:
            spaces = {f"chain {chain.first}-{chain.last}": chain for chain in chains}
            buffers = [Buffer(name, self.sizes[name], max(self.lives[name].start, 0), self.lives[name].end) for name in residents]
            buffers += [Buffer(name, chain.workspace_bytes, chain.first, chain.last) for name, chain in spaces.items()]
            arena = plan_arena(buffers, self.alignment)
            beyond = {placed.name for placed in arena.buffers if placed.offset + placed.bytes > self.capacity}
            if not beyond:
                return chains, arena
            kept = [name for name in residents if name not in beyond]
            chains = chains if len(kept) < len(residents) else [chain for name, chain in spaces.items() if name not in beyond]
            residents = kept


def _levels(arena: Arena, blocks: int) -> tuple[int, ...]:
    """Bytes of the arena in use while each block runs."""
    change = [0] * (blocks + 1)
    for buffer in arena.buffers:
        change[buffer.start] += buffer.bytes
        change[buffer.end + 1] -= buffer.bytes
    levels, level = [], 0
    for step in change[:-1]:
        level += step
        levels.append(level)
    return tuple(levels)


def block_traffic(
    fused: FusedGraph,
    block: Block,
    placement: Mapping[str, str],
    chip: ChipProfile,
    nv12: bool,
    weight_passes: int = 1,
    tensors: Mapping[str, Tensor] | None = None,
) -> Traffic:
    """Weights once a frame, model inputs by each reader, model outputs once; streamed: spilled activations per use, and weights loaded again.

    Parts of a tensor in DDR are addressed by strides: what joins or cuts tensors there moves only what comes from, or goes to, the chip.
    `tensors` replaces the table of `fused`.
    """
    table = fused.tensors if tensors is None else tensors
    align = int(chip.number("channel_align"))
    weights = sum(table[name].bytes for name in block.weights)
    inputs = sum(input_bytes(table[name], chip, nv12) for name in block.inputs if placement.get(name) == "input")
    outputs = sum(output_bytes(fused, table[name], chip) for name in block.outputs if placement[name] == "output")
    read = [name for name in block.inputs if placement.get(name) in ("ddr", "output")]
    written = [name for name in block.outputs if placement[name] == "ddr"]
    stream_in, stream_out = (sum(tensor_bytes(table[name], align) for name in names) for names in (read, written))
    if block.kind in IN_PLACE_KINDS and len(block.ops) == 1 and (stream_in or stream_out):
        stream_in, stream_out = _in_place_stream(block, placement, table, align) or (stream_in, stream_out)
    return Traffic(weights, inputs, outputs, stream_in + (weight_passes - 1) * weights, stream_out)


def _in_place_stream(block: Block, placement: Mapping[str, str], tensors: Mapping[str, Tensor], align: int) -> tuple[int, int] | None:
    """(bytes in, bytes out) of a Concat whose result, or of a Split or Slice whose source, lies in DDR; None for any other."""
    parts, whole = (block.inputs, block.outputs[0]) if block.kind == "Concat" else (block.outputs, block.inputs[0])
    if placement.get(whole) not in ("ddr", "output"):
        return None
    moved = sum(tensor_bytes(tensors[name], align) for name in parts if placement.get(name) not in ("ddr", "output"))
    moved = min(moved, tensor_bytes(tensors[whole], align))  # parts of a tensor in DDR are not padded one by one
    if block.kind == "Concat":
        return (0, moved if placement[whole] == "ddr" else 0)
    return (moved, 0)


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


def output_bytes(fused: FusedGraph, tensor: Tensor, chip: ChipProfile) -> int:
    """Bytes that the BPU writes for a model output; an unquantized output of a matrix operator leaves in the chip's wide format."""
    element = DTYPE_BYTES[tensor.dtype]
    if not fused.graph.quantized and _made_by_matrix(fused, tensor.name):
        element = max(element, int(chip.number("conv_output_bytes")))
    return aligned_bytes(tensor.shape, element, int(chip.number("stride_align")), int(chip.number("min_alloc")))


def _made_by_matrix(fused: FusedGraph, name: str) -> bool:
    """True when only layout changes lie between a convolution or matrix product and `name`."""
    writer = {output: block for block in fused.blocks for output in block.outputs}
    block = writer.get(name)
    while block is not None and block.kind in ("Transpose", "Concat", "Slice", "Split") and len(block.ops) == 1:
        block = writer.get(block.inputs[0]) if block.inputs else None
    return block is not None and block.kind in MATRIX_KINDS and len(block.ops) == 1
