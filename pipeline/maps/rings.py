"""Rings of map polygons: repair, clipping to the BEV range, reduction to K corners."""

from __future__ import annotations

import math

import numpy as np
import shapely

from pipeline.maps.frames import BevRange, FloatArray, PlanarPose, range_outline
from pipeline.maps.lines import drop_repeated_nodes


def clean_ring(points_m: FloatArray, tolerance_m: float) -> FloatArray | None:
    """A closed ring (P, 2), first point repeated, without nodes closer than `tolerance_m`; None if it has fewer than 3 corners."""
    opened = points_m[:-1] if len(points_m) > 1 and (points_m[0] == points_m[-1]).all() else points_m
    if len(opened) < 3:
        return None
    ring = drop_repeated_nodes(np.vstack([opened, opened[:1]]), tolerance_m)
    return ring if len(ring) >= 4 else None


def clean_polygons(shell_m: FloatArray, holes_m: list[FloatArray], tolerance_m: float) -> tuple[list[shapely.Polygon], bool]:
    """Valid polygons with counter-clockwise shells from one map polygon, and whether it had to be repaired.

    Unclosed rings are closed, repeated nodes removed, clockwise shells turned. A shell that crosses itself is split into its valid parts.
    """
    shell = clean_ring(shell_m, tolerance_m)
    if shell is None:
        return [], True
    holes = [ring for ring in (clean_ring(hole, tolerance_m) for hole in holes_m) if ring is not None]
    polygon = shapely.Polygon(shell, holes)
    repaired = not polygon.is_valid
    parts = shapely.get_parts(shapely.make_valid(polygon)) if repaired else [polygon]
    areas = [part for part in shapely.get_parts(parts) if part.geom_type == "Polygon" and part.area > tolerance_m**2]
    return [shapely.geometry.polygon.orient(area) for area in areas], repaired


def boundary_rings(area: shapely.Geometry) -> list[FloatArray]:
    """Closed rings (P, 2) of an area: shells counter-clockwise, holes clockwise, so the area is always on the left."""
    rings = []
    for part in polygon_parts(area):
        oriented = shapely.geometry.polygon.orient(part)
        rings += [np.asarray(ring.coords)[:, :2] for ring in (oriented.exterior, *oriented.interiors)]
    return rings


def clip_polygons(polygons: np.ndarray, tree: shapely.STRtree, pose: PlanarPose, bev: BevRange) -> tuple[list[FloatArray], list[bool]]:
    """Shells of polygons inside the range, as closed rings (P, 2) in the ego frame, and whether each was cut.

    The cut edge follows the border of the range, so a polygon stays closed; one that the range cuts apart gives several rings.
    """
    patch = range_outline(pose, bev)
    near = polygons[np.sort(tree.query(patch, predicate="intersects"))]
    rings: list[FloatArray] = []
    cut: list[bool] = []
    if len(near) == 0:
        return rings, cut
    for polygon, whole in zip(near, shapely.covers(patch, near), strict=True):
        for part in [polygon] if whole else polygon_parts(shapely.intersection(polygon, patch)):
            ring = pose.to_ego(np.asarray(shapely.geometry.polygon.orient(part).exterior.coords)[:, :2])
            ring[-1] = ring[0]
            rings.append(ring)
            cut.append(not whole)
    return rings, cut


def polygon_parts(geometry: shapely.Geometry) -> list[shapely.Polygon]:
    """The polygons of a geometry; lines and points that an intersection leaves where shapes only touch are left out."""
    return [part for part in shapely.get_parts(geometry) if part.geom_type == "Polygon"]


def to_corners(ring_m: FloatArray, count: int) -> FloatArray:
    """`count` corners (count, 2) of a closed ring (P, 2), keeping its direction.

    Too many corners: the one whose triangle with its neighbours is smallest goes first (Visvalingam & Whyatt, Line generalisation by
    repeated elimination of points, 1993). Too few: the longest edge is halved. Ties go to the earlier corner.
    """
    corners = [(x, y) for x, y in ring_m[:-1].tolist()]
    areas = [_corner_area(corners, i) for i in range(len(corners))]
    while len(corners) > count:
        smallest = areas.index(min(areas))
        del corners[smallest], areas[smallest]
        for changed in (smallest - 1, smallest % len(corners)):
            areas[changed] = _corner_area(corners, changed)
    while len(corners) < count:
        lengths = [math.dist(corner, following) for corner, following in zip(corners, corners[1:] + corners[:1], strict=True)]
        longest = lengths.index(max(lengths))
        (x0, y0), (x1, y1) = corners[longest], corners[(longest + 1) % len(corners)]
        corners.insert(longest + 1, ((x0 + x1) / 2, (y0 + y1) / 2))
    return np.array(corners)


def _corner_area(corners: list[tuple[float, float]], index: int) -> float:
    """Twice the area of the triangle of a corner and its neighbours."""
    (x0, y0), (x1, y1), (x2, y2) = corners[index - 1], corners[index], corners[(index + 1) % len(corners)]
    return abs((x0 - x1) * (y2 - y1) - (y0 - y1) * (x2 - x1))
