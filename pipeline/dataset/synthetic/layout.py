"""The street plan of one scene: roads, junction, markings, crossings, sidewalks and paved lots.

All coordinates are metres in the scene's tile frame: origin at the tile's centre, x east, y north, flat ground at z = 0, right-hand traffic. This
plan is the only source of road geometry: the images, the map expansion, the occupancy labels and the traffic are all made from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from shapely.geometry import Polygon
from shapely.ops import unary_union

from pipeline.dataset.synthetic.paths2d import ArcPath, Float, turn_between

TILE_M = 200.0
"""Side of a scene's square tile."""
ROAD_REACH_M = 95.0
"""Roads end this far from the tile's centre."""
CROSSING_DEPTH_M = 3.2
STOP_LINE_DEPTH_M = 0.4


@dataclass(frozen=True)
class Road:
    """A road with a centre line and constant cross-section.

    `forward` lanes lie right of the centre line and run along it, `backward` lanes lie left of it and run against it. Widths are metres; a parking
    strip lies between the outer lane and the kerb. `painted_m` are the arc-length intervals with longitudinal markings.
    """

    path: ArcPath
    forward: int
    backward: int
    lane_width_m: float
    parking_right_m: float
    parking_left_m: float
    walk_right_m: float
    walk_left_m: float
    painted_m: tuple[tuple[float, float], ...]
    piece_count: int

    @property
    def right_m(self) -> float:
        """Offset of the right kerb (negative)."""
        return -(self.forward * self.lane_width_m + self.parking_right_m)

    @property
    def left_m(self) -> float:
        """Offset of the left kerb (positive)."""
        return self.backward * self.lane_width_m + self.parking_left_m

    def kerb_m(self, side: int) -> float:
        """Offset of the kerb on `side`: +1 left, -1 right."""
        return self.left_m if side > 0 else self.right_m

    def walk_m(self, side: int) -> float:
        """Width of the sidewalk on `side`."""
        return self.walk_left_m if side > 0 else self.walk_right_m

    def parking_m(self, side: int) -> float:
        """Width of the parking strip on `side`."""
        return self.parking_left_m if side > 0 else self.parking_right_m

    def lane_offsets(self) -> list[tuple[float, int]]:
        """(offset of the lane centre, direction +1 along or -1 against the centre line), from the inner to the outer lane of each side."""
        width = self.lane_width_m
        return [(-(k + 0.5) * width, 1) for k in range(self.forward)] + [((k + 0.5) * width, -1) for k in range(self.backward)]

    def strip(self, low_m: float, high_m: float, start_m: float = 0.0, stop_m: float | None = None) -> Float:
        """Outline (N,2), counter-clockwise, of the strip between two offsets (low < high) and two arc lengths."""
        stations = self.path.stations(start_m, stop_m)
        return np.concatenate([self.path.points(stations, low_m), self.path.points(stations, high_m)[::-1]])

    def pieces(self) -> list[tuple[float, float]]:
        """Arc-length intervals of the road segments of the map."""
        cuts = np.linspace(0.0, self.path.length_m, self.piece_count + 1)
        return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))


@dataclass(frozen=True)
class Band:
    """A strip of ground between two curves of equally many points (N,2), the left one left of the right one."""

    right: Float
    left: Float

    @property
    def outline(self) -> Float:
        """Outline (2N,2), counter-clockwise."""
        return np.concatenate([self.right, self.left[::-1]])


@dataclass(frozen=True)
class Marking:
    """A painted line (N,2). kind: `dashed_white`, `solid_white` or `double_yellow`; layer: `lane_divider` or `road_divider`."""

    points: Float
    kind: str
    layer: str


@dataclass(frozen=True)
class Crossing:
    """A zebra crossing over the whole width of a road between two arc lengths."""

    road: int
    start_m: float
    stop_m: float
    outline: Float


@dataclass(frozen=True)
class StopLine:
    """A stop line before a crossing; `outline` (4,2)."""

    crossing: int
    outline: Float


@dataclass(frozen=True)
class Connector:
    """A lane through the junction from lane `source` to lane `target`, both (road, index in `Road.lane_offsets`)."""

    source: tuple[int, int]
    target: tuple[int, int]
    path: ArcPath
    width_m: float


@dataclass(frozen=True)
class Lot:
    """A paved area beside the sidewalk of `road`, between two arc lengths and two offsets from the centre line."""

    road: int
    side: int
    start_m: float
    stop_m: float
    near_m: float
    far_m: float
    outline: Float


