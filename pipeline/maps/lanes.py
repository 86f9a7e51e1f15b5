"""Lane graph: which lane leads into which, from the connectivity table of a map expansion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LaneGraph:
    """Directed edges between lanes, as indices into the list of lane tokens they were built from."""

    edges: NDArray[np.int64]  # (E, 2) from, to; sorted
    dangling: int  # identifiers in the table that are neither a lane nor a connector nor a key of the table
    one_sided: int  # links that only one of the two ends names


def build_lane_graph(lanes: Sequence[str], connectors: Iterable[str], connectivity: Mapping[str, Mapping[str, Sequence[str]]]) -> LaneGraph:
    """Lane-to-lane edges of a map.

    Lane a leads to lane b if the table links a -> b, or a -> c1 -> ... -> b through lane connectors only (a key that is no lane is a
    connector). A link counts if either end names it: real tables are not symmetric. Identifiers that lead nowhere make no edge.

    Args:
        lanes: tokens of the lanes.
        connectors: tokens of the lane connectors.
        connectivity: token -> {"incoming": tokens, "outgoing": tokens}.
    """
    index = {token: position for position, token in enumerate(lanes)}
    passable = {token for token in (*connectors, *connectivity) if token not in index}
    outgoing = {(token, other) for token, links in connectivity.items() for other in links.get("outgoing", ())}
    incoming = {(other, token) for token, links in connectivity.items() for other in links.get("incoming", ())}
    links = outgoing | incoming
    following: dict[str, list[str]] = {}
    for source, target in sorted(links):
        following.setdefault(source, []).append(target)
    edges = sorted((index[lane], index[target]) for lane in lanes for target in _reachable(lane, following, passable) if target in index)
    named = {token for link in links for token in link}
    both_known = {link for link in links if link[0] in connectivity and link[1] in connectivity}
    one_sided = len(both_known & (outgoing ^ incoming))
    return LaneGraph(np.array(edges, dtype=np.int64).reshape(-1, 2), len(named - passable - set(index)), one_sided)


def _reachable(lane: str, following: Mapping[str, list[str]], passable: set[str]) -> set[str]:
    """Tokens reached from `lane` directly or through connectors."""
    reached: set[str] = set()
    open_ends = list(following.get(lane, ()))
    while open_ends:
        token = open_ends.pop()
        if token not in reached:
            reached.add(token)
            open_ends += following.get(token, ()) if token in passable else ()
    return reached


def edges_between(graph_edges: NDArray[np.int64], present: NDArray[np.int64], lanes: int) -> NDArray[np.int64]:
    """Edges (E, 2) whose two lanes are both in `present` (indices below `lanes`), renumbered to positions in `present`."""
    position = np.full(lanes, -1)
    position[present] = np.arange(len(present))
    renumbered: NDArray[np.int64] = position[graph_edges]
    return renumbered[(renumbered >= 0).all(axis=1)]
