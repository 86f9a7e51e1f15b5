"""The line network that the refiner works on: nodes with a radius, and paths between them as one flat array of points."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np
from numpy.typing import NDArray

from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.skeleton import IntArray, SkeletonPaths, SkeletonPixels


@dataclass(frozen=True)
class Network:
    """Nodes and paths of a line drawing, pixel frame (x to the right, y down, the first pixel covers 0..1).

    Path e is `points[offsets[e]:offsets[e + 1]]` and runs from node `ends[e, 0]` to node `ends[e, 1]`, both included.
    """

    node_xy: FloatArray  # (N, 2)
    node_radius: FloatArray  # (N,) distance to the background, px
    ends: IntArray  # (E, 2)
    points: FloatArray  # (P, 2)
    radius: FloatArray  # (P,) distance to the background, px
    offsets: IntArray  # (E + 1,)

    @cached_property
    def degree(self) -> IntArray:
        """(N,) number of path ends at each node; a loop counts twice."""
        return np.bincount(self.ends.ravel(), minlength=len(self.node_xy))

    @cached_property
    def lengths(self) -> FloatArray:
        """(E,) length of each path, px."""
        return _path_lengths(self.points, self.offsets)

    def path(self, number: int) -> FloatArray:
        """Points (P_e, 2) of one path."""
        return self.points[self.offsets[number] : self.offsets[number + 1]]

    def select(self, keep: NDArray[np.bool_]) -> Network:
        """The network with some paths only; nodes stay, so a node may be left without a path."""
        order, offsets = _points_of(self.offsets, keep)
        return Network(self.node_xy, self.node_radius, self.ends[keep], self.points[order], self.radius[order], offsets)


@numba.njit(cache=True)
def _path_lengths(points: FloatArray, offsets: IntArray) -> FloatArray:
    """(E,) sum of the steps of each path."""
    lengths = np.zeros(len(offsets) - 1)
    for path in range(len(lengths)):
        for at in range(offsets[path] + 1, offsets[path + 1]):
            lengths[path] += math.hypot(points[at, 0] - points[at - 1, 0], points[at, 1] - points[at - 1, 1])
    return lengths


@numba.njit(cache=True)
def _points_of(offsets: IntArray, keep: NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Points of the kept paths (E,), end to end, and the offsets of these paths among them."""
    order, kept_offsets = np.empty(offsets[-1], dtype=np.int64), np.zeros(len(offsets), dtype=np.int64)
    paths = length = 0
    for path in range(len(keep)):
        if keep[path]:
            for at in range(offsets[path], offsets[path + 1]):
                order[length] = at
                length += 1
            paths += 1
            kept_offsets[paths] = length
    return order[:length], kept_offsets[: paths + 1]


def from_skeleton(pixels: SkeletonPixels, traced: SkeletonPaths) -> Network:
    """A traced skeleton as a network; points are pixel centres."""
    xy = np.stack([pixels.columns + 0.5, pixels.rows + 0.5], axis=1)
    radius = pixels.radius_px
    return Network(xy[traced.nodes], radius[traced.nodes], traced.ends, xy[traced.pixels], radius[traced.pixels], traced.offsets)


def contract(network: Network, paths: NDArray[np.bool_]) -> Network:
    """The network with the given paths (E,) shrunk to nothing: the nodes they join become one, at the mean of their places.

    The radius of the new node covers the circles of the old ones.
    """
    if not paths.any():
        return network
    cluster = _clusters(network.ends[paths], len(network.node_xy))
    size = np.bincount(cluster)
    xy = np.stack([np.bincount(cluster, weights=network.node_xy[:, axis]) / size for axis in (0, 1)], axis=1)
    radius = np.zeros(len(size))
    np.maximum.at(radius, cluster, network.node_radius + np.hypot(*(network.node_xy - xy[cluster]).T))
    kept = network.select(~paths)
    return Network(xy, radius, cluster[kept.ends], kept.points, kept.radius, kept.offsets)