@dataclass(frozen=True)
class Layout:
    """The street plan of a scene. `junction` is the outline (N,2) of the junction's pavement, or None."""

    kind: str
    roads: tuple[Road, ...]
    junction: Float | None
    connectors: tuple[Connector, ...]
    markings: tuple[Marking, ...]
    crossings: tuple[Crossing, ...]
    stop_lines: tuple[StopLine, ...]
    sidewalks: tuple[Band, ...]
    lots: tuple[Lot, ...]

    def pavement(self) -> Polygon:
        """Union of all carriageways."""
        shapes = [Polygon(road.strip(road.right_m, road.left_m)) for road in self.roads]
        return unary_union(shapes if self.junction is None else [*shapes, Polygon(self.junction)])

    def lane_path(self, road: int, lane: int) -> ArcPath:
        """Centre line of a lane over the whole road, in its direction of travel."""
        offset, direction = self.roads[road].lane_offsets()[lane]
        path = self.roads[road].path.offset(offset)
        return path if direction > 0 else path.reversed()

    def routes(self) -> list[ArcPath]:
        """Every way to drive through the scene: a lane of a through road, or lane, connector, lane."""
        if self.junction is None:
            return [self.lane_path(r, k) for r, road in enumerate(self.roads) for k in range(len(road.lane_offsets()))]
        return [self.lane_path(*c.source).then(c.path).then(self.lane_path(*c.target)) for c in self.connectors]


def make_layout(rng: np.random.Generator) -> Layout:
    """Draw a street plan: a straight road, a curve, a double curve, or a junction of three or four arms."""
    kind = str(rng.choice(["straight", "curve", "double_curve", "three_way", "four_way"], p=[0.17, 0.2, 0.13, 0.2, 0.3]))
    if kind in ("three_way", "four_way"):
        roads, crossings, junction, corners = _junction(rng, 3 if kind == "three_way" else 4)
        connectors = tuple(_connectors(roads))
    else:
        roads, crossings = _through_road(rng, kind)
        junction, corners, connectors = None, [], ()
    sidewalks = [band for road in roads for band in _sidewalks(road)] + corners
    stop_lines = tuple(_stop_lines(roads, crossings, junction is not None))
    markings = tuple(marking for road in roads for marking in _markings(road))
    plan = Layout(kind, tuple(roads), junction, connectors, markings, tuple(crossings), stop_lines, tuple(sidewalks), ())
    return replace(plan, lots=tuple(_lots(rng, plan)))


def _section(rng: np.random.Generator, lanes: int, parking_rate: float = 0.6) -> dict[str, float | int]:
    """Random cross-section of a road with `lanes` lanes a direction."""
    parking = [float(rng.uniform(2.7, 3.1)) if rng.random() < parking_rate else 0.0 for _ in range(2)]
    return {
        "forward": lanes,
        "backward": lanes,
        "lane_width_m": float(rng.uniform(3.0, 3.75)),
        "parking_right_m": parking[0],
        "parking_left_m": parking[1],
        "walk_right_m": float(rng.uniform(2.2, 4.0)),
        "walk_left_m": float(rng.uniform(2.2, 4.0)),
    }


def _through_road(rng: np.random.Generator, kind: str) -> tuple[list[Road], list[Crossing]]:
    """One road through the tile's centre with a zebra crossing near the middle."""
    length = 2.0 * ROAD_REACH_M
    if kind == "straight":
        lengths, curvatures = [length], [0.0]
    elif kind == "curve":
        turn = float(rng.uniform(0.5, 1.5) * rng.choice([-1, 1]))
        arc = float(rng.uniform(45.0, 110.0))
        lead = (length - arc) * float(rng.uniform(0.35, 0.65))
        lengths, curvatures = [lead, arc, length - arc - lead], [0.0, turn / arc, 0.0]
    else:
        turn = float(rng.uniform(0.4, 0.9) * rng.choice([-1, 1]))
        arcs = rng.uniform(40.0, 60.0, 2).tolist()
        lead = (length - sum(arcs)) / 3.0
        lengths, curvatures = [lead, arcs[0], lead, arcs[1], lead], [0.0, turn / arcs[0], 0.0, -turn / arcs[1], 0.0]
    path = _centred(ArcPath((0.0, 0.0, float(rng.uniform(-np.pi, np.pi))), tuple(lengths), tuple(curvatures)))
    middle = float(np.clip(0.5 * length + rng.uniform(-22.0, 22.0), 20.0, length - 20.0))
    start, stop = middle - 0.5 * CROSSING_DEPTH_M, middle + 0.5 * CROSSING_DEPTH_M
    gap = 1.5 + STOP_LINE_DEPTH_M
    road = Road(path=path, painted_m=((0.0, start - gap), (stop + gap, length)), piece_count=4, **_section(rng, int(rng.integers(1, 3))))  # type: ignore[arg-type]
    return [road], [Crossing(0, start, stop, road.strip(road.right_m, road.left_m, start, stop))]


