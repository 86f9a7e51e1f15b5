"""Reading a nuScenes map expansion (version 1.3): `<dataroot>/maps/expansion/<location>.json` to a `VectorMap`.

Which layers make which class follows MapTR (Liao et al., 2023): road and lane dividers -> divider, pedestrian crossings -> ped_crossing,
the edge of the union of road segments and lanes -> boundary. A map without road segments gives the edge of its drivable area instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import shapely

from pipeline.errors import file_error
from pipeline.io import read_json
from pipeline.maps.frames import FloatArray
from pipeline.maps.lanes import build_lane_graph
from pipeline.maps.lines import LineSet, drop_repeated_nodes
from pipeline.maps.rings import boundary_rings, clean_polygons
from pipeline.maps.vector_map import MapFindings, VectorMap, polygon_array

GEOMETRY_LAYERS = ("node", "line", "polygon")
USED_LAYERS = ("road_divider", "lane_divider", "ped_crossing", "road_segment", "lane", "lane_connector", "drivable_area")
OLDEST_VERSION = (1, 3)


@lru_cache(maxsize=8)
def load_expansion(path: Path, node_tolerance_m: float) -> VectorMap:
    """Read a map expansion once per process.

    Elements with unknown tokens, too few nodes or coordinates that are not finite are left out and counted in `VectorMap.findings`.

    Args:
        path: the JSON file; its stem is the location.
        node_tolerance_m: successive nodes closer than this become one.

    Raises:
        DataError: the file is missing, cut, not JSON, older than version 1.3, or a layer that holds the geometry is missing or malformed.
    """
    return _Reader(path, node_tolerance_m).vector_map()


class _Reader:
    """One file: its records by token, and the findings gathered on the way."""

    def __init__(self, path: Path, node_tolerance_m: float) -> None:
        self.path = path
        self.tolerance_m = node_tolerance_m
        self.findings = MapFindings()
        self.layers = _checked_layers(path, self.findings)
        self.nodes = _by_token(path, "node", self.layers["node"], lambda record: (float(record["x"]), float(record["y"])))
        self.line_nodes = _by_token(path, "line", self.layers["line"], lambda record: list(record["node_tokens"]))
        self.polygons = _by_token(path, "polygon", self.layers["polygon"], lambda record: record)

    def vector_map(self) -> VectorMap:
        dividers = [line for layer in ("road_divider", "lane_divider") for line in self._lines(layer)]
        crossings = [area for _, areas in self._areas("ped_crossing") for area in areas]
        lanes = [(token, area) for token, areas in self._areas("lane") for area in areas[:1]]
        road, boundary_source = self._road([area for _, area in lanes])
        rings = self._boundary(road)
        graph = build_lane_graph([token for token, _ in lanes], self._tokens("lane_connector"), self._connectivity())
        self.findings.count("lane_links_dangling", graph.dangling)
        self.findings.count("lane_links_named_by_one_end", graph.one_sided)
        return VectorMap(
            location=self.path.stem,
            dividers=LineSet.of(dividers),
            crossings=polygon_array(crossings),
            road=road,
            boundary=LineSet.of(rings),
            lanes=polygon_array([area for _, area in lanes]),
            lane_edges=graph.edges,
            labelled=np.array([len(dividers) > 0, len(crossings) > 0, len(rings) > 0]),
            boundary_source=boundary_source,
            findings=self.findings,
        )

    def _road(self, lanes: list[shapely.Polygon]) -> tuple[shapely.Geometry, str]:
        """The area of the road and the layers it comes from."""
        segments = [area for _, areas in self._areas("road_segment") for area in areas]
        if segments:
            areas, source = segments + lanes, "road_segment+lane"
        else:
            areas, source = [area for _, parts in self._areas("drivable_area") for area in parts], "drivable_area"
        return shapely.union_all(areas), source if areas else "none"

    def _boundary(self, road: shapely.Geometry) -> list[FloatArray]:
        """Rings of the road's edge; the union may have made new nodes close to old ones."""
        rings = [drop_repeated_nodes(ring, self.tolerance_m) for ring in boundary_rings(road)]
        return [ring for ring in rings if len(ring) >= 4]

    def _lines(self, layer: str) -> list[FloatArray]:
        """Polylines of a line layer, in file order."""
        lines = []
        for record in self.layers[layer]:
            points = self._points(layer, record, self.line_nodes.get(record.get("line_token", "")))
            line = None if points is None else self._cleaned(points)
            if line is not None and len(line) >= 2:
                lines.append(line)
            elif points is not None:
                self._dropped(f"{layer}_without_length", layer, record, "its nodes span no length")
        return lines

    def _cleaned(self, points: FloatArray) -> FloatArray:
        line = drop_repeated_nodes(points, self.tolerance_m) if len(points) else points
        self.findings.count("repeated_nodes_removed", len(points) - len(line))
        return line

    def _areas(self, layer: str) -> list[tuple[str, list[shapely.Polygon]]]:
        """(token, valid polygons) of a polygon layer, in file order."""
        found = []
        for record in self.layers[layer]:
            areas: list[shapely.Polygon] = []
            for token in record.get("polygon_tokens") or [record.get("polygon_token", "")]:
                areas += self._polygon(layer, record, token)
            if areas:
                found.append((str(record.get("token", "")), areas))
        return found

    def _polygon(self, layer: str, record: dict[str, Any], token: str) -> list[shapely.Polygon]:
        polygon = self.polygons.get(token) or {}
        shell = self._points(layer, record, polygon.get("exterior_node_tokens"))
        if shell is None:
            return []
        holes = [self._points(layer, record, hole.get("node_tokens")) for hole in polygon.get("holes", ())]
        areas, repaired = clean_polygons(shell, [hole for hole in holes if hole is not None], self.tolerance_m)
        if not areas:
            self._dropped(f"{layer}_without_area", layer, record, f"polygon {token} has no area")
        elif repaired:
            self.findings.count(f"{layer}_self_intersecting_repaired")
        return areas

    def _points(self, layer: str, record: dict[str, Any], tokens: Sequence[str] | None) -> FloatArray | None:
        """Node coordinates (P, 2); None, and a finding, if a token is unknown or a coordinate is not finite."""
        if tokens is None:
            self._dropped(f"{layer}_unknown_geometry", layer, record, "its line or polygon token is unknown")
            return None
        try:
            points = np.array([self.nodes[token] for token in tokens], dtype=np.float64).reshape(-1, 2)
        except (KeyError, TypeError):
            self._dropped(f"{layer}_unknown_node", layer, record, "a node token is unknown")
            return None
        if not np.isfinite(points).all():
            self._dropped(f"{layer}_not_finite", layer, record, "a coordinate is not finite")
            return None
        return points

    def _tokens(self, layer: str) -> list[str]:
        return [str(record.get("token", "")) for record in self.layers[layer]]

    def _connectivity(self) -> dict[str, dict[str, list[str]]]:
        table = self.layers["connectivity"]
        usable = {token: links for token, links in table.items() if isinstance(links, dict)}
        self.findings.count("connectivity_rows_malformed", len(table) - len(usable))
        return usable

    def _dropped(self, what: str, layer: str, record: dict[str, Any], why: str) -> None:
        self.findings.dropped(what, f"{layer} {record.get('token', '?')}: {why}")


