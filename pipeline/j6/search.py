"""What a changed dtype costs, without compiling again: the query of a mixed-precision search.

The graph is imported, fused and tiled once; a query prices only the blocks that touch the changed tensors. Placement stays as compiled: a wider
tensor that would have to leave on-chip memory is charged for its compute and the transfers it already has, not for new spills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.errors import ModelError
from pipeline.j6.assign import assign
from pipeline.j6.chip import ChipProfile
from pipeline.j6.cost import BlockCost, block_cost, rates_of
from pipeline.j6.fuse import FusedGraph, fuse
from pipeline.j6.graph import import_onnx
from pipeline.j6.ir import DTYPE_BYTES
from pipeline.j6.plan import CompileOptions
from pipeline.j6.tile import block_traffic, tile


class DtypeSearch:
    """Prices dtype changes of one model on one chip. Times are simulated ms on the BPU, blocks in order."""

    def __init__(self, path: Path, chip: ChipProfile, options: CompileOptions | None = None) -> None:
        choices = options or CompileOptions()
        self._fused = fuse(import_onnx(path, choices.shapes, choices.assume_dtype), enable=choices.optimize_level != "O0")
        self._rates = rates_of(chip)
        self._chip, self._nv12 = chip, choices.nv12
        self._placement = tile(self._fused, chip, choices.nv12).placement
        self._assignments = [assign(block, self._fused.tensors, chip) for block in self._fused.blocks]
        self._touching: dict[str, list[int]] = {}
        for block in self._fused.blocks:
            for name in {name for op in block.ops for name in (*op.operands, *op.outputs)}:
                self._touching.setdefault(name, []).append(block.index)
        self._base = [self._cost(block.index, self._fused).total_ms for block in self._fused.blocks]

    @property
    def total_ms(self) -> float:
        """Time of all blocks with the dtypes of the file."""
        return sum(self._base)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names that `extra_ms` accepts."""
        return tuple(self._touching)

    def extra_ms(self, changes: Mapping[str, str]) -> float:
        """Time that changing dtypes (tensor name -> "int8" or "int16") adds; negative when it saves.

        Raises `ModelError` for an unknown tensor or dtype.
        """
        tensors = dict(self._fused.tensors)
        for name, dtype in changes.items():
            if name not in self._touching or dtype not in DTYPE_BYTES:
                raise ModelError(f"{self._fused.graph.name}: no tensor {name!r} with a block that could become {dtype!r}")
            tensors[name] = replace(tensors[name], dtype=dtype)
        changed = replace(self._fused, graph=replace(self._fused.graph, tensors=tensors))
        affected = sorted({index for name in changes for index in self._touching[name]})
        return sum(self._cost(index, changed).total_ms - self._base[index] for index in affected)

    def _cost(self, index: int, fused: FusedGraph) -> BlockCost:
        block = fused.blocks[index]
        traffic = block_traffic(fused, block, self._placement, self._chip, self._nv12)
        return block_cost(block, self._assignments[index], fused.tensors, traffic, self._rates)
