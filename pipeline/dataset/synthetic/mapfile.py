"""The map expansion of one scene, in the schema that nuscenes-devkit's NuScenesMap reads (version 1.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from shapely.geometry import Polygon
from shapely.geometry.polygon import orient

from pipeline.dataset.synthetic.layout import Layout, Road
from pipeline.dataset.synthetic.paths2d import ArcPath, Float, Pose

LAYERS = (
    "polygon", "line", "node", "drivable_area", "road_segment", "road_block", "lane", "ped_crossing", "walkway", "stop_line", "carpark_area",
    "road_divider", "lane_divider", "traffic_light", "lane_connector",
)  # fmt: skip

_SEGMENT_TYPES = {"dashed_white": "SINGLE_DASHED_WHITE", "solid_white": "SINGLE_SOLID_WHITE", "double_yellow": "DOUBLE_SOLID_YELLOW"}
_STRAIGHT_RADIUS_M = 999.0


@dataclass(frozen=True)
class MapRecords:
    """The map of one scene: records by layer, and by lane token the centre line and the neighbours along the traffic."""

    layers: dict[str, list[dict[str, Any]]]
    arcline_path_3: dict[str, list[dict[str, Any]]]
    connectivity: dict[str, dict[str, list[str]]]


class _Writer:
    """Collects the records of one scene. `offset_m` (2,) takes the tile frame to the location's map frame."""

    def __init__(self, offset_m: Float, token: Callable[[str], str]) -> None:
        self.layers: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYERS}
        self.arcline_path_3: dict[str, list[dict[str, Any]]] = {}
        self.connectivity: dict[str, dict[str, list[str]]] = {}
        self._offset, self._token = offset_m, token

    def add(self, layer: str, **fields: Any) -> str:
        """Append a record with a fresh token, and return the token."""
        token = self._token(f"{layer}/{len(self.layers[layer])}")
        self.layers[layer].append({"token": token, **fields})
        return token

    def _nodes(self, points: Float) -> list[str]:
        return [self.add("node", x=x, y=y) for x, y in np.round(points + self._offset, 4).tolist()]

    def polygon(self, exterior: Float, holes: list[Float] | None = None) -> str:
        """Add a polygon (N,2), not closed."""
        rings = [{"node_tokens": self._nodes(hole)} for hole in holes or []]
        return self.add("polygon", exterior_node_tokens=self._nodes(exterior), holes=rings)

    def line(self, points: Float) -> str:
        """Add a line (N,2)."""
        return self.add("line", node_tokens=self._nodes(points))

    def _map_pose(self, pose: Pose) -> list[float]:
        x, y, yaw = pose
        return [x + float(self._offset[0]), y + float(self._offset[1]), (yaw + np.pi) % (2.0 * np.pi) - np.pi]

    def lane_path(self, token: str, path: ArcPath) -> None:
        """Add the centre line of a lane as arc-line paths, one for each piece of constant curvature."""
        pieces, along = [], 0.0
        for length, curvature in zip(path.lengths_m, path.curvatures, strict=True):
            start, end = (self._map_pose(path.pose_at(s)) for s in (along, along + length))
            straight = abs(curvature) < 1e-6
            pieces.append(
                {
                    "start_pose": start,
                    "end_pose": end,
                    "shape": "RSR" if curvature < -1e-6 else "LSL",
                    "radius": _STRAIGHT_RADIUS_M if straight else 1.0 / abs(curvature),
                    "segment_length": [0.0, length, 0.0] if straight else [length, 0.0, 0.0],
                }
            )
            along += length
        self.arcline_path_3[token] = pieces
        self.connectivity[token] = {"incoming": [], "outgoing": []}

    def connect(self, source: str, target: str) -> None:
        """Say that traffic leaves lane `source` into lane `target`."""
        self.connectivity[source]["outgoing"].append(target)
        self.connectivity[target]["incoming"].append(source)


def make_map(plan: Layout, offset_m: Float, token: Callable[[str], str]) -> MapRecords:
    """Write all layers of a street plan; `token` makes a unique token from a name."""
    out = _Writer(offset_m, token)
    area = out.add("drivable_area", polygon_tokens=_area_polygons(out, plan))
    lanes: dict[tuple[int, int], list[str]] = {}
    segments: list[list[str]] = []
    for index, road in enumerate(plan.roads):
        segments.append(_road_records(out, road, area))
        lanes.update({(index, k): _lane_records(out, road, k) for k in range(len(road.lane_offsets()))})
    if plan.junction is not None:
        out.add("road_segment", polygon_token=out.polygon(plan.junction), is_intersection=True, drivable_area_token=area)
    for connector in plan.connectors:
        stations = connector.path.stations()
        edges = [connector.path.points(stations, side * 0.5 * connector.width_m) for side in (-1, 1)]
        lane = out.add("lane_connector", polygon_token=out.polygon(np.concatenate([edges[0], edges[1][::-1]])))
        out.lane_path(lane, connector.path)
        out.connect(lanes[connector.source][-1], lane)
        out.connect(lane, lanes[connector.target][0])
    _furniture(out, plan, segments)
    return MapRecords(out.layers, out.arcline_path_3, out.connectivity)


