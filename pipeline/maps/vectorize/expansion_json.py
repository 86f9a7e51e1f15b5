"""Vectorized masks as a nuScenes map expansion (version 1.3) that nuscenes-devkit's NuScenesMap opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import NAMESPACE_OID, uuid5

import numpy as np

from pipeline.io import write_json
from pipeline.maps.frames import FloatArray
from pipeline.maps.rings import boundary_rings
from pipeline.maps.vectorize.geojson import VectorFeatures

EMPTY_LAYERS = ("road_segment", "road_block", "lane", "walkway", "stop_line", "carpark_area", "lane_divider", "traffic_light", "lane_connector")


def write_expansion(path: Path, features: VectorFeatures, canvas_edge_m: tuple[float, float]) -> None:
    """Write dividers as road_divider, crossings as ped_crossing and areas as one drivable_area; everything else is an empty layer.

    A raster does not tell a road divider from a lane divider. Tokens depend on the content only, so equal features give equal bytes.

    Args:
        path: the file, replaced atomically; its stem should be the location.
        features: map frame, m.
        canvas_edge_m: largest x and y of the map.
    """
    tables = _Tables()
    dividers = [tables.line(points) for name, points in features.lines if name == "divider"]
    crossings = [tables.polygon(boundary_rings(area)) for name, area in features.areas if name == "ped_crossing"]
    drivable = [tables.polygon(boundary_rings(area)) for name, area in features.areas if name == "drivable_area"]
    layers: dict[str, Any] = {name: [] for name in EMPTY_LAYERS}
    layers |= {"version": "1.3", "canvas_edge": list(canvas_edge_m), "arcline_path_3": {}, "connectivity": {}}
    layers |= {"node": tables.nodes, "line": tables.lines, "polygon": tables.polygons}
    layers["road_divider"] = [{"token": _token("road_divider", t), "line_token": t, "road_segment_token": None} for t in dividers]
    layers["ped_crossing"] = [{"token": _token("ped_crossing", t), "polygon_token": t, "road_segment_token": ""} for t in crossings]
    layers["drivable_area"] = [{"token": _token("drivable_area", *drivable), "polygon_tokens": drivable}] if drivable else []
    write_json(path, layers)


class _Tables:
    """Geometry tables under construction. Points to the millimetre; equal points are one node."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.polygons: list[dict[str, Any]] = []
        self._known: set[str] = set()

    def line(self, points_m: FloatArray) -> str:
        """Add a polyline (P, 2); returns its token."""
        token = _token("line", len(self.lines))
        self.lines.append({"token": token, "node_tokens": self._node_tokens(points_m)})
        return token

    def polygon(self, rings_m: list[FloatArray]) -> str:
        """Add a polygon, shell first; returns its token."""
        token = _token("polygon", len(self.polygons))
        shell, *holes = (self._node_tokens(ring[:-1]) for ring in rings_m)
        self.polygons.append({"token": token, "exterior_node_tokens": shell, "holes": [{"node_tokens": hole} for hole in holes]})
        return token

    def _node_tokens(self, points_m: FloatArray) -> list[str]:
        tokens = []
        for x, y in np.round(points_m, 3).tolist():
            token = _token("node", x, y)
            if token not in self._known:
                self._known.add(token)
                self.nodes.append({"token": token, "x": x, "y": y})
            tokens.append(token)
        return tokens


def _token(*parts: object) -> str:
    return str(uuid5(NAMESPACE_OID, "/".join(map(str, parts))))