def _checked_layers(path: Path, findings: MapFindings) -> dict[str, Any]:
    """The layers this module uses. Absent ones other than the geometry are empty, and counted."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise file_error(path, f"must hold a mapping of layers, got {type(content).__name__}")
    version = str(content.get("version", "1.0"))
    if _version(version) < OLDEST_VERSION:
        raise file_error(path, f"field version = {version!r}: must be 1.3 or later", "Use the nuScenes map expansion v1.3")
    for layer in GEOMETRY_LAYERS:
        if not isinstance(content.get(layer), list):
            raise file_error(path, f"layer {layer!r}: must be a list of records, got {type(content.get(layer)).__name__}")
    layers = {name: content[name] for name in GEOMETRY_LAYERS}
    for layer in USED_LAYERS:
        records = content.get(layer)
        findings.count("layers_absent", int(records is None))
        layers[layer] = _record_list(path, layer, records or [])
    connectivity = content.get("connectivity") or {}
    if not isinstance(connectivity, dict):
        raise file_error(path, f"layer 'connectivity': must be a mapping of tokens, got {type(connectivity).__name__}")
    return layers | {"connectivity": connectivity}


def _record_list(path: Path, layer: str, records: Any) -> list[dict[str, Any]]:
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise file_error(path, f"layer {layer!r}: must be a list of records")
    return records


def _version(text: str) -> tuple[int, ...]:
    """A dotted version as numbers; anything else sorts first."""
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0,)


def _by_token(path: Path, layer: str, records: list[Any], value: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Records of a geometry layer by token."""
    table = {}
    for position, record in enumerate(records):
        try:
            table[record["token"]] = value(record)
        except (KeyError, TypeError, ValueError) as error:
            raise file_error(path, f"layer {layer!r}, record {position}: missing or malformed field ({error!r})") from None
    return table
