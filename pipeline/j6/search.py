"""What a changed dtype or a changed layer costs, without compiling again: the query of a mixed-precision search.

The graph is imported, fused and tiled once; a query prices only the blocks that touch the changed tensors. Placement stays as compiled: a larger
tensor that would have to leave on-chip memory is charged for its compute and the transfers it already has, not for new spills.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.errors import ModelError
from pipeline.j6.chip import ChipProfile
from pipeline.j6.compiler import Compilation, CompileOptions
from pipeline.j6.cost import block_cost, compute_of
from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_onnx
from pipeline.j6.ir import DTYPE_BYTES, Tensor
from pipeline.j6.tile import block_traffic


class DtypeSearch:
    """Prices changes of one model on one chip. Times are simulated ms on the BPU, blocks in order."""

    def __init__(self, path: Path, chip: ChipProfile, options: CompileOptions | None = None) -> None:
        choices = options or CompileOptions()
        fused = fuse(import_onnx(path, choices.shapes, choices.assume_dtype), enable=choices.optimize_level != "O0")
        self._work = Compilation(fused, chip, choices)
        best = self._work.best()
        self._placement = best.tiles.placement
        self._passes = {index: chain.weight_passes for chain in best.tiles.chains for index in chain.blocks}
        self._touching: dict[str, list[int]] = {}
        for block in fused.blocks:
            for name in {name for op in block.ops for name in (*op.operands, *op.outputs)}:
                self._touching.setdefault(name, []).append(block.index)
        self._base = [cost.total_ms for cost in best.costs]

    @property
    def total_ms(self) -> float:
        """Time of all blocks as the file has them."""
        return sum(self._base)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names that a query accepts."""
        return tuple(self._touching)

    def tensor(self, name: str) -> Tensor:
        """A tensor as the file has it: the start of a changed layer. Raises `ModelError` for an unknown name."""
        if name not in self._touching:
            raise ModelError(f"{self._work.fused.graph.name}: no block touches a tensor {name!r}")
        return self._work.fused.tensors[name]

    def extra_ms(self, dtypes: Mapping[str, str]) -> float:
        """Time that changing dtypes (tensor name -> "int8" or "int16") adds; negative when it saves.

        Raises `ModelError` for an unknown tensor or dtype.
        """
        wrong = next((dtype for dtype in dtypes.values() if dtype not in DTYPE_BYTES), None)
        if wrong is not None:
            raise ModelError(f"{self._work.fused.graph.name}: {wrong!r} is no dtype")
        return self.extra_ms_of({name: replace(self.tensor(name), dtype=dtype) for name, dtype in dtypes.items()})

    def extra_ms_of(self, changed: Mapping[str, Tensor]) -> float:
        """Time that changed tensors add: other dtypes or other shapes of weights and activations, for example a convolution of another width.

        Raises `ModelError` for an unknown tensor.
        """
        affected = {index for name in changed for index in self._touching_of(name)}
        tensors = ChainMap(dict(changed), self._work.fused.tensors)
        return sum(self._cost_ms(index, tensors) - self._base[index] for index in sorted(affected))

    def _touching_of(self, name: str) -> list[int]:
        self.tensor(name)
        return self._touching[name]

    def _cost_ms(self, index: int, tensors: Mapping[str, Tensor]) -> float:
        work = self._work
        block = work.fused.blocks[index]
        traffic = block_traffic(work.fused, block, self._placement, work.chip, work.options.nv12, self._passes.get(index, 1), tensors)
        return block_cost(compute_of(block, work.assignments[index], tensors, work.rates), traffic, work.rates).total_ms
