"""Map label of one sample: polylines, their segments, the polygons among them, the matrix of what touches what. See docs/maps.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import shapely
from numpy.typing import NDArray

from pipeline.config import TopologyConfig
from pipeline.maps.frames import BevRange, FloatArray, PlanarPose, range_outline
from pipeline.maps.lanes import edges_between
from pipeline.maps.lines import LinePiece, length_m, resample
from pipeline.maps.rings import clip_polygons, to_corners
from pipeline.maps.store import MapLabel
from pipeline.maps.vector_map import VectorMap
from pipeline.taxonomy import MAP_CLASSES

DIVIDER, CROSSING, BOUNDARY = (MAP_CLASSES.index(name) for name in ("divider", "ped_crossing", "boundary"))


@dataclass(frozen=True)
class LabelCounts:
    """What one label holds, for the report: elements by class, and how many of all elements the BEV range cut."""

    by_class: tuple[int, ...]
    clipped: int
    segments: int
    polygons: int
    incidences: int
    lane_edges: int


@dataclass(frozen=True)
class _Element:
    points_m: FloatArray
    map_class: int
    closed: bool
    clipped: bool


def label_sample(vector_map: VectorMap, ego2global: FloatArray, config: TopologyConfig) -> tuple[MapLabel, LabelCounts]:
    """The map around one ego pose as a training label.

    Args:
        vector_map: the map of the sample's location, global frame.
        ego2global: (4, 4) pose of the BEV frame; only its position and heading in the plane are used.
        config: BEV range, tolerances, K and the number of resampled points.

    Raises:
        DataError: the pose is not a finite (4, 4) matrix.
    """
    pose = PlanarPose.from_matrix(ego2global)
    bev = BevRange(*config.x_range_m, *config.y_range_m)
    elements = _elements(vector_map, pose, bev, config.min_length_m)
    rings = [element.points_m for element in elements if element.closed]
    segments = to_segments([element.points_m for element in elements])
    matrix = topology_matrix(segments, rings, config.incidence_tolerance_m)
    lanes, edges = _lanes(vector_map, pose, bev, config.polygon_corners)
    corners = [to_corners(ring, config.polygon_corners) for ring in rings]
    label = MapLabel(
        line_segments=segments.astype(np.float32),
        polygons=_stack(corners, config.polygon_corners),
        topology_matrix=matrix,
        polylines=[element.points_m.astype(np.float32) for element in elements],
        polyline_class=np.array([element.map_class for element in elements], dtype=np.int64),
        resampled=_stack([resample(element.points_m, config.points_per_line) for element in elements], config.points_per_line),
        closed=np.array([element.closed for element in elements], dtype=bool),
        lanes=lanes,
        lane_adjacency=edges,
        labelled=vector_map.labelled.copy(),
    )
    by_class = tuple(int(number) for number in np.bincount(label.polyline_class, minlength=len(MAP_CLASSES)))
    clipped = sum(element.clipped for element in elements)
    return label, LabelCounts(by_class, clipped, len(segments), len(rings), int(matrix.sum()), len(edges))


def topology_matrix(line_segments: FloatArray, rings: Sequence[FloatArray], tolerance_m: float) -> NDArray[np.uint8]:
    """(N, M) matrix: 1 where segment n comes within `tolerance_m` of the closed area of ring m (its outline and its inside), else 0.

    A ring's own segments, lines that end on it and lines that run through it are incident. The distance to a part of a segment is never
    smaller than to the whole, so splitting a segment keeps its incidence (as the union over the parts) and clipping can only remove some.

    Args:
        line_segments: (N, 2, 2) end points, m.
        rings: M closed rings (P_i, 2), m, first point repeated at the end.
        tolerance_m: largest distance that counts as touching.
    """
    matrix = np.zeros((len(line_segments), len(rings)), dtype=np.uint8)
    if matrix.size:
        tree = shapely.STRtree(shapely.linestrings(line_segments))
        areas = np.array([shapely.polygons(ring) for ring in rings])
        invalid = ~shapely.is_valid(areas)
        areas[invalid] = shapely.buffer(areas[invalid], 0.0)
        ring_index, segment_index = tree.query(areas, predicate="dwithin", distance=tolerance_m)
        matrix[segment_index, ring_index] = 1
    return matrix


def to_segments(polylines: Sequence[FloatArray]) -> FloatArray:
    """(N, 2, 2) segments between successive points of all polylines (P_i, 2), in order."""
    parts = [np.stack([points[:-1], points[1:]], axis=1) for points in polylines]
    return np.concatenate(parts) if parts else np.empty((0, 2, 2))


def _elements(vector_map: VectorMap, pose: PlanarPose, bev: BevRange, min_length_m: float) -> list[_Element]:
    """Clipped elements in class order, within a class in map order."""
    rings, cut = clip_polygons(vector_map.crossings, vector_map.crossing_tree, pose, bev)
    crossings = [LinePiece(ring, True, clipped, -1) for ring, clipped in zip(rings, cut, strict=True)]
    pieces = {DIVIDER: vector_map.dividers.clip(pose, bev), CROSSING: crossings, BOUNDARY: vector_map.boundary.clip(pose, bev)}
    return [
        _Element(piece.points_m, map_class, piece.closed, piece.clipped)
        for map_class in sorted(pieces)
        for piece in pieces[map_class]
        if length_m(piece.points_m) >= min_length_m
    ]


def _lanes(vector_map: VectorMap, pose: PlanarPose, bev: BevRange, corners: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Lanes (R, K, 2) that reach into the range, whole, and edges (E, 2) between them."""
    present = np.sort(vector_map.lane_tree.query(range_outline(pose, bev), predicate="intersects"))
    lanes = pose.to_ego(_lane_corners(vector_map, corners)[present]).astype(np.float32)
    return lanes, edges_between(vector_map.lane_edges, present, len(vector_map.lanes)).astype(np.int32)


@lru_cache(maxsize=8)
def _lane_corners(vector_map: VectorMap, corners: int) -> FloatArray:
    """All lanes of a map reduced to K corners (R, K, 2), global frame."""
    shells = [to_corners(shapely.get_coordinates(lane.exterior), corners) for lane in vector_map.lanes]
    return np.stack(shells) if shells else np.empty((0, corners, 2))


def _stack(arrays: list[FloatArray], points: int) -> NDArray[np.float32]:
    """Arrays (points, 2) as one float32 array (number, points, 2), also when there are none."""
    return np.stack(arrays).astype(np.float32) if arrays else np.empty((0, points, 2), dtype=np.float32)
