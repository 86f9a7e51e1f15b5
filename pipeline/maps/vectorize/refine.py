"""The refiner: from the network of a skeleton to the network of the drawing.

A skeleton splits a junction of wide lines into several nodes, grows a spur from every bump, ends before the line does, and breaks where the
paint does. In order: spurs are removed, junction clusters merged, junctions moved to where their lines meet, ends moved to the tips, gaps
bridged.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from pipeline.config import VectorizeConfig
from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.ends import EndFit, fit_ends, mean_radius, retrace
from pipeline.maps.vectorize.network import Network, NewPath, append, contract, dissolve
from pipeline.maps.vectorize.skeleton import IntArray

# (N,) x and y in pixels -> (N,) 1 on the drawing, 0 off it, -1 outside the mask.
Lookup = Callable[[FloatArray], NDArray[np.int8]]
# A cap narrower than this (half width, px) is a handful of pixels: its shape cannot be told.
THINNEST_CAP_PX = 3.2
# Share of the last half width of a line that is filled: 1 for a flat cap, pi / 4 for a round one.
ROUND_CAP_FILL = 0.9


def refine(network: Network, lookup: Lookup, config: VectorizeConfig) -> Network:
    """Apply all steps. See the module's description.

    Args:
        network: from `network.from_skeleton`.
        lookup: the mask the skeleton comes from.
        config: thresholds in pixels.
    """
    network = remove_spurs(network, config.min_spur_px)  # before merging: the roots of spurs look like junctions
    network = merge_junctions(network)
    network = remove_spurs(network, config.min_spur_px)
    network = merge_crossings(network)
    network = move_junctions(network)
    network = move_ends(network, lookup)
    network = bridge_gaps(network, lookup, config.max_gap_px)
    return drop_crumbs(network, config.min_spur_px)


def merge_junctions(network: Network) -> Network:
    """Contract paths between two junctions whose inscribed circles overlap: they are one junction that the skeleton split."""
    junction = network.degree >= 3
    first, second = network.ends.T
    reach = network.node_radius[first] + network.node_radius[second]
    return dissolve(contract(network, junction[first] & junction[second] & (network.lengths <= reach)))


def remove_spurs(network: Network, min_spur_px: float) -> Network:
    """Remove dead ends at junctions that reach less than `min_spur_px` or half a width beyond the edge of the line they leave.

    A junction keeps its longest dead ends as far as it needs them to have two paths: a line that forks at its end keeps one prong as its
    end, so that no line is eaten up from its ends.
    """
    while True:
        degree = network.degree
        dead_side = degree[network.ends] == 1
        path = np.flatnonzero(dead_side.sum(axis=1) == 1)
        root = np.where(dead_side[path, 0], network.ends[path, 1], network.ends[path, 0])
        length = network.lengths[path]
        beyond_edge = length - network.node_radius[root]
        spur = (degree[root] >= 3) & (beyond_edge < np.maximum(min_spur_px, network.node_radius[root]))
        path, root, length = path[spur], root[spur], length[spur]
        order = np.lexsort((-length, root))
        path, root = path[order], root[order]
        rank = np.arange(len(root)) - np.searchsorted(root, root)
        others = degree[root] - np.bincount(root, minlength=len(degree))[root]
        removed = path[rank >= 2 - others]
        if len(removed) == 0:
            return network
        keep = np.ones(len(network.ends), dtype=bool)
        keep[removed] = False
        network = dissolve(network.select(keep))


def merge_crossings(network: Network) -> Network:
    """Contract a path between two three-way junctions that is the shared stretch of two lines crossing at a small angle.

    It is, if the two other paths at one end run on straight into those at the other end. Two side streets that leave a main street one after
    the other fail this: they are displaced by the length of the path between them.
    """
    three_way = network.degree == 3
    first, second = network.ends.T
    short = network.lengths <= 4.0 * (network.node_radius[first] + network.node_radius[second])
    candidates = np.flatnonzero(three_way[first] & three_way[second] & (first != second) & short)
    if len(candidates) == 0:
        return network
    path, side = np.nonzero(three_way[network.ends])
    node = network.ends[path, side]
    fit = fit_ends(network, path, side, network.node_radius[node], np.maximum(10.0, 2.0 * network.node_radius[node]))
    width = 2.0 * mean_radius(network)
    contracted = np.zeros(len(network.ends), dtype=bool)
    for edge in candidates.tolist():
        at_first, at_second = (np.flatnonzero((node == end) & (path != edge)) for end in network.ends[edge])
        taken = contracted[path[np.concatenate([at_first, at_second])]].any()
        plain = len(at_first) == 2 and len(at_second) == 2  # else another path joins the two junctions
        contracted[edge] = plain and not taken and _run_on(fit, at_first, at_second, tolerance_px=1.5 + 0.5 * width[edge])
    return dissolve(contract(network, contracted))


def _run_on(fit: EndFit, at_first: IntArray, at_second: IntArray, tolerance_px: float) -> bool:
    """Whether the two path ends `at_first` and the two `at_second` pair up so that each pair lies on one straight line."""

    def aligned(one: int, other: int) -> bool:
        across = fit.base[other] - fit.base[one]
        normal = np.array([-fit.direction[one][1], fit.direction[one][0]])
        facing = float(fit.direction[one] @ fit.direction[other]) < -np.cos(np.radians(40.0))
        return facing and abs(float(normal @ across)) <= tolerance_px + 0.3 * float(np.hypot(*across))

    a, b = at_first.tolist()
    c, d = at_second.tolist()
    return (aligned(a, c) and aligned(b, d)) or (aligned(a, d) and aligned(b, c))


def move_junctions(network: Network) -> Network:
    """Move each junction to the point nearest to all its lines (least squares), seen from outside its inscribed circle.

    The part of a path inside the circle, which the skeleton bends, is replaced by a straight piece. A junction whose lines are too parallel
    to meet in a point stays where it is.
    """
    junction = network.degree >= 3
    path, side = np.nonzero(junction[network.ends])
    trim = np.ones_like(network.ends)
    if len(path) == 0:
        return retrace(network, network.node_xy, trim)
    node = network.ends[path, side]
    fit = fit_ends(network, path, side, skip_px=network.node_radius[node], window_px=np.maximum(10.0, 2.0 * network.node_radius[node]))
    trim[path, side] = np.maximum(fit.skipped, 1)
    xy = _meeting_points(node, fit, network.node_xy)
    moved = np.hypot(*(xy - network.node_xy).T)
    xy = np.where((moved <= np.maximum(2.0, network.node_radius))[:, None], xy, network.node_xy)
    return retrace(network, xy, trim)


def _meeting_points(node: IntArray, fit: EndFit, node_xy: FloatArray) -> FloatArray:
    """For each node (N,) the least-squares meeting point of its fitted lines; its old place where they are nearly parallel."""
    number = len(node_xy)
    normal = np.stack([-fit.direction[:, 1], fit.direction[:, 0]], axis=1)
    offset = (normal * fit.center).sum(axis=1)
    xx, xy, yy = (np.bincount(node, weights=normal[:, a] * normal[:, b], minlength=number) for a, b in ((0, 0), (0, 1), (1, 1)))
    bx, by = (np.bincount(node, weights=normal[:, a] * offset, minlength=number) for a in (0, 1))
    determinant = xx * yy - xy * xy
    solvable = determinant > 0.1  # two lines at 18 degrees, or the like
    safe = np.where(solvable, determinant, 1.0)
    met = np.stack([(yy * bx - xy * by) / safe, (xx * by - xy * bx) / safe], axis=1)
    return np.where(solvable[:, None], met, node_xy)


def move_ends(network: Network, lookup: Lookup) -> Network:
    """Move each free end to where its line ends.

    The line is cast on from behind the end, where the skeleton is still straight, to the first pixel off the drawing. A line that leaves the
    mask ends at its border. A round cap reaches half a width beyond the end of its line, a flat one does not; the cap is judged by how
    much of its square is filled, and on lines too thin to tell the mean of the two is taken.
    """
    path, side = np.nonzero(network.degree[network.ends] == 1)
    if len(path) == 0:
        return network
    node = network.ends[path, side]
    radius = mean_radius(network)[path]
    fit = fit_ends(network, path, side, skip_px=radius + 1.0, window_px=np.maximum(12.0, 3.0 * radius))
    old = ((network.node_xy[node] - fit.base) * fit.direction).sum(axis=1)
    tip, at_border = _cast(fit, lookup, longest_px=float((old + 2.0 * radius).max()) + 3.0)
    half_width = radius - 0.5
    cap = np.where(at_border, 0.0, 0.5 * half_width)
    wide = np.flatnonzero(~at_border & (half_width >= THINNEST_CAP_PX))
    cap[wide] = _is_round(fit, wide, tip[wide], half_width[wide], lookup) * half_width[wide]
    reached = tip - cap
    # Else the line bends away, or is too thin to be cast along: the old end is the better one.
    straight = at_border | (tip >= old - np.maximum(radius - 2.0, 0.0))
    xy = network.node_xy.copy()
    xy[node[straight]] = (fit.base + reached[:, None] * fit.direction)[straight]
    trim = np.ones_like(network.ends)
    trim[path[straight], side[straight]] = np.maximum(fit.skipped, 1)[straight]
    return retrace(network, xy, trim)


def _cast(fit: EndFit, lookup: Lookup, longest_px: float) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Distance from each base along its direction to the end of the drawing, to a quarter of a pixel, and whether that is the mask's border."""
    steps = np.arange(0.0, longest_px, 0.5)
    seen = lookup((fit.base[:, None] + steps[:, None] * fit.direction[:, None]).reshape(-1, 2)).reshape(-1, len(steps))
    off = seen != 1
    off[:, -1] = True
    first = off.argmax(axis=1)
    return steps[first] - 0.25, seen[np.arange(len(first)), first] == -1


