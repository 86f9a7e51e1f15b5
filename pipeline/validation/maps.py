"""Map expansion files of the data set's locations: readable, tokens that resolve, geometry that is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.errors import DataError
from pipeline.io import read_json
from pipeline.validation.context import Context

_POLYGON_LAYERS = ("drivable_area", "road_segment", "lane", "lane_connector", "ped_crossing", "walkway", "stop_line", "carpark_area")
_LINE_LAYERS = ("road_divider", "lane_divider")
_COLUMNS = ("token", "location", "layer", "reference_problem", "shape_problem")
Row = tuple[str, str, str, str, str]


def measure(context: Context) -> pa.Table:
    """One row a map element (file, node, line, polygon, link): reference_problem (unknown tokens, unreadable file), shape_problem."""
    rows: list[Row] = []
    for location in sorted(set(context.tables.log["location"].to_pylist())):
        path = context.dataroot / "maps" / "expansion" / f"{location}.json"
        if path.is_file():
            rows += _inspect(location, path)
    return pa.table({name: pa.array([row[i] for row in rows], pa.string()) for i, name in enumerate(_COLUMNS)})


def _inspect(location: str, path: Path) -> list[Row]:
    try:
        stored = read_json(path)
        nodes = {node["token"]: (node["x"], node["y"]) for node in stored["node"]}
        lines = {line["token"]: line["node_tokens"] for line in stored["line"]}
        polygons = {polygon["token"]: polygon for polygon in stored["polygon"]}
        rows = [(location, location, "file", "", "")]
        rows += _lines(location, stored, lines, nodes)
        rows += _polygons(location, stored, polygons, nodes)
        rows += _connectivity(location, stored)
    except DataError as error:
        return [(location, location, "file", str(error).removeprefix(f"{path}: "), "")]
    except (KeyError, TypeError) as error:
        return [(location, location, "file", f"not a map expansion: {type(error).__name__} {error}", "")]
    return rows


def _lines(location: str, stored: dict[str, Any], lines: dict[str, list[str]], nodes: dict[str, tuple[float, float]]) -> list[Row]:
    rows = []
    for layer in _LINE_LAYERS:
        for record in stored.get(layer, []):
            tokens = lines.get(record["line_token"])
            if tokens is None:
                rows.append((record["token"], location, layer, "line_token is unknown", ""))
            elif any(token not in nodes for token in tokens):
                rows.append((record["token"], location, layer, "a node token of its line is unknown", ""))
            else:
                rows.append((record["token"], location, layer, "", _line_shape(np.array([nodes[token] for token in tokens], dtype=float))))
    return rows


def _line_shape(points: np.ndarray) -> str:
    if not np.isfinite(points).all():
        return "a node is not finite"
    if len(points) < 2:
        return "line has fewer than two nodes"
    steps = np.linalg.norm(np.diff(points, axis=0), axis=1)
    if steps.sum() == 0:
        return "line has length zero"
    return "line repeats a node" if (steps == 0).any() else ""


def _polygons(location: str, stored: dict[str, Any], polygons: dict[str, Any], nodes: dict[str, tuple[float, float]]) -> list[Row]:
    rows = []
    for layer in _POLYGON_LAYERS:
        for record in stored.get(layer, []):
            for token in record.get("polygon_tokens") or [record.get("polygon_token")]:
                reference, shape = _polygon(polygons.get(token), nodes)
                rows.append((record["token"], location, layer, reference, shape))
    return rows


def _polygon(polygon: dict[str, Any] | None, nodes: dict[str, tuple[float, float]]) -> tuple[str, str]:
    from shapely import Polygon
    from shapely.validation import explain_validity

    if polygon is None:
        return "polygon token is unknown", ""
    rings = [polygon["exterior_node_tokens"], *(hole["node_tokens"] for hole in polygon.get("holes", []))]
    if any(token not in nodes for ring in rings for token in ring):
        return "a node token of its polygon is unknown", ""
    exterior, *holes = [[nodes[token] for token in ring] for ring in rings]
    if len(set(exterior)) < 3:
        return "", "polygon has fewer than three different nodes"
    if len({*exterior}) < len(exterior) - 1:
        return "", "polygon repeats a node"
    shape = Polygon(exterior, [hole for hole in holes if len(set(hole)) >= 3])
    return "", "" if shape.is_valid else f"polygon is not simple ({explain_validity(shape).split('[')[0]})"


def _connectivity(location: str, stored: dict[str, Any]) -> list[Row]:
    """Lane links: both ends must be lanes or lane connectors of the file (patches cut out of a larger map leave some open)."""
    known = {record["token"] for layer in ("lane", "lane_connector") for record in stored.get(layer, [])}
    rows = []
    for token, links in stored.get("connectivity", {}).items():
        open_ends = [end for side in ("incoming", "outgoing") for end in links.get(side, []) if end not in known]
        problem = "a connected lane is unknown" if open_ends or token not in known else ""
        rows.append((token, location, "connectivity", "", problem))
    return rows
