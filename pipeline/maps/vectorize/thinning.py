"""Thinning of binary masks to one-pixel skeletons, and the removal of pixel noise before it.

Both depend on a bounded neighbourhood only, so a tile with a wide enough margin gives the same result as the whole mask.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

MaskArray = NDArray[np.uint8]
WordArray = NDArray[np.uint64]


def remove_noise(mask: MaskArray, noise_px: int) -> MaskArray:
    """A mask (H, W) of 0 and 1 without specks, holes, bumps and dents that fit into a square of `noise_px` pixels.

    Specks are 8-connected, holes 4-connected. Bumps and dents are what a 3x3 median changes, if it is small; bumps go only from shapes at
    least three pixels wide, as the median would break thinner lines. What is outside the mask counts as background.
    """
    if noise_px < 1:
        return mask
    whole = _without_specks_and_holes(mask, noise_px)
    framed = cv2.copyMakeBorder(whole, 1, 1, 1, 1, cv2.BORDER_CONSTANT, value=(0,))
    changed = (whole != cv2.medianBlur(framed, 3)[1:-1, 1:-1]).astype(np.uint8)
    contours, _ = cv2.findContours(changed, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    for contour in contours:
        if max(cv2.boundingRect(contour)[2:]) > noise_px:
            cv2.drawContours(changed, [contour], 0, (0,), cv2.FILLED)
    solid = cv2.dilate(cv2.erode(framed, np.ones((3, 3), np.uint8)), np.ones((11, 11), np.uint8))[1:-1, 1:-1]
    changed = changed * ((whole == 0) | (solid != 0))
    return _without_specks_and_holes(whole ^ changed, noise_px)


def _without_specks_and_holes(mask: MaskArray, noise_px: int) -> MaskArray:
    contours, hierarchy = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    specks, holes = set(), set()
    for number, contour in enumerate(contours):
        size = max(cv2.boundingRect(contour)[2:])
        parent = hierarchy[0, number, 3]
        if parent < 0 and size <= noise_px:
            specks.add(number)
        elif parent >= 0 and parent not in specks and size <= noise_px + 2:  # a hole's contour runs on the pixels around it
            holes.add(number)
    cleaned = mask.copy()
    for small, value in ((specks, 0), (holes, 1)):
        for number in small:  # one by one: drawn together, contours that share a pixel would cancel out
            cv2.drawContours(cleaned, [contours[number]], 0, (value,), cv2.FILLED)
    return cleaned


def thin(mask: MaskArray) -> MaskArray:
    """Skeleton of a mask (H, W) of 0 and 1: one pixel wide, 8-connected, same connected parts and holes.

    Z. Guo and R. W. Hall, Parallel thinning with two-subiteration algorithms, Communications of the ACM 32 (1989), algorithm A1, on 64 pixels
    at a time: a row is a string of bits, a neighbour a shift, a condition a few bitwise operations. Only words whose surroundings changed
    in the last two sub-iterations are looked at again. The result at a pixel depends on neighbours within the line width.
    """
    height, width = mask.shape
    words = np.zeros((height + 2, width // 64 + 3), dtype=np.uint64)  # a border of empty words on every side
    row_bytes = np.packbits(mask, axis=1, bitorder="little")
    words.view(np.uint8)[1:-1, 8 : 8 + row_bytes.shape[1]] = row_bytes
    flat, stride = words.ravel(), words.shape[1]
    candidates = recent = np.flatnonzero(flat)  # every word is looked at once by each of the two sub-iterations
    second, idle = False, 0
    while idle < 2:
        deleted = _deletable(flat, candidates, stride, second)
        hit = deleted != 0
        changed = candidates[hit]
        flat[changed] ^= deleted[hit]
        idle = 0 if len(changed) else idle + 1
        near_change = _with_neighbours(np.concatenate([changed, recent]), words.shape).ravel()
        candidates, recent, second = np.flatnonzero(near_change & (flat != 0)), changed, not second
    skeleton_bytes = words.view(np.uint8)[1:-1, 8 : 8 + row_bytes.shape[1]]
    return np.unpackbits(skeleton_bytes, axis=1, count=width, bitorder="little")


def _with_neighbours(at: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which words of a grid are at or next to the given places."""
    marked = np.zeros(shape, dtype=bool)
    marked.ravel()[at] = True
    beside = marked.copy()
    beside[:, 1:] |= marked[:, :-1]
    beside[:, :-1] |= marked[:, 1:]
    around = beside.copy()
    around[1:] |= beside[:-1]
    around[:-1] |= beside[1:]
    return around


def _deletable(flat: WordArray, at: NDArray[np.int64], stride: int, second: bool) -> WordArray:
    """Bits of the words `at` that a sub-iteration deletes. p2 to p9 are a pixel's neighbours, north first, clockwise, as in the paper."""
    p9, p2, p3 = _neighbours(flat, at - stride)
    p8, p1, p4 = _neighbours(flat, at)
    p7, p6, p5 = _neighbours(flat, at + stride)
    a1, a2, a3, a4 = p9 | p2, p3 | p4, p5 | p6, p7 | p8
    b1, b2, b3, b4 = p2 | p3, p4 | p5, p6 | p7, p8 | p9
    c1, c2, c3, c4 = ~p2 & a2, ~p4 & a3, ~p6 & a4, ~p8 & a1
    one_crossing = ((c1 ^ c2) & ~(c3 | c4)) | ((c3 ^ c4) & ~(c1 | c2))
    two_or_three = _at_least_two(a1, a2, a3, a4) & _at_least_two(b1, b2, b3, b4) & ~(a1 & a2 & a3 & a4 & b1 & b2 & b3 & b4)
    kept_side = (b1 | ~p5) & p4 if second else (b3 | ~p9) & p8
    deletable: WordArray = p1 & one_crossing & two_or_three & ~kept_side
    return deletable


def _neighbours(flat: WordArray, at: NDArray[np.int64]) -> tuple[WordArray, WordArray, WordArray]:
    """West neighbours, the pixels themselves and east neighbours of the words `at`; pixel 64 k + i of a row is bit i of its word k."""
    one, rest = np.uint64(1), np.uint64(63)
    west, middle, east = flat[at - 1], flat[at], flat[at + 1]
    return (middle << one) | (west >> rest), middle, (middle >> one) | (east << rest)


def _at_least_two(a: WordArray, b: WordArray, c: WordArray, d: WordArray) -> WordArray:
    return np.bitwise_or((a & b) | (c & d), (a | b) & (c | d))
