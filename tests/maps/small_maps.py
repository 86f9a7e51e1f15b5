"""Small map expansions built in memory, and indexes moved onto them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.dataset.build import IndexTables

LAYERS = (
    "polygon", "line", "node", "drivable_area", "road_segment", "road_block", "lane", "ped_crossing", "walkway", "stop_line", "carpark_area",
    "road_divider", "lane_divider", "traffic_light", "lane_connector",
)  # fmt: skip


class SmallMap:
    """A map expansion under construction; every method adds one element and returns its token."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {layer: [] for layer in LAYERS}
        self.content |= {"version": "1.3", "canvas_edge": [1000.0, 1000.0], "arcline_path_3": {}, "connectivity": {}}

    def nodes(self, points: Any) -> list[str]:
        start = len(self.content["node"])
        rows = [{"token": f"n{start + i}", "x": float(x), "y": float(y)} for i, (x, y) in enumerate(np.asarray(points, dtype=float))]
        self.content["node"] += rows
        return [row["token"] for row in rows]

    def polygon(self, shell: Any, holes: Any = ()) -> str:
        token = f"p{len(self.content['polygon'])}"
        row = {"token": token, "exterior_node_tokens": self.nodes(shell), "holes": [{"node_tokens": self.nodes(hole)} for hole in holes]}
        self.content["polygon"].append(row)
        return token

    def line(self, layer: str, points: Any) -> str:
        line = f"l{len(self.content['line'])}"
        self.content["line"].append({"token": line, "node_tokens": self.nodes(points)})
        self.content[layer].append({"token": f"{layer}-{line}", "line_token": line})
        return f"{layer}-{line}"

    def area(self, layer: str, shell: Any, holes: Any = (), token: str = "") -> str:
        polygon = self.polygon(shell, holes)
        name = token or f"{layer}-{polygon}"
        row = {"token": name, "polygon_tokens": [polygon]} if layer == "drivable_area" else {"token": name, "polygon_token": polygon}
        if layer == "lane":
            row |= {"left_lane_divider_segments": [], "right_lane_divider_segments": []}
        self.content[layer].append(row)
        return name

    def write(self, folder: Path, location: str = "boston-seaport") -> Path:
        path = folder / "maps" / "expansion" / f"{location}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.content))
        return path


def rectangle(x0: float, y0: float, x1: float, y1: float) -> list[tuple[float, float]]:
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def street(with_road_segments: bool = True) -> SmallMap:
    """A street along x with a divider in its middle, a crossing, an island and two lanes of which the second follows the first."""
    small = SmallMap()
    area = "road_segment" if with_road_segments else "drivable_area"
    small.area(area, rectangle(-100, -6, 100, 6), [rectangle(-12, 3, -8, 5)])
    small.line("road_divider", [(-100, 0), (-50, 0), (100, 0)])
    small.area("ped_crossing", rectangle(5, -6, 9, 6))
    small.area("lane", rectangle(-50, -6, 0, 0), token="a")
    small.area("lane", rectangle(0, -6, 50, 0), token="b")
    small.content["connectivity"] = {"a": {"incoming": [], "outgoing": ["b"]}, "b": {"incoming": ["a"], "outgoing": ["gone"]}}
    return small


def ego(x_m: float, y_m: float, yaw_rad: float) -> np.ndarray:
    """ego2global (4, 4) of a pose in the plane."""
    matrix = np.eye(4)
    matrix[:2, :2] = [[np.cos(yaw_rad), -np.sin(yaw_rad)], [np.sin(yaw_rad), np.cos(yaw_rad)]]
    matrix[:2, 3] = x_m, y_m
    return matrix


def moved(tables: IndexTables, location: str, ego2global: np.ndarray) -> IndexTables:
    """The index with all samples in one location and at one pose."""
    samples = tables.samples
    pose = pa.array([ego2global.ravel().tolist()] * samples.num_rows, type=samples.schema.field("ego2global").type)
    samples = samples.set_column(samples.schema.get_field_index("ego2global"), samples.schema.field("ego2global"), pose)
    where = pa.array([location] * samples.num_rows, type=samples.schema.field("location").type)
    samples = samples.set_column(samples.schema.get_field_index("location"), samples.schema.field("location"), where)
    return replace(tables, samples=samples)
