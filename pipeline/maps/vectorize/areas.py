"""Masks of areas (drivable area, crossings) to polygons with holes.

The outline of an area runs on the edges between pixels. Edges are found tile by tile and chained once over the whole mask, so tiles leave no
seams. A ring goes through the middles of its edges: that halves the stairs and keeps rings apart that would touch at a corner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import shapely
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, connected_components

from pipeline.config import VectorizeConfig
from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.skeleton import IntArray
from pipeline.maps.vectorize.thinning import MaskArray, remove_noise

# Directions of an edge, counter-clockwise as seen with y up: east, north, west, south. The step in (row, column) of each.
_STEP = np.array([[0, 1], [-1, 0], [0, -1], [1, 0]])
POLYGON = shapely.GeometryType.POLYGON.value


@dataclass(frozen=True)
class PixelEdges:
    """Directed edges between a pixel of the area (on the left, seen with y up) and one outside it."""

    rows: IntArray  # (C,) start corner
    columns: IntArray  # (C,)
    direction: IntArray  # (C,) 0 east, 1 north, 2 west, 3 south


def trace_areas(mask: MaskArray, config: VectorizeConfig) -> list[shapely.Polygon]:
    """Polygons of one mask (H, W) of 0 and 1 that fits into memory, pixel frame (x right, y down, the first pixel covers 0..1)."""
    return areas_of(pixel_edges(remove_noise(mask, config.noise_px)), config)


def pixel_edges(mask: MaskArray, row0: int = 0, column0: int = 0, margin: int = 0) -> PixelEdges:
    """Edges of the pixels of a tile.

    Args:
        mask: (H, W) of 0 and 1.
        row0, column0: place of the tile's first own pixel in the whole mask.
        margin: pixels around the tile that belong to its neighbours; without any, what is outside counts as background.
    """
    own = np.pad(mask, 1) if margin == 0 else mask[margin - 1 : mask.shape[0] - margin + 1, margin - 1 : mask.shape[1] - margin + 1]
    center = own[1:-1, 1:-1]
    found = []
    # For a pixel at (r, c): the neighbour that must be off, the edge's start corner relative to (r, c), its direction.
    for off, corner, direction in (
        (own[2:, 1:-1], (1, 0), 0),
        (own[1:-1, 2:], (1, 1), 1),
        (own[:-2, 1:-1], (0, 1), 2),
        (own[1:-1, :-2], (0, 0), 3),
    ):
        rows, columns = np.divmod(np.flatnonzero(center > off), center.shape[1])  # many times as fast as nonzero on two axes
        found.append((rows + row0 + corner[0], columns + column0 + corner[1], np.full(len(rows), direction)))
    rows, columns, directions = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return PixelEdges(rows, columns, directions)


def areas_of(edges: PixelEdges, config: VectorizeConfig) -> list[shapely.Polygon]:
    """Chain edges to rings, drop those below `min_area_px`, put holes into shells and simplify (Douglas-Peucker, topology kept)."""
    rings = [ring for ring in edge_rings(edges) if abs(signed_area(ring)) >= config.min_area_px]
    shells = [ring for ring in rings if signed_area(ring) < 0.0]  # counter-clockwise with y up is negative with y down
    holes = [ring for ring in rings if signed_area(ring) > 0.0]
    inside: list[list[FloatArray]] = [[] for _ in shells]
    for hole, shell in zip(holes, _shell_of_holes(shells, holes), strict=True):
        if shell >= 0:
            inside[shell].append(hole)
    polygons = np.array([shapely.Polygon(shell, own) for shell, own in zip(shells, inside, strict=True)], dtype=object)
    return [polygon for polygon in _simplified(polygons, config.tolerance_px) if polygon.area >= config.min_area_px]


def _simplified(polygons: NDArray[np.object_], tolerance_px: float) -> NDArray[np.object_]:
    """Douglas-Peucker; where it would change a polygon's holes or cut it apart, the slower variant that keeps its topology."""
    simple = shapely.simplify(polygons, tolerance_px, preserve_topology=False)
    kept = (shapely.get_type_id(simple) == POLYGON) & (shapely.get_num_interior_rings(simple) == shapely.get_num_interior_rings(polygons))
    kept &= shapely.is_valid(simple)
    simple[~kept] = shapely.simplify(polygons[~kept], tolerance_px, preserve_topology=True)
    return simple


def edge_rings(edges: PixelEdges) -> list[FloatArray]:
    """Closed rings (P, 2) through the middles of the edges, x and y, first point repeated. Diagonal neighbours are not connected."""
    if len(edges.rows) == 0:
        return []
    stride = int(edges.columns.max()) + 2
    keys = (edges.rows * stride + edges.columns) * 4 + edges.direction
    order = np.argsort(keys)
    keys, direction = keys[order], edges.direction[order]
    start = np.stack([edges.rows[order], edges.columns[order]], axis=1)
    corner = ((start + _STEP[direction]) @ np.array([stride, 1])) * 4
    following = np.full(len(keys), -1)
    for turn in (3, 0, 1):  # right, straight, left: where an area meets itself at a corner it turns left, around its own pixel
        wanted = corner + (direction + turn) % 4
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        following = np.where(keys[at] == wanted, at, following)
    middle = (start + 0.5 * _STEP[direction])[:, ::-1]
    return [np.concatenate([middle[ring], middle[ring[:1]]]) for ring in _cycles(following)]


def _cycles(following: IntArray) -> list[IntArray]:
    """Cycles of a permutation. All are cut open and tied end to end, so that one breadth-first walk orders them."""
    number = len(following)
    everyone = np.arange(number)
    _, cycle = connected_components(_arrows(following), directed=False)
    _, first, length = np.unique(cycle, return_index=True, return_counts=True)
    tied = following.copy()
    last = np.empty(number, dtype=np.int64)
    last[following] = everyone  # the element before each
    tied[last[first]] = np.roll(first, -1)
    walk = breadth_first_order(_arrows(tied), first[0], directed=True, return_predecessors=False)
    return np.split(walk, np.cumsum(length)[:-1])


def _arrows(following: IntArray) -> csr_matrix:
    number = len(following)
    return csr_matrix((np.ones(number, dtype=np.int8), following, np.arange(number + 1)), shape=(number, number))


def signed_area(ring: FloatArray) -> float:
    """Shoelace area of a closed ring (P, 2), positive when counter-clockwise in its own frame."""
    x, y = (ring - ring[0]).T
    return 0.5 * float(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1]))


def _shell_of_holes(shells: list[FloatArray], holes: list[FloatArray]) -> list[int]:
    """Index of the smallest shell around each hole, -1 where there is none."""
    if not holes:
        return []
    areas = np.array([-signed_area(shell) for shell in shells])
    around = np.full(len(holes), -1)
    tree = shapely.STRtree(shapely.points([hole[0] for hole in holes]))
    solid = np.array([shapely.Polygon(shell) for shell in shells], dtype=object)
    shapely.prepare(solid)
    shell_index, hole_index = tree.query(solid, predicate="contains")
    for position in np.argsort(-areas[shell_index], kind="stable"):
        around[hole_index[position]] = shell_index[position]  # the smallest shell comes last and stays
    return around.tolist()