def _centred(path: ArcPath) -> ArcPath:
    """The curve moved so that its middle lies on the tile's centre."""
    x, y = path.point_at(0.5 * path.length_m)
    return ArcPath((path.start[0] - x, path.start[1] - y, path.start[2]), path.lengths_m, path.curvatures)


def _junction(rng: np.random.Generator, arms: int) -> tuple[list[Road], list[Crossing], Float, list[Band]]:
    """Three or four arms that meet at the tile's centre; opposite arms share one line and one cross-section."""
    main = float(rng.uniform(-np.pi, np.pi))
    side = main + np.pi / 2.0 + float(np.deg2rad(rng.uniform(-14.0, 14.0)))
    headings = [main, side, main + np.pi, side + np.pi][:arms]
    lanes = rng.integers(1, 3, 2)
    sections = [_section(rng, int(n), 0.5) for n in lanes]
    # An opposite arm runs the other way: its right side continues the first arm's left side.
    sections += [_mirrored(section) for section in sections]
    sections = [sections[i] for i in range(arms)]
    mouth = _mouth_distance(headings, sections) + float(rng.uniform(1.5, 4.0))
    crossing_start = 0.6
    painted_from = crossing_start + CROSSING_DEPTH_M + 1.0 + STOP_LINE_DEPTH_M
    roads, crossings = [], []
    for index, (heading, section) in enumerate(zip(headings, sections, strict=True)):
        length = ROAD_REACH_M - mouth
        bend = float(rng.uniform(-1, 1) / rng.uniform(70.0, 160.0)) if rng.random() < 0.5 else 0.0
        path = ArcPath((mouth * np.cos(heading), mouth * np.sin(heading), heading), (25.0, length - 25.0), (0.0, bend))
        roads.append(Road(path=path, painted_m=((painted_from, length),), piece_count=2, **section))  # type: ignore[arg-type]
        if rng.random() < 0.8:
            stop = crossing_start + CROSSING_DEPTH_M
            outline = roads[-1].strip(roads[-1].right_m, roads[-1].left_m, crossing_start, stop)
            crossings.append(Crossing(index, crossing_start, stop, outline))
    kerbs, outer = _corner_curves(roads, 0.0), _corner_curves(roads, 1.0)
    corners = [Band(right=kerb, left=far) for kerb, far in zip(kerbs, outer, strict=True)]
    # A corner runs from the left kerb of its arm to the right kerb of the next arm, so the corners alone trace the junction's outline.
    return roads, crossings, np.concatenate(kerbs), corners


def _mirrored(section: dict[str, float | int]) -> dict[str, float | int]:
    """The cross-section seen from the other end of the road."""
    swap = {"right": "left", "left": "right", "forward": "backward", "backward": "forward"}
    return {"_".join(swap.get(word, word) for word in name.split("_")): value for name, value in section.items()}


def _half_width(section: dict[str, float | int], side: str) -> float:
    """Distance from the centre line to the outer edge of the sidewalk."""
    lanes = section["forward"] if side == "right" else section["backward"]
    return lanes * section["lane_width_m"] + section[f"parking_{side}_m"] + section[f"walk_{side}_m"]


def _mouth_distance(headings: list[float], sections: list[dict[str, float | int]]) -> float:
    """Smallest distance of the arms' mouths from the centre at which no two sidewalks overlap."""
    reach = [0.0]
    for i, heading in enumerate(headings):
        j = (i + 1) % len(headings)
        angle = (headings[j] - heading) % (2.0 * np.pi)
        if abs(angle - np.pi) < 0.3:
            continue
        a, b = _half_width(sections[i], "left"), _half_width(sections[j], "right")
        reach += [(b + a * np.cos(angle)) / np.sin(angle), (a + b * np.cos(angle)) / np.sin(angle)]
    return float(max(reach))


