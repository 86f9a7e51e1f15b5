"""Thinning of binary masks to one-pixel skeletons, and the removal of pixel noise before it.

Both depend on a bounded neighbourhood only, so a tile with a wide enough margin gives the same result as the whole mask.
"""

from __future__ import annotations

import cv2
import numba
import numpy as np
from numpy.typing import NDArray

MaskArray = NDArray[np.uint8]
_SQUARE_3 = np.ones((3, 3), np.uint8)
_SQUARE_11 = np.ones((11, 11), np.uint8)


def remove_noise(mask: MaskArray, noise_px: int) -> MaskArray:
    """A mask (H, W) of 0 and 1 without specks, holes, bumps and dents that fit into a square of `noise_px` pixels.

    Specks are 8-connected, holes 4-connected. Bumps and dents are what a 3x3 median changes, if it is small; bumps go only from shapes at
    least three pixels wide, as the median would break thinner lines. What is outside the mask counts as background.
    """
    if noise_px < 1:
        return mask
    framed = _framed(mask)
    _flip_small_parts(framed, 1, noise_px)
    _flip_small_parts(framed, 0, noise_px)
    changed = framed ^ cv2.medianBlur(framed, 3).astype(np.uint8, copy=False)
    large = changed.copy()
    _flip_small_parts(large, 1, noise_px)
    solid = cv2.dilate(cv2.erode(framed, _SQUARE_3), _SQUARE_11).astype(np.uint8, copy=False)
    framed ^= (changed ^ large) & ((framed ^ 1) | solid)
    _flip_small_parts(framed, 1, noise_px)
    _flip_small_parts(framed, 0, noise_px)
    return framed[1:-1, 1:-1]


def _framed(mask: MaskArray) -> MaskArray:
    """A copy with a border of 0, one pixel wide."""
    framed: MaskArray = cv2.copyMakeBorder(mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=(0,)).astype(np.uint8, copy=False)
    return framed


def _flip_small_parts(mask: MaskArray, value: int, size_px: int) -> None:
    """Flip, in place, the parts of pixels of a value that fit into a square of `size_px`; parts of 1 are 8-connected, parts of 0 4-connected.

    A part is entered at pixels with nothing of it above or to the left, and left as soon as it proves to be too large.
    """
    inner, above, left = mask[1:-1, 1:-1], mask[:-2, 1:-1], mask[1:-1, :-2]
    corners = inner & ~(above | left) if value == 1 else ~inner & above & left
    _flip_parts_at(mask, np.flatnonzero(corners.view(np.bool_)), value, size_px)  # numpy is many times as fast on bool


@numba.njit(cache=True)
def _flip_parts_at(mask: MaskArray, corners: NDArray[np.int64], value: int, size_px: int) -> None:
    """See `_flip_small_parts`; `corners` are the places, in the mask without its border, at which parts may be entered."""
    height, width = mask.shape
    reach = 8 if value == 1 else 4
    steps = ((0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1))
    part = np.empty((size_px * size_px + 1, 2), dtype=np.int64)
    for corner in corners:
        row, column = corner // (width - 2) + 1, corner % (width - 2) + 1
        if mask[row, column] != value:  # of a part that is flipped already
            continue
        part[0] = row, column
        mask[row, column] = 2
        found, looked = 1, 0
        top, bottom, left, right = row, row, column, column
        small = True
        while looked < found and small:
            for k in range(reach):
                r, c = part[looked, 0] + steps[k][0], part[looked, 1] + steps[k][1]
                if mask[r, c] == value:
                    top, bottom, left, right = min(top, r), max(bottom, r), min(left, c), max(right, c)
                    small = max(bottom - top, right - left) < size_px and 0 < r < height - 1 and 0 < c < width - 1
                    if not small:
                        break
                    part[found] = r, c
                    found += 1
                    mask[r, c] = 2
            looked += 1
        for k in range(found):
            mask[part[k, 0], part[k, 1]] = 1 - value if small else value


def _deletable_codes() -> NDArray[np.bool_]:
    """(2, 256): which neighbourhoods the first and the second sub-iteration of Guo and Hall's A1 delete.

    Bit k of a code is the paper's neighbour p(k + 2): north first, clockwise.
    """
    p2, p3, p4, p5, p6, p7, p8, p9 = (np.arange(256) >> np.arange(8)[:, None] & 1).astype(bool)
    crossings = sum((~a & (b | c)).astype(int) for a, b, c in ((p2, p3, p4), (p4, p5, p6), (p6, p7, p8), (p8, p9, p2)))
    pairs = [sum((a | b).astype(int) for a, b in of) for of in (((p9, p2), (p3, p4), (p5, p6), (p7, p8)), ((p2, p3), (p4, p5), (p6, p7), (p8, p9)))]
    neighbours = np.minimum(*pairs)
    common = (crossings == 1) & (neighbours >= 2) & (neighbours <= 3)
    return np.stack([common & ~((p6 | p7 | ~p9) & p8), common & ~((p2 | p3 | ~p5) & p4)])


_DELETABLE = _deletable_codes()


def thin(mask: MaskArray) -> MaskArray:
    """Skeleton of a mask (H, W) of 0 and 1: one pixel wide, 8-connected, same connected parts and holes.

    Z. Guo and R. W. Hall, Parallel thinning with two-subiteration algorithms, Communications of the ACM 32 (1989), algorithm A1. A pixel is
    looked at again only after a neighbour was deleted. The result at a pixel depends on neighbours within the line width.
    """
    framed = _framed(mask)
    outline = framed & ~cv2.erode(framed, _SQUARE_3).astype(np.uint8, copy=False)  # pixels inside stay until a neighbour goes
    _thin(framed.ravel(), outline.ravel(), framed.shape[1], _DELETABLE)
    return framed[1:-1, 1:-1]


@numba.njit(cache=True)
def _thin(flat: MaskArray, outline: MaskArray, stride: int, deletable: NDArray[np.bool_]) -> None:
    """Thin a mask with an empty border in place, from its outline inwards; `stride` is its row length."""
    steps = np.array([-stride, 1 - stride, 1, 1 + stride, stride, stride - 1, -1, -1 - stride])
    first = np.flatnonzero(outline)
    looks = outline * np.uint8(2)  # of the two sub-iterations, how many have yet to look at the pixel
    queue, deleted = np.empty(flat.sum(), dtype=np.int64), np.empty(flat.sum(), dtype=np.int64)
    queue[: len(first)] = first
    waiting, second = len(first), 0
    while waiting > 0:
        kept = gone = 0
        for position in range(waiting):
            at = queue[position]
            code = 0
            for bit in range(8):
                code |= flat[at + steps[bit]] << bit
            looks[at] -= 1
            if deletable[second, code]:
                deleted[gone] = at
                gone += 1
                looks[at] = 0
            elif looks[at] > 0:
                queue[kept] = at
                kept += 1
        for position in range(gone):
            flat[deleted[position]] = 0
        for position in range(gone):
            for bit in range(8):
                beside = deleted[position] + steps[bit]
                if flat[beside]:
                    if looks[beside] == 0:
                        queue[kept] = beside
                        kept += 1
                    looks[beside] = 2
        waiting, second = kept, 1 - second