def _area_polygons(out: _Writer, plan: Layout) -> list[str]:
    pavement = plan.pavement()
    parts = [pavement] if isinstance(pavement, Polygon) else list(pavement.geoms)
    tokens = []
    for part in (orient(p) for p in parts):
        holes = [np.array(ring.coords)[:-1] for ring in part.interiors]
        tokens.append(out.polygon(np.array(part.exterior.coords)[:-1], holes))
    return tokens


def _road_records(out: _Writer, road: Road, area: str) -> list[str]:
    """Road segments and road blocks of a road, piece by piece; the tokens of the segments."""
    tokens = []
    for start, stop in road.pieces():
        outline = out.polygon(road.strip(road.right_m, road.left_m, start, stop))
        segment = out.add("road_segment", polygon_token=outline, is_intersection=False, drivable_area_token=area)
        tokens.append(segment)
        for low, high, ends in (
            (-road.forward * road.lane_width_m, 0.0, (start, stop)),
            (0.0, road.backward * road.lane_width_m, (stop, start)),
        ):
            edges = [out.line(road.path.points([s, s], [low, high])) for s in ends]
            block = out.polygon(road.strip(low, high, start, stop))
            out.add("road_block", polygon_token=block, from_edge_line_token=edges[0], to_edge_line_token=edges[1], road_segment_token=segment)
    return tokens


def _lane_records(out: _Writer, road: Road, index: int) -> list[str]:
    """Lanes of one strip of a road, piece by piece in the direction of travel; their tokens."""
    offset, direction = road.lane_offsets()[index]
    half = 0.5 * road.lane_width_m
    tokens: list[str] = []
    for start, stop in road.pieces()[::direction]:
        outline = out.polygon(road.strip(offset - half, offset + half, start, stop))
        ends = (start, stop)[::direction]
        edges = [out.line(road.path.points([s, s], [offset - half, offset + half])) for s in ends]
        nodes = out.layers["polygon"][-1]["exterior_node_tokens"]
        right, left = nodes[: len(nodes) // 2], nodes[: len(nodes) // 2 - 1 : -1]
        if direction < 0:
            right, left = left[::-1], right[::-1]
        token = out.add(
            "lane", polygon_token=outline, lane_type="CAR", from_edge_line_token=edges[0], to_edge_line_token=edges[1],
            left_lane_divider_segments=[{"node_token": n, "segment_type": _edge_type(road, index, left=True)} for n in left],
            right_lane_divider_segments=[{"node_token": n, "segment_type": _edge_type(road, index, left=False)} for n in right],
        )  # fmt: skip
        piece = road.path.section(start, stop).offset(offset)
        out.lane_path(token, piece if direction > 0 else piece.reversed())
        if tokens:
            out.connect(tokens[-1], token)
        tokens.append(token)
    return tokens


def _edge_type(road: Road, index: int, left: bool) -> str:
    """Kind of paint at a lane's edge, seen in the direction of travel."""
    forward = index < road.forward
    rank = index if forward else index - road.forward
    if left:
        return _SEGMENT_TYPES["double_yellow" if rank == 0 else "dashed_white"]
    outer = rank == (road.forward if forward else road.backward) - 1
    if not outer:
        return _SEGMENT_TYPES["dashed_white"]
    return _SEGMENT_TYPES["solid_white"] if road.parking_m(-1 if forward else 1) else "NIL"


def _furniture(out: _Writer, plan: Layout, segments: list[list[str]]) -> None:
    """Crossings, stop lines, sidewalks, car parks and dividers."""
    crossings = []
    for crossing in plan.crossings:
        cuts = [stop for _, stop in plan.roads[crossing.road].pieces()]
        segment = segments[crossing.road][int(np.searchsorted(cuts, crossing.start_m))]
        crossings.append(out.add("ped_crossing", polygon_token=out.polygon(crossing.outline), road_segment_token=segment))
    for line in plan.stop_lines:
        out.add(
            "stop_line", polygon_token=out.polygon(line.outline), stop_line_type="PED_CROSSING", ped_crossing_tokens=[crossings[line.crossing]],
            traffic_light_tokens=[], road_block_token="",
        )  # fmt: skip
    for band in plan.sidewalks:
        out.add("walkway", polygon_token=out.polygon(band.outline))
    for lot in plan.lots:
        out.add("carpark_area", polygon_token=out.polygon(lot.outline), orientation=0.0, road_block_token="")
    for marking in plan.markings:
        painted = out.line(marking.points)
        if marking.layer == "road_divider":
            out.add("road_divider", line_token=painted, road_segment_token=None)
        else:
            nodes = out.layers["line"][-1]["node_tokens"]
            kinds = [{"node_token": node, "segment_type": _SEGMENT_TYPES[marking.kind]} for node in nodes]
            out.add("lane_divider", line_token=painted, lane_divider_segments=kinds)
