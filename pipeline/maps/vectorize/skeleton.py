"""From skeleton pixels to nodes and the pixel paths between them, with array operations only.

Pixels are linked to their four direct neighbours, and to a diagonal one where no direct neighbour joins the two already. Under this rule a
stair is a path and not a chain of small triangles. A pixel with two links is part of a path, any other one is a node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import breadth_first_order, connected_components

from pipeline.maps.frames import FloatArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class SkeletonPixels:
    """Skeleton pixels of a mask of any size: sorted by row, then column, and the distance of each to the background, px."""

    rows: IntArray  # (S,)
    columns: IntArray  # (S,)
    radius_px: FloatArray  # (S,)


@dataclass(frozen=True)
class SkeletonPaths:
    """Nodes and paths as indices of skeleton pixels."""

    nodes: IntArray  # (N,) pixel of each node
    paths: list[IntArray]  # pixels of each path in order, end nodes included
    ends: IntArray  # (E, 2) nodes at the two ends of each path


def trace(pixels: SkeletonPixels) -> SkeletonPaths:
    """Split a skeleton into nodes and paths. A loop without a node gets its first pixel as node, at which its path starts and ends."""
    number = len(pixels.rows)
    links = _links(pixels)
    on_path = np.bincount(links.ravel(), minlength=number) == 2
    on_path[_loop_anchors(links, on_path)] = False
    nodes = np.flatnonzero(~on_path)
    node_of = np.full(number, -1)
    node_of[nodes] = np.arange(len(nodes))
    on_path_ends = on_path[links].sum(axis=1)
    direct = links[on_path_ends == 0]
    chains, chain_ends = _chains(on_path, links[on_path_ends == 2], links[on_path_ends == 1])
    paths = [*direct, *(np.concatenate([[end[0]], chain, [end[1]]]) for chain, end in zip(chains, chain_ends, strict=True))]
    return SkeletonPaths(nodes, paths, node_of[np.concatenate([direct, chain_ends])])


def _links(pixels: SkeletonPixels) -> IntArray:
    """Linked pairs of pixels (E, 2)."""
    rows, columns = pixels.rows, pixels.columns
    width = int(columns.max(initial=0)) + 3
    keys = rows * width + columns + 1
    east, south, south_east, south_west, west = (_find(keys, keys + step) for step in (1, width, width + 1, width - 1, -1))
    south_east[(east >= 0) | (south >= 0)] = -1
    south_west[(west >= 0) | (south >= 0)] = -1
    everyone = np.arange(len(keys))
    return np.concatenate([np.stack([everyone[to >= 0], to[to >= 0]], axis=1) for to in (east, south, south_east, south_west)])


def _find(keys: IntArray, wanted: IntArray) -> IntArray:
    """Position of each wanted key in the sorted keys, -1 where it is absent."""
    if len(keys) == 0:
        return np.empty(0, dtype=np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, at, -1)


def _loop_anchors(links: IntArray, on_path: NDArray[np.bool_]) -> IntArray:
    """First pixel of every loop that has no node."""
    inner = links[on_path[links].all(axis=1)]
    _, part = connected_components(graph_of(inner, len(on_path)), directed=False)
    open_parts = np.zeros(part.max(initial=-1) + 1, dtype=bool)
    open_parts[part[~on_path]] = True
    open_parts[part[np.bincount(inner.ravel(), minlength=len(on_path)) < 2]] = True
    closed_parts, first = np.unique(part, return_index=True)
    return first[~open_parts[closed_parts]]


def _chains(on_path: NDArray[np.bool_], inner: IntArray, outer: IntArray) -> tuple[list[IntArray], IntArray]:
    """Pixels with two links as chains in order (C arrays), and the node pixels before and after each (C, 2).

    All chains are tied end to end into one, so that a single breadth-first walk orders all their pixels.

    Args:
        on_path: (S,) the pixels in question; there are no loops of them alone.
        inner: links between two of them.
        outer: links between one of them and a node pixel; every chain has two.
    """
    if len(outer) == 0:
        return [], np.empty((0, 2), dtype=np.int64)
    _, part = connected_components(graph_of(inner, len(on_path)), directed=False)
    swap = ~on_path[outer[:, 0]]
    outer = np.where(swap[:, None], outer[:, ::-1], outer)
    outer = outer[np.lexsort((outer[:, 1], part[outer[:, 0]]))]
    starts, finishes, node_pixels = outer[0::2, 0], outer[1::2, 0], outer[:, 1].reshape(-1, 2)
    ties = np.stack([finishes[:-1], starts[1:]], axis=1)
    walk = breadth_first_order(graph_of(np.concatenate([inner, ties]), len(on_path)), starts[0], directed=False, return_predecessors=False)
    lengths = np.bincount(part[on_path])[part[starts]]
    return np.split(walk, np.cumsum(lengths)[:-1]), node_pixels


def graph_of(links: IntArray, number: int) -> csr_matrix:
    """Sparse adjacency of `number` vertices from links (E, 2), one direction each."""
    return coo_matrix((np.ones(len(links), dtype=np.int8), (links[:, 0], links[:, 1])), shape=(number, number)).tocsr()
