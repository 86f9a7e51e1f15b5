"""Tiling of chains: blocks that run depth-first over pieces of their tensors, so that what lies between them never leaves the chip.

A piece is a band of image rows (`rows`), or an independent slice such as an attention head (`slices`). A chain of row-local blocks keeps, for every
tensor, the rows that the next band still needs: the halo of the kernels below it, and what a shortcut waits for while the longer way catches up.
Halo rows are kept in line buffers, not computed again; they take room, which is what limits a chain. The weights of a chain are held for all bands;
where the chip's weight buffer is known and too small for them they are loaded again for every band, beside the compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from pipeline.j6.cost import kernel_rows
from pipeline.j6.fuse import ELEMENTWISE_KINDS, Block, FusedGraph
from pipeline.j6.ir import MATRIX_KINDS, Tensor

ROW_LOCAL_KINDS = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "Concat", "Slice", "Split", "Resize", "Upsample"}) | ELEMENTWISE_KINDS
SLICE_LOCAL_KINDS = frozenset({"MatMul", "Softmax", "LayerNormalization"}) | ELEMENTWISE_KINDS
MAX_CHAIN_BLOCKS = 32  # longer chains need more line buffers than they save (assumed)
MIN_BAND_ROWS = 1  # a band is at least one row
MIN_SLICES = 2  # one slice is worked on while the next one fills


@dataclass(frozen=True)
class Life:
    """Blocks between which a tensor exists: written by `start` (-1: a model input), read last by `end`."""

    start: int
    end: int


@dataclass(frozen=True)
class Chain:
    """Blocks that run depth-first together. `workspace_bytes` holds one piece of everything and the halo rows."""

    kind: str  # rows | slices
    blocks: tuple[int, ...]
    tensors: tuple[str, ...]
    pieces: int
    halo_bytes: int
    weight_bytes: int
    weights_held: bool
    workspace_bytes: int

    @property
    def first(self) -> int:
        """Index of the first block."""
        return self.blocks[0]

    @property
    def last(self) -> int:
        """Index of the last block."""
        return self.blocks[-1]

    @property
    def weight_passes(self) -> int:
        """How often the weights cross the bus in a frame."""
        return 1 if self.weights_held else self.pieces


@dataclass(frozen=True)
class ChainLimits:
    """A chain uses at most `room_bytes` of on-chip memory, holds at most `weight_bytes` of weights (None: no known limit), and crosses no cut."""

    room_bytes: int
    weight_bytes: int | None = None
    cuts: frozenset[int] = frozenset()


class ChainPlanner:
    """Grows chains tensor by tensor, within `limits`."""

    def __init__(self, fused: FusedGraph, lives: Mapping[str, Life], sizes: Mapping[str, int], limits: ChainLimits) -> None:
        self.fused, self.lives, self.sizes, self.limits = fused, lives, sizes, limits
        self.chain_of: dict[int, Chain] = {}

    def chains(self) -> list[Chain]:
        """All chains in order of their first block."""
        unique = {chain.blocks: chain for chain in self.chain_of.values()}
        return sorted(unique.values(), key=lambda chain: chain.first)

    def add(self, name: str) -> bool:
        """Try to keep `name` on chip in pieces, joining the chains that its blocks already belong to; False when it does not fit or does not pay."""
        members = piece_segment(self.fused, name, self.lives[name])
        if members is None:
            return False
        kind, segment = members
        old = list({chain.blocks: chain for index in segment if (chain := self.chain_of.get(index))}.values())
        if any(chain.kind != kind for chain in old):
            return False
        blocks = sorted({*segment, *(index for chain in old for index in chain.blocks)})
        tensors = [*(tensor for chain in old for tensor in chain.tensors), name]
        grown = self._chain(kind, blocks, tensors)
        if grown is None or not self._pays(grown, old, name):
            return False
        self.chain_of.update(dict.fromkeys(blocks, grown))
        return True

    def _chain(self, kind: str, blocks: Sequence[int], tensors: Sequence[str]) -> Chain | None:
        """The chain with the fewest pieces that fits; None when nothing fits."""
        if len(blocks) > MAX_CHAIN_BLOCKS or blocks[-1] - blocks[0] > 2 * MAX_CHAIN_BLOCKS:
            return None
        if any(blocks[0] < cut <= blocks[-1] for cut in self.limits.cuts):
            return None
        weights = sum(self.fused.tensors[name].bytes for index in blocks for name in self.fused.blocks[index].weights)
        held = self.limits.weight_bytes is None or weights <= self.limits.weight_bytes
        peak = self._peak(blocks, tensors)
        images, limit = self._most_pieces(kind, tensors)
        halo = halo_bytes(self.fused, blocks, tensors, self.sizes) if kind == "rows" else 0
        for kept in (0, halo) if images > 1 else (halo,):  # whole images need no halo
            free = self.limits.room_bytes - kept
            pieces = max(ceil(peak / free), 1) if free > 0 else limit + 1
            if pieces <= (images if kept < halo else limit):
                return Chain(kind, tuple(blocks), tuple(sorted(tensors)), pieces, kept, weights, held, kept + ceil(peak / pieces))
        return None

    def _peak(self, blocks: Sequence[int], tensors: Sequence[str]) -> int:
        """Most bytes of whole tensors alive at one block; a piece of them is alive while the chain runs."""
        return max(sum(self.sizes[name] for name in tensors if self.lives[name].start <= index <= self.lives[name].end) for index in blocks)

    def _most_pieces(self, kind: str, tensors: Sequence[str]) -> tuple[int, int]:
        """(independent images, largest number of pieces) that all tensors allow."""
        shapes = [self.fused.tensors[name].shape for name in tensors]
        if kind == "slices":
            return 1, min(prod(shape[:-2]) for shape in shapes)
        images = min(shape[0] for shape in shapes)
        return images, images * min(max(shape[2] // MIN_BAND_ROWS, 1) for shape in shapes)

    def _pays(self, grown: Chain, old: Sequence[Chain], name: str) -> bool:
        """True when loading weights again moves fewer bytes than the tensor would through DDR."""
        again = (grown.weight_passes - 1) * grown.weight_bytes - sum((chain.weight_passes - 1) * chain.weight_bytes for chain in old)
        if again <= 0:
            return True
        readers = sum(name in self.fused.blocks[index].inputs for index in grown.blocks)
        return again < self.sizes[name] * (1 + readers)


def piece_segment(fused: FusedGraph, name: str, life: Life) -> tuple[str, list[int]] | None:
    """("rows" or "slices", blocks that a tensor ties together) when all of them can run piece by piece; None otherwise."""
    shape = fused.tensors[name].shape
    if len(shape) < 3 or life.start < 0 or life.end - life.start > MAX_CHAIN_BLOCKS:
        return None
    segment = _between(fused, name, life)
    indices = sorted({block.index for block in segment})
    if len(shape) == 4 and all(_row_local(block, fused.tensors) for block in segment):
        return "rows", indices
    if prod(shape[:-2]) >= MIN_SLICES and all(_slice_local(block, fused.tensors, shape[:-2]) for block in segment):
        return "slices", indices
    return None


def _between(fused: FusedGraph, name: str, life: Life) -> list[Block]:
    """Writer and readers of a tensor, and the blocks on the way from it to its last reader; what only happens to run in between can move."""
    blocks = fused.blocks[life.start : life.end + 1]
    reached, downstream = {name}, []
    for block in blocks[1:]:
        if reached.intersection(block.inputs):
            reached.update(block.outputs)
            downstream.append(block)
    needed, segment = set(blocks[-1].inputs), [blocks[-1]]
    for block in reversed(downstream[:-1]):
        if name in block.inputs or needed.intersection(block.outputs):
            needed.update(block.inputs)
            segment.append(block)
    return [*segment, blocks[0]]


def _slice_local(block: Block, tensors: Mapping[str, Tensor], leading: tuple[int, ...]) -> bool:
    """Slice-local: every slice over the leading axes (batch, heads) depends on the same slice of the inputs only."""
    if block.kind == "Transpose":
        order = tuple(block.anchor.attrs.get("perm", ()))
        if order[: len(leading)] != tuple(range(len(leading))):
            return False
    elif block.kind not in SLICE_LOCAL_KINDS or (block.kind == "MatMul" and block.weights):
        return False
    return tensors[block.outputs[0]].shape[:-2] == leading


def _row_local(block: Block, tensors: Mapping[str, Tensor]) -> bool:
    """Row-local: an output row depends on a few input rows only."""
    if block.kind in ("Concat", "Split"):
        return int(block.anchor.attrs.get("axis", 0)) in (1, -3)
    if block.kind in MATRIX_KINDS and block.kind not in ("Conv", "ConvTranspose"):
        return False
    return block.kind in ROW_LOCAL_KINDS and len(tensors[block.outputs[0]].shape) == 4


def halo_rows(fused: FusedGraph, blocks: Sequence[int], tensors: Sequence[str]) -> dict[str, int]:
    """Rows of every tensor of a chain that must be kept from band to band.

    A block lags behind its input by the rows below that its kernel reads; through a chain the lags add up, in rows of each tensor's own
    resolution. A reader that lags by `lag` output rows still needs, of a tensor that itself lags by `behind`, the last
    lag x (rows in / rows out) + rows above - behind rows.
    """
    kept = dict.fromkeys(tensors, 0)
    lag: dict[str, int] = {}
    for index in blocks:
        block = fused.blocks[index]
        rows_out = fused.tensors[block.outputs[0]].shape[2]
        maps = [name for name in block.inputs if len(fused.tensors[name].shape) == 4]
        under_kernel = {fused.roots.get(name, name) for name in block.anchor.inputs}  # the others join after the kernel, row by row
        reach = {name: kernel_rows(block.anchor, fused.tensors) if name in under_kernel else (0, 0) for name in maps}
        ratios = {name: fused.tensors[name].shape[2] / rows_out for name in maps}
        own = max((ceil((lag.get(name, 0) + reach[name][1]) / ratios[name]) for name in maps), default=0)
        for name in maps:
            if name in kept:
                kept[name] = max(kept[name], ceil(own * ratios[name]) + reach[name][0] - lag.get(name, 0), 0)
        lag.update(dict.fromkeys(block.outputs, own))
    return kept


def halo_bytes(fused: FusedGraph, blocks: Sequence[int], tensors: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Bytes of all line buffers of a chain; `sizes` are on-chip bytes of whole tensors [N,C,H,W], a band works on one image."""
    total = 0
    for name, rows in halo_rows(fused, blocks, tensors).items():
        shape = fused.tensors[name].shape
        total += min(rows, shape[2]) * (sizes[name] // (shape[0] * shape[2]))
    return total
