"""Strides and allocation sizes of tensors as the runtime wants them (J6 manual 3.0.17, alignment_rule; S100 manual, dynamic_input_introduction).

Rows are padded to the chip's stride alignment, planes follow from rows, and no tensor is allocated smaller than `min_alloc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pipeline.errors import ModelError

PLANE_ROWS = 32


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def aligned_strides(shape: tuple[int, ...], element_bytes: int, stride_align: int, planar: bool = False) -> tuple[int, ...]:
    """Byte strides of a row-major tensor whose rows (last axis) are padded to `stride_align` bytes.

    `planar` inputs [N,C,H,W] also pad the number of rows of a plane. Official case: [1,3,212,212] of U16 at 32 B -> (301056, 100352, 448, 2), a
    plane of 224 rows; the case allows multiples of 16 and of 32 rows, the larger is taken.
    """
    if not shape:
        return ()
    strides = [element_bytes]
    if len(shape) > 1:
        strides.append(round_up(shape[-1] * element_bytes, stride_align))
    for axis in range(len(shape) - 2, 0, -1):
        rows = round_up(shape[axis], PLANE_ROWS) if planar and len(shape) == 4 and axis == 2 else shape[axis]
        strides.append(strides[-1] * rows)
    return tuple(reversed(strides))


def aligned_bytes(shape: tuple[int, ...], element_bytes: int, stride_align: int, min_alloc: int, planar: bool = False) -> int:
    """Bytes to allocate for a model input (`planar`) or output."""
    if not shape or len(shape) == 1:
        return max(round_up(prod(shape) * element_bytes, min_alloc), min_alloc)
    return max(round_up(aligned_strides(shape, element_bytes, stride_align, planar)[0] * shape[0], min_alloc), min_alloc)


@dataclass(frozen=True)
class Nv12Layout:
    """Strides of an NV12 image: Y is [1,H,W,1], UV is [1,H/2,W/2,2]; bytes."""

    y_strides: tuple[int, int, int, int]
    uv_strides: tuple[int, int, int, int]

    @property
    def bytes(self) -> int:
        """Size of both planes."""
        return self.y_strides[0] + self.uv_strides[0]


def nv12_layout(height: int, width: int, stride_align: int) -> Nv12Layout:
    """Layout of one NV12 image.

    Official case: 220x220 at 32 B -> Y (49280,224,1,1), UV (24640,224,2,1). Raises `ModelError` for an odd height or width.
    """
    if height % 2 or width % 2:
        raise ModelError(f"NV12 needs an even height and width, got {height}x{width}")
    row = round_up(width, stride_align)
    return Nv12Layout((row * height, row, 1, 1), (row * height // 2, row, 2, 1))