def _is_round(fit: EndFit, ends: IntArray, tip: FloatArray, half_width: FloatArray, lookup: Lookup) -> NDArray[np.bool_]:
    """Whether the last half width before the tip of some `ends` is filled like a round cap rather than a flat one."""
    along, across = np.meshgrid(np.linspace(0.05, 0.95, 7), np.linspace(-0.95, 0.95, 9))
    direction = fit.direction[ends]
    normal = np.stack([-direction[:, 1], direction[:, 0]], axis=1)
    forward = tip[:, None] - along.ravel() * half_width[:, None]
    sideways = across.ravel() * half_width[:, None]
    at = fit.base[ends, None] + forward[..., None] * direction[:, None] + sideways[..., None] * normal[:, None]
    filled: FloatArray = (lookup(at.reshape(-1, 2)) == 1).reshape(len(ends), along.size).mean(axis=1)
    return filled < ROUND_CAP_FILL


def bridge_gaps(network: Network, lookup: Lookup, max_gap_px: float) -> Network:
    """Join free ends that face each other across at most `max_gap_px`, nearest first; each end is used once.

    The gap is between the tips of the paint, so half a width at either end does not count. Both ends have to point along it within 60
    degrees, unless they all but touch. Two ends of one line are joined too, which closes it, if the line is longer than three gaps. Ends at
    the border of the mask are left alone: their lines go on outside.
    """
    path, side = np.nonzero(network.degree[network.ends] == 1)
    if max_gap_px <= 0 or len(path) < 2:
        return network
    node, lengths = network.ends[path, side], network.lengths
    xy, direction = network.node_xy[node], _tip_direction(network, path, side)
    inner = lookup(xy + 2.0 * direction) != -1
    path, side, node, xy, direction = path[inner], side[inner], node[inner], xy[inner], direction[inner]
    if len(path) < 2:
        return network
    radius = mean_radius(network)[path]
    pairs = cKDTree(xy).query_pairs(max_gap_px + 2.0 * float(radius.max()), output_type="ndarray")
    if len(pairs) == 0:
        return network
    pairs = pairs[(path[pairs[:, 0]] != path[pairs[:, 1]]) | (lengths[path[pairs[:, 0]]] > 3.0 * max_gap_px)]
    across = xy[pairs[:, 1]] - xy[pairs[:, 0]]
    gap = np.maximum(np.hypot(*across.T), 1e-9)
    ahead = (direction[pairs[:, 0]] * across).sum(axis=1) / gap
    back = -(direction[pairs[:, 1]] * across).sum(axis=1) / gap
    longest = max_gap_px + radius[pairs[:, 0]] + radius[pairs[:, 1]]
    touching = gap <= 1.0 + radius[pairs[:, 0]] + radius[pairs[:, 1]]
    fits = (gap <= longest) & ((np.minimum(ahead, back) >= 0.5) | touching)
    cost = gap * (3.0 - ahead - back)
    used: set[int] = set()
    bridges = []
    for number in np.flatnonzero(fits)[np.argsort(cost[fits], kind="stable")].tolist():
        first, second = pairs[number].tolist()
        if not {first, second} & used:
            used |= {first, second}
            points = xy[[first, second]]
            bridges.append(NewPath((int(node[first]), int(node[second])), points, network.node_radius[node[[first, second]]]))
    return dissolve(append(network, bridges))


def _tip_direction(network: Network, path: IntArray, side: IntArray) -> FloatArray:
    """(A, 2) unit vectors in which path ends point: of the last 8 points, turned on by half of what the line turned since the 8 before."""
    last, before = (
        fit_ends(network, path, side, skip_px=np.full(len(path), skip), window_px=np.full(len(path), 8.0)).direction for skip in (0.0, 8.0)
    )
    turn = 0.5 * np.arctan2(before[:, 0] * last[:, 1] - before[:, 1] * last[:, 0], (before * last).sum(axis=1))
    cos, sin = np.cos(turn), np.sin(turn)
    return np.stack([last[:, 0] * cos - last[:, 1] * sin, last[:, 0] * sin + last[:, 1] * cos], axis=1)


def drop_crumbs(network: Network, min_length_px: float) -> Network:
    """Remove paths that touch nothing and are shorter than `min_length_px`."""
    crumb = (network.degree[network.ends] == 1).all(axis=1) & (network.lengths < min_length_px)
    return network.select(~crumb)