@numba.njit(cache=True)
def _clusters(pairs: IntArray, number: int) -> IntArray:
    """Number of the connected part that each of `number` vertices is in, given linked pairs (C, 2)."""
    root = np.arange(number)
    for k in range(len(pairs)):
        first, second = pairs[k]
        while root[first] != first:
            root[first] = root[root[first]]
            first = root[first]
        while root[second] != second:
            root[second] = root[root[second]]
            second = root[second]
        root[max(first, second)] = min(first, second)
    cluster, clusters = np.empty(number, dtype=np.int64), 0
    for vertex in range(number):  # roots come before what hangs on them
        if root[vertex] == vertex:
            cluster[vertex] = clusters
            clusters += 1
        else:
            cluster[vertex] = cluster[root[vertex]]
    return cluster


def dissolve(network: Network) -> Network:
    """The network without nodes of degree two: the paths on both sides become one. A loop keeps one node."""
    through = network.degree == 2
    through[network.ends[network.ends[:, 0] == network.ends[:, 1], 0]] = False
    if not through.any():
        return network
    order, offsets, ends = _strung(network.points, network.offsets, network.ends, through)
    return Network(network.node_xy, network.node_radius, ends, network.points[order], network.radius[order], offsets)


@numba.njit(cache=True)
def _strung(points: FloatArray, offsets: IntArray, ends: IntArray, through: NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray]:
    """Paths strung together at `through` nodes, each used once: their points in order, the offsets and the end nodes of the chains."""
    number = len(ends)
    at_node = np.full((len(through), 2), -1)
    for path in range(number):
        for side in range(2):
            node = ends[path, side]
            if through[node]:
                at_node[node, 0 if at_node[node, 0] < 0 else 1] = path
    order, chain_offsets, chain_ends = np.empty(len(points), dtype=np.int64), np.empty(number + 1, dtype=np.int64), np.empty_like(ends)
    used = np.zeros(number, dtype=np.bool_)
    length = chains = chain_offsets[0] = 0
    for loops in range(2):  # first from ends that are no through nodes, then what is left: loops
        for start in range(number):
            if used[start] or (not loops and through[ends[start, 0]] and through[ends[start, 1]]):
                continue
            path, side = start, 1 if not loops and through[ends[start, 0]] else 0
            chain_ends[chains, 0] = ends[path, side]
            while True:
                used[path] = True
                count = offsets[path + 1] - offsets[path]
                for k in range(count):
                    at = offsets[path] + k if side == 0 else offsets[path + 1] - 1 - k
                    before = order[length - 1]
                    if k > 0 or length == chain_offsets[chains] or points[at, 0] != points[before, 0] or points[at, 1] != points[before, 1]:
                        order[length] = at
                        length += 1
                node = ends[path, 1 - side]
                following = at_node[node, 0] if at_node[node, 0] != path else at_node[node, 1]
                if not through[node] or used[following]:
                    break
                path, side = following, 0 if ends[following, 0] == node else 1
            chain_ends[chains, 1] = node
            chains += 1
            chain_offsets[chains] = length
    return order[:length], chain_offsets[: chains + 1], chain_ends[:chains]


@dataclass(frozen=True)
class NewPath:
    """A path to be added to a network."""

    ends: tuple[int, int]
    points: FloatArray  # (P, 2)
    radius: FloatArray  # (P,)


def append(network: Network, new: list[NewPath]) -> Network:
    """The network with more paths between its nodes."""
    if not new:
        return network
    ends = np.concatenate([network.ends, np.array([path.ends for path in new], dtype=np.int64)])
    points = np.concatenate([network.points, *(path.points for path in new)])
    radius = np.concatenate([network.radius, *(path.radius for path in new)])
    counts = np.concatenate([np.diff(network.offsets), [len(path.points) for path in new]])
    return Network(network.node_xy, network.node_radius, ends, points, radius, np.concatenate([[0], np.cumsum(counts)]))
