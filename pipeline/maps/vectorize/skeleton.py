"""From skeleton pixels to nodes and the pixel paths between them.

Pixels are linked to their four direct neighbours, and to a diagonal one where no direct neighbour joins the two already. Under this rule a
stair is a path and not a chain of small triangles. A pixel with two links is part of a path, any other one is a node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csr_matrix

from pipeline.maps.frames import FloatArray

IntArray = NDArray[np.int64]
_MAX_LINKS = 4  # a diagonal neighbour is linked only where the two direct ones beside it are off


@dataclass(frozen=True)
class SkeletonPixels:
    """Skeleton pixels of a mask of any size: sorted by row, then column, and the distance of each to the background, px."""

    rows: IntArray  # (S,)
    columns: IntArray  # (S,)
    radius_px: FloatArray  # (S,)


@dataclass(frozen=True)
class SkeletonPaths:
    """Nodes and paths as indices of skeleton pixels. Path e is `pixels[offsets[e]:offsets[e + 1]]`, in order, end nodes included."""

    nodes: IntArray  # (N,) pixel of each node
    pixels: IntArray  # (P,)
    offsets: IntArray  # (E + 1,)
    ends: IntArray  # (E, 2) nodes at the two ends of each path


def trace(pixels: SkeletonPixels) -> SkeletonPaths:
    """Split a skeleton into nodes and paths. A loop without a node gets its first pixel as node, at which its path starts and ends."""
    links, counts = _links(pixels)
    order, offsets, is_node = _walk(links, counts)
    nodes = np.flatnonzero(is_node)
    node_of = np.cumsum(is_node) - 1
    ends = np.stack([node_of[order[offsets[:-1]]], node_of[order[offsets[1:] - 1]]], axis=1)
    return SkeletonPaths(nodes, order, offsets, ends)


def _links(pixels: SkeletonPixels) -> tuple[IntArray, IntArray]:
    """Linked pixels of each pixel (S, 4), of which the first `counts` (S,) are set."""
    width = int(pixels.columns.max(initial=0)) + 3
    return _linked(pixels.rows * width + pixels.columns + 1, width)


@numba.njit(cache=True)
def _linked(keys: IntArray, width: int) -> tuple[IntArray, IntArray]:
    """See `_links`; `keys` are the sorted places of the pixels in rows of `width`."""
    number = len(keys)
    links, counts = np.empty((number, _MAX_LINKS), dtype=np.int64), np.zeros(number, dtype=np.int64)
    below = 0  # first pixel that is not before the place south-west of the current one
    for here in range(number):
        key = keys[here]
        while below < number and keys[below] < key + width - 1:
            below += 1
        west = here > 0 and keys[here - 1] == key - 1
        east = here + 1 < number and keys[here + 1] == key + 1
        at = below
        south_west = south = south_east = -1
        while at < number and keys[at] <= key + width + 1:
            if keys[at] == key + width - 1:
                south_west = at
            elif keys[at] == key + width:
                south = at
            else:
                south_east = at
            at += 1
        found = (here + 1 if east else -1, south, south_east if not east and south < 0 else -1, south_west if not west and south < 0 else -1)
        for other in found:
            if other >= 0:
                links[here, counts[here]] = other
                counts[here] += 1
                links[other, counts[other]] = here
                counts[other] += 1
    return links, counts


@numba.njit(cache=True)
def _walk(links: IntArray, counts: IntArray) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Pixels of all paths, their offsets, and which pixels are nodes."""
    number = len(counts)
    is_node = counts != 2
    order, offsets = np.empty(2 * links.size + number, dtype=np.int64), np.empty(links.size + number + 1, dtype=np.int64)
    walked = np.zeros(links.shape, dtype=np.bool_)
    passed = np.zeros(number, dtype=np.bool_)
    offsets[0] = length = paths = 0
    for loops in range(2):  # first what starts at a node, then loops without one
        for start in range(number):
            if loops and not is_node[start] and not passed[start]:
                is_node[start] = True
            elif loops or not is_node[start]:
                continue
            for slot in range(counts[start]):
                if walked[start, slot]:
                    continue
                walked[start, slot] = True
                order[length] = start
                length += 1
                before, here = start, links[start, slot]
                while not is_node[here]:
                    order[length] = here
                    length += 1
                    passed[here] = True
                    following = links[here, 0] if links[here, 0] != before else links[here, 1]
                    before, here = here, following
                order[length] = here
                length += 1
                for back in range(counts[here]):
                    if links[here, back] == before:
                        walked[here, back] = True
                paths += 1
                offsets[paths] = length
    return order[:length], offsets[: paths + 1], is_node


def graph_of(links: IntArray, number: int) -> csr_matrix:
    """Sparse adjacency of `number` vertices from links (E, 2), one direction each."""
    return coo_matrix((np.ones(len(links), dtype=np.int8), (links[:, 0], links[:, 1])), shape=(number, number)).tocsr()
