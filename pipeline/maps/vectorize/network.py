"""The line network that the refiner works on: nodes with a radius, and paths between them as one flat array of points."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components

from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.skeleton import IntArray, SkeletonPaths, SkeletonPixels, graph_of


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

    @property
    def degree(self) -> IntArray:
        """(N,) number of path ends at each node; a loop counts twice."""
        return np.bincount(self.ends.ravel(), minlength=len(self.node_xy))

    @property
    def lengths(self) -> FloatArray:
        """(E,) length of each path, px."""
        along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(self.points, axis=0).T))]) if len(self.points) else np.zeros(1)
        lengths: FloatArray = along[self.offsets[1:] - 1] - along[self.offsets[:-1]]
        return lengths

    def path(self, number: int) -> FloatArray:
        """Points (P_e, 2) of one path."""
        return self.points[self.offsets[number] : self.offsets[number + 1]]

    def select(self, keep: NDArray[np.bool_]) -> Network:
        """The network with some paths only; nodes stay, so a node may be left without a path."""
        counts = np.diff(self.offsets)
        of_kept = np.repeat(keep, counts)
        offsets = np.concatenate([[0], np.cumsum(counts[keep])])
        return Network(self.node_xy, self.node_radius, self.ends[keep], self.points[of_kept], self.radius[of_kept], offsets)


def from_skeleton(pixels: SkeletonPixels, traced: SkeletonPaths) -> Network:
    """A traced skeleton as a network; points are pixel centres."""
    xy = np.stack([pixels.columns + 0.5, pixels.rows + 0.5], axis=1)
    order = np.concatenate(traced.paths) if traced.paths else np.empty(0, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(path) for path in traced.paths])]).astype(np.int64)
    return Network(xy[traced.nodes], pixels.radius_px[traced.nodes], traced.ends, xy[order], pixels.radius_px[order], offsets)


def contract(network: Network, paths: NDArray[np.bool_]) -> Network:
    """The network with the given paths (E,) shrunk to nothing: the nodes they join become one, at the mean of their places.

    The radius of the new node covers the circles of the old ones.
    """
    if not paths.any():
        return network
    number = len(network.node_xy)
    clusters, cluster = connected_components(graph_of(network.ends[paths], number), directed=False)
    size = np.bincount(cluster, minlength=clusters)
    xy = np.stack([np.bincount(cluster, weights=network.node_xy[:, axis], minlength=clusters) / size for axis in (0, 1)], axis=1)
    radius = np.zeros(clusters)
    np.maximum.at(radius, cluster, network.node_radius + np.hypot(*(network.node_xy - xy[cluster]).T))
    kept = network.select(~paths)
    return Network(xy, radius, cluster[kept.ends], kept.points, kept.radius, kept.offsets)


def dissolve(network: Network) -> Network:
    """The network without nodes of degree two: the paths on both sides become one. A loop keeps one node."""
    through = network.degree == 2
    through[network.ends[network.ends[:, 0] == network.ends[:, 1], 0]] = False
    if not through.any():
        return network
    touched = through[network.ends].any(axis=1)
    return append(network.select(~touched), [_joined(network, chain) for chain in _chains(network, through, touched)])


@dataclass(frozen=True)
class _Step:
    """One path of a chain, walked from end `start` (0 or 1) to the other."""

    path: int
    start: int


def _chains(network: Network, through: NDArray[np.bool_], touched: NDArray[np.bool_]) -> list[list[_Step]]:
    """Paths in `touched` strung together at `through` nodes, each exactly once."""
    ends = network.ends.tolist()
    paths = np.flatnonzero(touched).tolist()
    at_node: dict[int, list[_Step]] = {}
    for path in paths:
        for start in (0, 1):
            at_node.setdefault(ends[path][start], []).append(_Step(path, start))
    used: set[int] = set()
    chains = []
    open_starts = [_Step(path, start) for path in paths for start in (0, 1) if not through[ends[path][start]]]
    for step in [*open_starts, *(_Step(path, 0) for path in paths)]:  # what is left after the open starts are loops
        chain: list[_Step] = []
        following: _Step | None = step
        while following is not None and following.path not in used:
            chain.append(following)
            used.add(following.path)
            node, last = ends[following.path][1 - following.start], following.path
            following = next((other for other in at_node[node] if other.path != last), None) if through[node] else None
        if chain:
            chains.append(chain)
    return chains


@dataclass(frozen=True)
class NewPath:
    """A path to be added to a network."""

    ends: tuple[int, int]
    points: FloatArray  # (P, 2)
    radius: FloatArray  # (P,)


def _joined(network: Network, chain: list[_Step]) -> NewPath:
    points, radius = [], []
    for step in chain:
        span = slice(network.offsets[step.path], network.offsets[step.path + 1])
        direction = 1 if step.start == 0 else -1
        points.append(network.points[span][::direction])
        radius.append(network.radius[span][::direction])
    first, last = chain[0], chain[-1]
    ends = int(network.ends[first.path, first.start]), int(network.ends[last.path, 1 - last.start])
    xy = np.concatenate(points)
    fresh = np.concatenate([[True], (np.diff(xy, axis=0) != 0.0).any(axis=1)])
    return NewPath(ends, xy[fresh], np.concatenate(radius)[fresh])


def append(network: Network, new: list[NewPath]) -> Network:
    """The network with more paths between its nodes."""
    if not new:
        return network
    ends = np.concatenate([network.ends, np.array([path.ends for path in new], dtype=np.int64)])
    points = np.concatenate([network.points, *(path.points for path in new)])
    radius = np.concatenate([network.radius, *(path.radius for path in new)])
    counts = np.concatenate([np.diff(network.offsets), [len(path.points) for path in new]])
    return Network(network.node_xy, network.node_radius, ends, points, radius, np.concatenate([[0], np.cumsum(counts)]))
