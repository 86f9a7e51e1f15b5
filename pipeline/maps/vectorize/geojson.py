"""Vectorized masks as GeoJSON (structure of RFC 7946; coordinates are metres of the map frame, as nuScenes maps have no datum)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import shapely

from pipeline.errors import file_error
from pipeline.io import read_json, write_text
from pipeline.maps.frames import FloatArray
from pipeline.maps.lines import LineSet
from pipeline.maps.rings import boundary_rings
from pipeline.maps.vector_map import MapFindings, VectorMap, polygon_array
from pipeline.taxonomy import MAP_CLASSES

LINE_CLASSES = ("divider",)
AREA_CLASSES = ("drivable_area", "ped_crossing")
CLASSES = (*LINE_CLASSES, *AREA_CLASSES)


@dataclass(frozen=True)
class VectorFeatures:
    """Classified lines and areas in one planar frame, m."""

    lines: list[tuple[str, FloatArray]]  # class, (P, 2); a closed line repeats its first point
    areas: list[tuple[str, shapely.Polygon]]


def write_geojson(path: Path, features: VectorFeatures, resolution_m: float) -> None:
    """Write features with millimetre coordinates; equal features give equal bytes.

    Args:
        path: the file, replaced atomically.
        features: what to write.
        resolution_m: pixel size of the mask they come from, recorded in the file.
    """
    entries = [_feature(name, {"type": "LineString", "coordinates": _rounded(points)}) for name, points in features.lines]
    entries += [_feature(name, {"type": "Polygon", "coordinates": _polygon(area)}) for name, area in features.areas]
    body = ",\n".join(entries)
    write_text(path, f'{{"type":"FeatureCollection","resolution_m":{json.dumps(resolution_m)},"features":[\n{body}\n]}}\n')


def read_geojson(path: Path) -> VectorFeatures:
    """Read what `write_geojson` wrote.

    Raises:
        DataError: the file is missing, cut, or holds a feature that is not one of ours.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("type") != "FeatureCollection" or not isinstance(content.get("features"), list):
        raise file_error(path, "not a GeoJSON FeatureCollection")
    lines: list[tuple[str, FloatArray]] = []
    areas: list[tuple[str, shapely.Polygon]] = []
    for number, feature in enumerate(content["features"]):
        try:
            name, geometry = feature["properties"]["class"], feature["geometry"]
            if geometry["type"] == "LineString":
                lines.append((name, _points(geometry["coordinates"])))
            else:
                shell, *holes = (_points(ring) for ring in geometry["coordinates"])
                areas.append((name, shapely.Polygon(shell, holes)))
        except (KeyError, TypeError, ValueError, shapely.errors.ShapelyError) as error:
            raise file_error(path, f"features[{number}]: not a classified LineString or Polygon ({error!r})") from None
    return VectorFeatures(lines, areas)


@lru_cache(maxsize=8)
def load_geojson(path: Path) -> VectorMap:
    """A vectorized raster map as the map of its location (the file's stem), read once per process.

    Lines of class divider, areas of class ped_crossing, and the edge of the areas of class drivable_area. Classes that the raster does
    not hold are marked as not labelled. There are no lanes.
    """
    features = read_geojson(path)
    dividers = [points for name, points in features.lines if name == "divider"]
    crossings = [shapely.geometry.polygon.orient(area) for name, area in features.areas if name == "ped_crossing"]
    road = shapely.union_all([area for name, area in features.areas if name == "drivable_area"])
    rings = boundary_rings(road)
    present = {"divider": dividers, "ped_crossing": crossings, "boundary": rings}
    return VectorMap(
        location=path.stem,
        dividers=LineSet.of(dividers),
        crossings=polygon_array(crossings),
        road=road,
        boundary=LineSet.of(rings),
        lanes=polygon_array([]),
        lane_edges=np.empty((0, 2), dtype=np.int64),
        labelled=np.array([len(present[name]) > 0 for name in MAP_CLASSES]),
        boundary_source="raster" if rings else "none",
        findings=MapFindings(),
    )


def _feature(name: str, geometry: dict[str, Any]) -> str:
    return json.dumps({"type": "Feature", "properties": {"class": name}, "geometry": geometry}, separators=(",", ":"), allow_nan=False)


def _polygon(area: shapely.Polygon) -> list[list[list[float]]]:
    return [_rounded(ring) for ring in boundary_rings(area)]


def _rounded(points_m: FloatArray) -> list[list[float]]:
    rounded: list[list[float]] = (np.round(points_m, 3) + 0.0).tolist()  # + 0.0: no negative zero
    return rounded


def _points(coordinates: Sequence[Any]) -> FloatArray:
    points = np.asarray(coordinates, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2 or len(points) < 2 or not np.isfinite(points).all():
        raise ValueError(f"coordinates of shape {points.shape}")
    return points