def _corner_curves(roads: list[Road], walk_share: float, points: int = 13) -> list[Float]:
    """Curves (P,2) from each arm's left edge to the next arm's right edge, at the kerb (share 0) or the outer sidewalk edge (share 1)."""
    curves = []
    t = np.linspace(0.0, 1.0, points)[:, None]
    for i, road in enumerate(roads):
        other = roads[(i + 1) % len(roads)]
        start = road.path.points(0.0, road.left_m + walk_share * road.walk_left_m)[0]
        stop = other.path.points(0.0, other.right_m - walk_share * other.walk_right_m)[0]
        control = _meeting_point(start, road.path.start[2], stop, other.path.start[2])
        curves.append((1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * stop)
    return curves


def _meeting_point(a: Float, heading_a: float, b: Float, heading_b: float) -> Float:
    """Where two edge lines meet, or the middle between their ends if they are (nearly) parallel."""
    directions = np.array([[np.cos(heading_a), -np.cos(heading_b)], [np.sin(heading_a), -np.sin(heading_b)]])
    if abs(np.linalg.det(directions)) < 0.3:
        return 0.5 * (a + b)
    along = np.linalg.solve(directions, b - a)[0]
    return a + along * directions[:, 0]


def _connectors(roads: list[Road]) -> Iterator[Connector]:
    """Lanes through the junction: left turns between inner lanes, right turns between outer lanes, straight on lane by lane."""
    for i, source in enumerate(roads):
        for j, target in enumerate(roads):
            if i == j:
                continue
            turn = (target.path.start[2] - source.path.start[2]) % (2.0 * np.pi) - np.pi
            if abs(turn) < 0.3:
                pairs = [(k, k) for k in range(min(source.backward, target.forward))]
            elif turn > 0:
                pairs = [(0, 0)]
            else:
                pairs = [(source.backward - 1, target.forward - 1)]
            for lane_in, lane_out in pairs:
                start = source.path.offset((lane_in + 0.5) * source.lane_width_m).reversed().end
                end = target.path.offset(-(lane_out + 0.5) * target.lane_width_m).start
                path = turn_between(start, end)
                yield Connector((i, source.forward + lane_in), (j, lane_out), path, min(source.lane_width_m, target.lane_width_m))


def _sidewalks(road: Road) -> Iterator[Band]:
    stations = road.path.stations()
    yield Band(right=road.path.points(stations, road.right_m - road.walk_right_m), left=road.path.points(stations, road.right_m))
    yield Band(right=road.path.points(stations, road.left_m), left=road.path.points(stations, road.left_m + road.walk_left_m))


def _stop_lines(roads: list[Road], crossings: list[Crossing], at_junction: bool) -> Iterator[StopLine]:
    """Stop lines one metre before each crossing, on the side traffic comes from."""
    for index, crossing in enumerate(crossings):
        road = roads[crossing.road]
        far = crossing.stop_m + 1.0
        yield StopLine(index, road.strip(0.0, road.backward * road.lane_width_m, far, far + STOP_LINE_DEPTH_M))
        if not at_junction:
            near = crossing.start_m - 1.0
            yield StopLine(index, road.strip(-road.forward * road.lane_width_m, 0.0, near - STOP_LINE_DEPTH_M, near))


def _markings(road: Road) -> Iterator[Marking]:
    """Centre line, lane lines and the lines along parking strips."""
    width = road.lane_width_m
    for start, stop in road.painted_m:
        yield Marking(road.path.polyline(start, stop), "double_yellow", "road_divider")
        for k in range(1, road.forward):
            yield Marking(road.path.polyline(start, stop, -k * width), "dashed_white", "lane_divider")
        for k in range(1, road.backward):
            yield Marking(road.path.polyline(start, stop, k * width), "dashed_white", "lane_divider")
        if road.parking_right_m:
            yield Marking(road.path.polyline(start, stop, -road.forward * width), "solid_white", "lane_divider")
        if road.parking_left_m:
            yield Marking(road.path.polyline(start, stop, road.backward * width), "solid_white", "lane_divider")


def _lots(rng: np.random.Generator, plan: Layout, wanted: int = 3) -> list[Lot]:
    """Paved lots beside the sidewalks near the middle of the tile, clear of all roads and of each other."""
    taken = unary_union([plan.pavement(), *[Polygon(band.outline).buffer(0.0) for band in plan.sidewalks]])
    lots: list[Lot] = []
    for _ in range(30):
        if len(lots) == wanted:
            break
        index = int(rng.integers(len(plan.roads)))
        road, side = plan.roads[index], int(rng.choice([-1, 1]))
        middle = float(rng.uniform(8.0, 45.0)) if plan.junction is not None else 0.5 * road.path.length_m + float(rng.uniform(-40.0, 40.0))
        half, depth = float(rng.uniform(8.0, 13.0)), float(rng.uniform(9.0, 14.0))
        start, stop = max(middle - half, 2.0), min(middle + half, road.path.length_m - 2.0)
        near = road.kerb_m(side) + side * (road.walk_m(side) + 0.3)
        far = near + side * depth
        outline = road.strip(min(near, far), max(near, far), start, stop)
        shape = Polygon(outline)
        if shape.is_valid and not shape.intersects(taken):
            lots.append(Lot(index, side, start, stop, near, far, outline))
            taken = unary_union([taken, shape.buffer(1.0)])
    return lots
