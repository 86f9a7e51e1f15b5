"""The refiner: from the network of a skeleton to the network of the drawing.

A skeleton splits a junction of wide lines into several nodes, grows a spur from every bump, ends before the line does, and breaks where the
paint does. In order: breaks are mended, spurs removed, junction clusters merged, rungs removed, junctions moved to where their lines meet,
ends moved to the tips, gaps bridged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from pipeline.config import VectorizeConfig
from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.caps import Lookup, move_ends
from pipeline.maps.vectorize.ends import EndFit, fit_ends, mean_radius, retrace
from pipeline.maps.vectorize.network import Network, NewPath, append, contract, dissolve
from pipeline.maps.vectorize.skeleton import IntArray


def refine(network: Network, lookup: Lookup, config: VectorizeConfig) -> Network:
    """Apply all steps. See the module's description.

    Args:
        network: from `network.from_skeleton`.
        lookup: the mask the skeleton comes from.
        config: thresholds in pixels.
    """
    network = mend_breaks(network, lookup, config)
    # Before merging, as the roots of spurs look like junctions; after it, the radius of a node says nothing about the width of a line.
    network = remove_spurs(network, np.maximum(config.min_spur_px, network.node_radius), config.noise_px)
    network = merge_junctions(network)
    network = remove_spurs(network, np.full_like(network.node_radius, config.min_spur_px), config.noise_px)
    network = merge_crossings(network)
    network = remove_rungs(network, config.noise_px)
    network = move_junctions(network)
    network = move_ends(network, lookup)
    network = bridge_gaps(network, lookup, config)
    return drop_crumbs(network, config.min_spur_px)


def merge_junctions(network: Network) -> Network:
    """Contract paths between two junctions whose inscribed circles overlap: they are one junction that the skeleton split."""
    junction = network.degree >= 3
    first, second = network.ends.T
    reach = network.node_radius[first] + network.node_radius[second]
    return dissolve(contract(network, junction[first] & junction[second] & (network.lengths <= reach)))


def remove_spurs(network: Network, min_spur_px: FloatArray, noise_px: float) -> Network:
    """Remove dead ends that reach less than `min_spur_px` (N,), by the junction they leave, beyond the edge of the line there.

    A junction keeps its longest dead ends as far as it needs them to have two paths: a line that forks at its end keeps one prong as its
    end, so that no line is eaten up from its ends. Loops around no more than a hole of noise are removed as well.
    """
    while True:
        network = _without_small_loops(network, noise_px)
        degree = network.degree
        dead_side = degree[network.ends] == 1
        path = np.flatnonzero(dead_side[:, 0] != dead_side[:, 1])
        root = np.where(dead_side[path, 0], network.ends[path, 1], network.ends[path, 0])
        length = network.lengths[path]
        beyond_edge = length - network.node_radius[root]
        spur = (degree[root] >= 3) & (beyond_edge < min_spur_px[root])
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


def _without_small_loops(network: Network, noise_px: float) -> Network:
    loop = network.ends[:, 0] == network.ends[:, 1]
    if not loop.any():
        return network
    loop &= network.lengths < 5.0 * noise_px
    return dissolve(network.select(~loop)) if loop.any() else network


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
    """Whether the two path ends `at_first` and the two `at_second` pair up so that each pair lies on one straight line or one arc."""

    def aligned(one: int, other: int) -> bool:
        across = fit.base[other] - fit.base[one]
        turn = _turn_deg(fit.direction[one], across)
        turn_on = _turn_deg(across, -fit.direction[other])
        offset = abs(float(fit.direction[one][0] * across[1] - fit.direction[one][1] * across[0]))
        straight = abs(turn + turn_on) < 40.0 and offset <= tolerance_px + 0.3 * float(np.hypot(*across))
        arc = abs(turn - turn_on) <= 30.0 and max(abs(turn), abs(turn_on)) <= 60.0
        return straight or arc

    a, b = at_first.tolist()
    c, d = at_second.tolist()
    return (aligned(a, c) and aligned(b, d)) or (aligned(a, d) and aligned(b, c))


def _turn_deg(before: FloatArray, after: FloatArray) -> float:
    """Angle from one direction to another, degrees, -180 to 180."""
    return float(np.degrees(np.arctan2(before[0] * after[1] - before[1] * after[0], before @ after)))


def remove_rungs(network: Network, noise_px: float) -> Network:
    """Remove paths that join two lines which run on straight on either side, where the space between the lines is no wider than noise."""
    three_way = network.degree == 3
    first, second = network.ends.T
    between = network.lengths - network.node_radius[first] - network.node_radius[second]
    candidates = np.flatnonzero(three_way[first] & three_way[second] & (first != second) & (between <= noise_px))
    if len(candidates) == 0:
        return network
    path, side = np.nonzero(three_way[network.ends])
    node = network.ends[path, side]
    fit = fit_ends(network, path, side, network.node_radius[node], np.full(len(path), 10.0))
    keep = np.ones(len(network.ends), dtype=bool)
    for rung in candidates.tolist():
        beside = [np.flatnonzero((node == end) & (path != rung)) for end in network.ends[rung]]
        keep[rung] = not all(len(at) == 2 and fit.direction[at[0]] @ fit.direction[at[1]] < -np.cos(np.radians(25.0)) for at in beside)
    return network if keep.all() else dissolve(network.select(keep))


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


@dataclass(frozen=True)
class FreeEnds:
    """F free ends away from the border of the mask."""

    path: IntArray  # (F,) their path
    node: IntArray  # (F,)
    xy: FloatArray  # (F, 2)
    radius: FloatArray  # (F,) mean radius of the path
    tip_direction: FloatArray  # (F, 2) where the last points lead, a bend followed
    axis: FloatArray  # (F, 2) where the path as a whole leads
    axis_xy: FloatArray  # (F, 2) the end moved sideways onto the axis: noise bends the last few points


def free_ends(network: Network, lookup: Lookup) -> FreeEnds:
    """The free ends of a network. Lines that leave the mask have none: they go on outside."""
    path, side = np.nonzero(network.degree[network.ends] == 1)
    direction = _tip_direction(network, path, side)
    xy = network.node_xy[network.ends[path, side]]
    inner = lookup(xy + 2.0 * direction) != -1
    path, side, xy, direction = path[inner], side[inner], xy[inner], direction[inner]
    radius = mean_radius(network)[path]
    fit = fit_ends(network, path, side, skip_px=radius + 2.0, window_px=np.maximum(12.0, 2.0 * radius))
    along = ((xy - fit.base) * fit.direction).sum(axis=1)
    return FreeEnds(path, network.ends[path, side], xy, radius, direction, fit.direction, fit.base + along[:, None] * fit.direction)


def bridge_gaps(network: Network, lookup: Lookup, config: VectorizeConfig) -> Network:
    """Join free ends that face each other across at most `max_gap_px` without paint, nearest first; each end is used once.

    Both ends have to point along the gap within 60 degrees, by their last points or by their axis. Across a break no longer than noise the
    ends need not point along it, but their axes have to be opposite. Two ends of one line are joined too, which closes it, if the line is longer
    than three gaps. Crumbs come last: they fill gaps that are too long without them.
    """
    if not _any_ends_within(network, config.max_gap_px):
        return network
    ends = free_ends(network, lookup)
    pairs = _near(ends, config.max_gap_px + 3.0 * float(ends.radius.max(initial=0.0)) if config.max_gap_px > 0.0 else 0.0)
    if len(pairs) == 0:
        return network
    one, other = pairs.T
    lengths = network.lengths[ends.path]
    crumb = lengths <= config.noise_px + 2.0
    facing = np.maximum(_facing(ends.xy, ends.tip_direction, pairs, crumb), _facing(ends.axis_xy, ends.axis, pairs, crumb))
    bare = _bare_length(ends.xy[one], ends.xy[other], lookup)
    gap = np.hypot(*(ends.xy[other] - ends.xy[one]).T)
    reach = ends.radius[one] + ends.radius[other]
    opposite = (ends.axis[one] * ends.axis[other]).sum(axis=1) < -0.5
    broken = (bare <= config.noise_px) & (gap <= config.noise_px + reach) & opposite
    own = (ends.path[one] == ends.path[other]) & (lengths[one] <= 3.0 * config.max_gap_px)
    fits = ~own & ((gap <= 1.0 + reach) | broken | ((bare <= config.max_gap_px) & (facing >= 0.5)))
    order = np.lexsort((gap * (1.5 - facing), crumb[one] | crumb[other]))
    return _bridged(network, ends, pairs[order[fits[order]]])


def mend_breaks(network: Network, lookup: Lookup, config: VectorizeConfig) -> Network:
    """Join the free end of a long line to that of a short one that faces it across a break no longer than noise.

    The short one is what noise cut off between the break and a junction, and would be taken for a spur.
    """
    if not _any_ends_within(network, config.noise_px):
        return network
    ends = free_ends(network, lookup)
    pairs = _near(ends, config.noise_px + 2.0 * float(ends.radius.max(initial=0.0)) if config.noise_px > 0 else 0.0)
    long = network.lengths[ends.path] > 3.0 * config.min_spur_px
    pairs = pairs[long[pairs].sum(axis=1) == 1]
    if len(pairs) == 0:
        return network
    one, other = pairs.T
    bare = _bare_length(ends.xy[one], ends.xy[other], lookup)
    opposite = (ends.axis[one] * ends.axis[other]).sum(axis=1) < -0.7
    fits = (bare <= config.noise_px) & opposite & (_facing(ends.axis_xy, ends.axis, pairs, np.zeros(len(long), dtype=bool)) > 0.5)
    gap = np.hypot(*(ends.xy[other] - ends.xy[one]).T)
    return _bridged(network, ends, pairs[fits][np.argsort(gap[fits], kind="stable")])


def _any_ends_within(network: Network, gap_px: float) -> bool:
    """Whether two free ends may be near enough for a gap of that length, before anything is known of their directions."""
    free = network.node_xy[network.degree == 1]
    if len(free) < 2 or gap_px <= 0.0:
        return False
    return len(cKDTree(free).query_pairs(gap_px + 3.0 * float(mean_radius(network).max()), output_type="ndarray")) > 0


def _near(ends: FreeEnds, distance_px: float) -> IntArray:
    """(C, 2) pairs of free ends at most `distance_px` apart."""
    if len(ends.path) < 2 or distance_px <= 0.0:
        return np.empty((0, 2), dtype=np.int64)
    return cKDTree(ends.xy).query_pairs(distance_px, output_type="ndarray")


def _bridged(network: Network, ends: FreeEnds, pairs: IntArray) -> Network:
    """The network with pairs of ends joined by straight paths, first come first served."""
    used: set[int] = set()
    bridges = []
    for first, second in pairs.tolist():
        if not {first, second} & used:
            used |= {first, second}
            node = ends.node[[first, second]]
            bridges.append(NewPath((int(node[0]), int(node[1])), ends.xy[[first, second]], network.node_radius[node]))
    return dissolve(append(network, bridges))


def _facing(xy: FloatArray, direction: FloatArray, pairs: IntArray, crumb: NDArray[np.bool_]) -> FloatArray:
    """Cosine of the angle between the gap of a pair of ends and the end that points away from it more; crumbs point anywhere."""
    one, other = pairs.T
    across = xy[other] - xy[one]
    across /= np.maximum(np.hypot(*across.T), 1e-9)[:, None]
    ahead, back = (direction[one] * across).sum(axis=1), -(direction[other] * across).sum(axis=1)
    best = np.maximum(ahead, back)
    return np.minimum(np.where(crumb[one], best, ahead), np.where(crumb[other], best, back))


def _bare_length(start: FloatArray, stop: FloatArray, lookup: Lookup) -> FloatArray:
    """(N,) distance from the first to the last place without paint on the straight way between two points, to a quarter of a pixel."""
    length = np.hypot(*(stop - start).T)
    steps = int(np.ceil(2.0 * length.max(initial=0.0))) + 1
    at = np.linspace(0.0, 1.0, steps)
    seen = lookup((start[:, None] + at[:, None] * (stop - start)[:, None]).reshape(-1, 2)).reshape(-1, steps)
    bare = seen != 1
    first, last = bare.argmax(axis=1), steps - 1 - bare[:, ::-1].argmax(axis=1)
    return np.where(bare.any(axis=1), (last - first + 1) * length / steps, 0.0)


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
    alone = (network.degree[network.ends] == 1).all(axis=1)
    return network.select(~(alone & (network.lengths < min_length_px))) if alone.any() else network
