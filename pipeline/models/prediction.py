"""What a predictor returns for one sample. Everything is in the BEV frame: x forward, y left, z up, metres, radians, metres per second."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BoxPrediction:
    """Boxes of one sample, best score first.

    Attributes:
        center_m: (N, 3) centres x, y, z.
        size_wlh_m: (N, 3) width (across), length (along the heading), height; the order of nuScenes.
        yaw_rad: (N,) heading, counter-clockwise from x, in (-pi, pi].
        velocity_mps: (N, 2) velocity over ground, expressed along the axes of the BEV frame.
        class_id: (N,) index into DETECTION_CLASSES.
        score: (N,) confidence in [0, 1].
    """

    center_m: Floats
    size_wlh_m: Floats
    yaw_rad: Floats
    velocity_mps: Floats
    class_id: Ints
    score: Floats


@dataclass(frozen=True)
class MapPrediction:
    """Vector map of one sample, best score first.

    Attributes:
        polylines: (L, P, 2) points; a closed element (pedestrian crossing) repeats its first point at the end.
        class_id: (L,) index into MAP_CLASSES.
        score: (L,) confidence in [0, 1].
        line_segments: (S, 2, 2) all pieces of the polylines, start and end point.
        polygons: (M, K, 2) corners of the closed elements, without repetition.
        topology_matrix: (S, M) uint8, 1 where a segment belongs to a polygon: is one of its sides, ends on it or runs through it.
        segment_line: (S,) number of the polyline that the segment is a piece of.
        polygon_line: (M,) number of the polyline that the polygon is made of.
    """

    polylines: Floats
    class_id: Ints
    score: Floats
    line_segments: Floats
    polygons: Floats
    topology_matrix: NDArray[np.uint8]
    segment_line: Ints
    polygon_line: Ints


@dataclass(frozen=True)
class OccupancyGrid:
    """One level of the occupancy pyramid.

    Attributes:
        labels: (X, Y, Z) uint8, index into OCCUPANCY_CLASSES.
        x_range_m, y_range_m, z_range_m: lower and upper border of the grid; a voxel is the range divided by the number of labels.
    """

    labels: NDArray[np.uint8]
    x_range_m: tuple[float, float]
    y_range_m: tuple[float, float]
    z_range_m: tuple[float, float]


@dataclass(frozen=True)
class OccupancyPrediction:
    """Occupancy of one sample: levels from the widest to the finest."""

    levels: list[OccupancyGrid]


@dataclass(frozen=True)
class Prediction:
    """All heads of one sample; a head that is not built is None."""

    sample_token: str
    boxes: BoxPrediction | None
    map: MapPrediction | None
    occupancy: OccupancyPrediction | None
