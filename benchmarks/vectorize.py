"""Raster-to-vector against its peers, on masks rendered from known vector maps: topology, end points, time.

    python benchmarks/vectorize.py [--shared FOLDER] [--images N] [--seed N] [--json]
    python benchmarks/vectorize.py --huge

Peers in the same run: scikit-image's skeletonize with sknw (both only needed here: pip install scikit-image sknw), and cv2.findContours with
approxPolyDP. Line masks: synthetic road networks of thin and wide lines, painted dividers of real nuScenes and Argoverse 2 maps; clean, with
noise of 1 to 3 px, cut by gaps of 3 to 8 px, dashed, rendered at another gray level, and noise with gaps. Area masks: drivable areas and
crossings of the same maps. "Right": same connected parts, junction degrees, closed loops and free ends. Images whose answer is not defined at
the drawn width (lines that touch when drawn, junctions closer than the lines are wide, angles below 35 degrees) are left out and counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cv2
import numpy as np
import shapely
from PIL import Image
from shapely.affinity import affine_transform

from pipeline.config import VectorizeConfig
from pipeline.maps.expansion import load_expansion
from pipeline.maps.vectorize import truth
from pipeline.maps.vectorize.areas import trace_areas
from pipeline.maps.vectorize.command import layers_of
from pipeline.maps.vectorize.raster import ArrayMask
from pipeline.maps.vectorize.strokes import trace_strokes

SIDE_PX = 200


@dataclass(frozen=True)
class Case:
    """One image with its answer."""

    source: str
    graph: truth.LineGraph
    gray: np.ndarray  # anti-aliased drawing, 0..255
    turned: np.ndarray  # the same, drawn at another angle and turned to this one with bilinear interpolation
    line_width_px: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=Path(__file__).resolve().parents[2] / "shared")
    parser.add_argument("--images", type=int, default=100, help="images of each source")
    parser.add_argument("--seed", type=int, default=20261, help="of the drawings and the damage")
    parser.add_argument("--huge", action="store_true", help="only a file of 20,000 x 20,000 px: time and peak memory of the command")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cv2.setNumThreads(1)
    if options.huge:
        print(huge_report())
        return
    lines, areas = line_report(options.shared, options.images, options.seed), area_report(options.shared, options.images)
    report = {"lines": lines, "areas": areas, "time_ms": time_report()}
    print(json.dumps(report, indent=2) if options.json else as_text(report))


# ------------------------------------------------------------------------------------------------------------ line images
def line_sources(shared: Path) -> dict[str, Callable[[np.random.Generator], tuple[list[np.ndarray], float]]]:
    """Name -> maker of (lines in pixels, line width)."""
    sources = {
        "synthetic thin": lambda rng: (road_network(rng, 4.0), rng.uniform(2.5, 5.0)),
        "synthetic wide": lambda rng: (road_network(rng, 14.0), rng.uniform(8.0, 16.0)),
    }
    maps = shared / "data" / "nuscenes-subset" / "maps" / "expansion"
    for path in sorted(maps.glob("*.json")):
        dividers = load_expansion(path, 0.01).dividers
        lines = [
            np.concatenate([dividers.starts_m[f : f + n], dividers.ends_m[f + n - 1 : f + n]])
            for f, n in zip(dividers.first, dividers.count, strict=True)
        ]
        sources[f"nuScenes {path.stem}"] = crop_maker(lines)
    for path in sorted((shared / "data" / "av2" / "maps").glob("*.json")):
        sources[f"Argoverse 2 {path.stem[16:24]}"] = crop_maker(painted_lines(path))
    return sources


def road_network(rng: np.random.Generator, spread_px: float) -> list[np.ndarray]:
    """Streets across the image at two angles, side streets that end, a ring, bends."""
    angle = rng.uniform(0, np.pi)
    lines = []
    for turn, count in ((0.0, rng.integers(1, 3)), (rng.uniform(np.pi / 3, 2 * np.pi / 3), rng.integers(0, 3))):
        along = np.array([np.cos(angle + turn), np.sin(angle + turn)])
        for _ in range(count):
            middle = rng.uniform(30, SIDE_PX - 30, 2)
            first, last = (rng.choice([250.0, rng.uniform(15, 90)]) for _ in range(2))
            bend = rng.uniform(-0.25, 0.25) * np.array([-along[1], along[0]])
            at = np.linspace(-first, last, 24)[:, None]
            lines.append(middle + at * along + bend * (at / 60.0) ** 2 * 20.0)
    if rng.random() < 0.5:
        center, radius = rng.uniform(50, SIDE_PX - 50, 2), rng.uniform(max(14.0, 2 * spread_px), 45)
        turn = np.linspace(0, 2 * np.pi, 49)[:, None]
        ring = center + radius * np.hstack([np.cos(turn), np.sin(turn)])
        lines.append(np.vstack([ring[:-1], ring[:1]]))
    return lines


def crop_maker(lines_m: list[np.ndarray]) -> Callable[[np.random.Generator], tuple[list[np.ndarray], float]]:
    """Random windows of a real map, turned, at 0.1 to 0.2 m a pixel; lines 2.5 to 4 pixels wide."""
    points = np.concatenate(lines_m)

    def make(rng: np.random.Generator) -> tuple[list[np.ndarray], float]:
        center, angle, resolution_m = points[rng.integers(len(points))], rng.uniform(0, 2 * np.pi), rng.uniform(0.1, 0.2)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        moved = [(line - center) @ turn / resolution_m + SIDE_PX / 2 + 0.123 for line in lines_m if np.abs(line - center).max(axis=1).min() < 60]
        return moved, rng.uniform(2.5, 4.0)

    return make


def painted_lines(path: Path) -> list[np.ndarray]:
    """Painted lane boundaries of an Argoverse 2 map."""
    segments = json.loads(path.read_text())["lane_segments"].values()
    found = {}
    for segment in segments:
        for side in ("left", "right"):
            if segment[f"{side}_lane_mark_type"] not in ("NONE", "UNKNOWN"):
                line = np.array([[point["x"], point["y"]] for point in segment[f"{side}_lane_boundary"]])
                found[min(line.round(2).tobytes(), line[::-1].round(2).tobytes())] = line
    return list(found.values())


def line_cases(shared: Path, images: int, seed: int) -> tuple[list[Case], dict[str, int]]:
    """Images with a defined answer, and how many were left out by source."""
    cases, left_out = [], {}
    for name, make in line_sources(shared).items():
        rng = np.random.default_rng(seed)
        left_out[name] = 0
        found = 0
        while found < images and left_out[name] < 40 * images:
            lines, line_width_px = make(rng)
            graph = truth.noded(lines, SIDE_PX, SIDE_PX, 0.25) if lines else None
            if graph is None or not is_defined(graph, line_width_px):
                left_out[name] += 1
                continue
            flat = bool(rng.random() < 0.5)
            gray = truth.render(graph.edges, line_width_px, SIDE_PX, SIDE_PX, flat)
            cases.append(Case(name, graph, gray, turned_drawing(lines, line_width_px, flat, rng.uniform(5.0, 85.0)), line_width_px))
            found += 1
    return cases, left_out


def turned_drawing(lines: list[np.ndarray], line_width_px: float, flat: bool, degrees: float) -> np.ndarray:
    """Drawing of the lines at an angle, on a sheet that holds the image at any angle, turned back as a raster and cut out."""
    sheet, border = 2 * SIDE_PX, SIDE_PX // 2
    center, angle = SIDE_PX / 2, np.radians(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    reach = shapely.Point(center, center).buffer(SIDE_PX)
    kept = shapely.get_parts(shapely.intersection([shapely.LineString(line) for line in lines], reach))
    placed = [(shapely.get_coordinates(line) - center) @ turn.T + sheet / 2 for line in kept if line.length > 0]
    turned, _ = truth.rotated(truth.render(placed, line_width_px, sheet, sheet, flat), degrees)
    return turned[border : border + SIDE_PX, border : border + SIDE_PX]


def is_defined(graph: truth.LineGraph, line_width_px: float) -> bool:
    """Whether the drawing has the graph's topology with a margin, so that there is one right answer."""
    expected = graph.topology()
    if not graph.edges:
        return False
    lines = [shapely.LineString(edge) for edge in graph.edges]
    thick = shapely.union_all(shapely.buffer(lines, line_width_px / 2 + 2.0))
    parts = shapely.get_parts(thick)
    if len(parts) != expected.components or sum(len(part.interiors) for part in parts) != expected.loops:
        return False
    degree = graph.degree
    for line, (first, last) in zip(lines, graph.ends, strict=True):
        dead_end = min(degree[first], degree[last]) == 1
        if line.length < (max(16.0, 3.0 * line_width_px) if dead_end else 2.5 * line_width_px + 6.0):
            return False
    return ends_apart(graph, 22.0) and angles_open(graph, line_width_px, 35.0) and border_clear(lines, graph, line_width_px)


def ends_apart(graph: truth.LineGraph, distance_px: float) -> bool:
    """No two free ends within reach of gap bridging, and none that points at another line from nearby."""
    free = graph.node_xy[graph.degree == 1]
    inner = free[((free > 1) & (free < SIDE_PX - 1)).all(axis=1)]
    return all((np.hypot(*(free - end).T) < distance_px).sum() == 1 for end in inner)


def angles_open(graph: truth.LineGraph, line_width_px: float, degrees: float) -> bool:
    """Edges leave every junction at least `degrees` apart."""
    for node in np.flatnonzero(graph.degree >= 3):
        headings = []
        for edge, ends in zip(graph.edges, graph.ends, strict=True):
            for side in (0, 1):
                if ends[side] == node:
                    line = shapely.LineString(edge if side == 0 else edge[::-1])
                    out = shapely.get_coordinates(line.interpolate(2.0 * line_width_px + 4.0))[0] - graph.node_xy[node]
                    headings.append(np.degrees(np.arctan2(out[1], out[0])))
        headings = np.sort(headings)
        if np.diff([*headings, headings[0] + 360]).min() < degrees:
            return False
    return True


def border_clear(lines: list[shapely.LineString], graph: truth.LineGraph, line_width_px: float) -> bool:
    """Lines come near the border only where they end on it, and cross it at more than a grazing angle."""
    band = line_width_px / 2 + 2.0
    core = shapely.box(band, band, SIDE_PX - band, SIDE_PX - band)
    for line, ends in zip(lines, graph.ends, strict=True):
        on_border = sum(bool((graph.node_xy[node] < 0.5).any() or (graph.node_xy[node] > SIDE_PX - 0.5).any()) for node in ends)
        if line.difference(core).length > 2.0 * band * on_border + 1e-6:
            return False
    return True


def damages(case: Case, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """(name, mask of 0 and 1)."""
    clean = truth.binary(case.gray)
    gaps = truth.with_gaps(clean, case.graph, case.line_width_px, rng, (3.0, 8.0))
    yield "clean", clean
    yield "gray level", (case.gray >= 100).astype(np.uint8)
    yield "anti-aliased", faint(case.gray)
    yield "rotated", truth.binary(case.turned)
    yield "noise", truth.with_noise(clean, rng)
    yield "gaps", gaps
    yield "noise and gaps", truth.with_noise(gaps, rng)
    if case.line_width_px < 6.0:
        yield "dashed", truth.dashed(clean, case.graph, case.line_width_px, 18.0, 8.0)


def faint(gray: np.ndarray) -> np.ndarray:
    """Mask that `bevj6 vectorize` makes of a pale, blurred drawing: its threshold is half of the brightest pixel."""
    pale = (0.4 * cv2.GaussianBlur(gray, (3, 3), 0.0)).astype(np.uint8)
    (layer,) = layers_of(ArrayMask(pale), "divider", VectorizeConfig())
    return layer.select(pale)


# ---------------------------------------------------------------------------------------------------------------- methods
def ours(mask: np.ndarray) -> list[np.ndarray]:
    return trace_strokes(mask, VectorizeConfig()).polylines


def sknw_lines(mask: np.ndarray) -> list[np.ndarray]:
    import sknw
    from skimage.morphology import skeletonize

    graph = sknw.build_sknw(skeletonize(mask).astype(np.uint16), multi=True, ring=True)
    lines = []
    for first, last, data in graph.edges(data=True):
        inner = data["pts"][:, ::-1] + 0.5
        a, b = graph.nodes[first]["o"][::-1] + 0.5, graph.nodes[last]["o"][::-1] + 0.5
        if np.hypot(*(inner[0] - a)) > np.hypot(*(inner[-1] - a)):
            inner = inner[::-1]
        lines.append(np.vstack([a, inner, b]))
    return lines


def score(lines: list[np.ndarray], answer: truth.LineGraph) -> tuple[bool, float]:
    """Whether the topology is right, and the mean distance from the answer's ends and junctions to the nearest found one, px."""
    found = truth.graph_of_polylines(lines)
    wanted, special = answer.special_points(), found.special_points()
    distance = np.hypot(*(wanted[:, None] - special[None]).transpose(2, 0, 1)).min(axis=1).mean() if len(wanted) and len(special) else 0.0
    return found.topology() == answer.topology(), float(distance)


def line_report(shared: Path, images: int, seed: int) -> dict[str, Any]:
    """Share of right images and mean end-point error, by source and damage, for either method."""
    cases, left_out = line_cases(shared, images, seed)
    rng = np.random.default_rng(seed + 1)
    scores: dict[tuple[str, str], list[tuple[bool, float, bool, float]]] = {}
    for case in cases:
        for damage, mask in damages(case, rng):
            scores.setdefault((case.source, damage), []).append((*score(ours(mask), case.graph), *score(sknw_lines(mask), case.graph)))
    rows = [{"source": source, "damage": damage, **summary(values)} for (source, damage), values in scores.items()]
    for damage in dict.fromkeys(damage for _, damage in scores):
        every = [value for (_, name), values in scores.items() if name == damage for value in values]
        rows.append({"source": "all", "damage": damage, **summary(every)})
    return {"left_out": left_out, "rows": rows}


def summary(values: list[tuple[bool, float, bool, float]]) -> dict[str, float]:
    ours_right, ours_error, sknw_right, sknw_error = np.array(values, dtype=float).mean(axis=0).tolist()
    return {"images": len(values), "ours_right": ours_right, "ours_error_px": ours_error, "sknw_right": sknw_right, "sknw_error_px": sknw_error}


# ------------------------------------------------------------------------------------------------------------ area images
def area_report(shared: Path, images: int) -> list[dict[str, Any]]:
    """Same number of parts and holes as the answer, and the mean distance between the outlines, for ours and cv2's contours."""
    rows = []
    for name, areas in area_sources(shared).items():
        rng = np.random.default_rng(3)
        scores = []
        places = shapely.get_coordinates(shapely.boundary(areas))
        while len(scores) < images:
            answer = area_window(areas, places, rng)
            if answer is None:
                continue
            mask = truth.binary(truth.render_areas(answer, SIDE_PX, SIDE_PX))
            scores.append([*area_score(trace_areas(mask, VectorizeConfig()), answer), *area_score(contour_areas(mask), answer)])
        right, error, their_right, their_error = np.mean(scores, axis=0).tolist()
        rows.append(
            {
                "source": name,
                "images": images,
                "ours_right": right,
                "ours_error_px": error,
                "contours_right": their_right,
                "contours_error_px": their_error,
            }
        )
    return rows


def area_sources(shared: Path) -> dict[str, np.ndarray]:
    """Name -> polygons, m."""
    sources = {}
    for path in sorted((shared / "data" / "nuscenes-subset" / "maps" / "expansion").glob("*.json")):
        sources[f"nuScenes {path.stem}"] = shapely.get_parts(load_expansion(path, 0.01).road)
    for path in sorted((shared / "data" / "av2" / "maps").glob("*.json")):
        rows = json.loads(path.read_text())["drivable_areas"].values()
        shells = [shapely.Polygon([(point["x"], point["y"]) for point in row["area_boundary"]]).buffer(0) for row in rows]
        sources[f"Argoverse 2 {path.stem[16:24]}"] = shapely.get_parts(shapely.union_all(shells))
    return sources


def area_window(areas: np.ndarray, places: np.ndarray, rng: np.random.Generator) -> list[shapely.Polygon] | None:
    """The areas in a turned window of 40 m at 0.2 m a pixel, pixel frame; None where parts or holes are too small or close to tell."""
    center, turn = places[rng.integers(len(places))], rng.uniform(0, 2 * np.pi)
    cos, sin = np.cos(turn) * 5.0, np.sin(turn) * 5.0
    offset = np.array([cos * center[0] - sin * center[1], sin * center[0] + cos * center[1]])
    near = areas[shapely.intersects(areas, shapely.Point(center).buffer(40.0))]
    moved = [affine_transform(area, [cos, -sin, sin, cos, SIDE_PX / 2 - offset[0], SIDE_PX / 2 - offset[1]]) for area in near]
    seen = shapely.intersection(shapely.union_all(moved), shapely.box(0, 0, SIDE_PX, SIDE_PX))
    parts = [part for part in shapely.get_parts(seen) if part.geom_type == "Polygon"]
    wanted = counts(parts)
    framed = shapely.box(0, 0, SIDE_PX, SIDE_PX)
    for distance in (-2.5, 2.5):
        grown = shapely.intersection(shapely.buffer(seen, distance), framed)
        if counts([part for part in shapely.get_parts(grown) if part.geom_type == "Polygon"]) != wanted:
            return None
    return parts if parts else None


def counts(areas: list[shapely.Polygon]) -> tuple[int, int]:
    return len(areas), sum(len(area.interiors) for area in areas)


def area_score(found: list[shapely.Polygon], answer: list[shapely.Polygon]) -> tuple[float, float]:
    """Whether parts and holes are as many as in the answer, and the mean distance of the found outline from the answer's, px."""
    outline = shapely.boundary(shapely.union_all(answer))
    points = shapely.points(shapely.get_coordinates(shapely.segmentize(shapely.multipolygons(found), 1.0))) if found else np.empty(0)
    return float(counts(found) == counts(answer)), float(shapely.distance(points, outline).mean()) if len(points) else 0.0


def contour_areas(mask: np.ndarray) -> list[shapely.Polygon]:
    """cv2.findContours and approxPolyDP with a tolerance of 1 px; pixel centres moved to our frame. Degenerate outlines are dropped."""
    contours, hierarchy = cv2.findContours(mask, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    simple = [cv2.approxPolyDP(contour, 1.0, True)[:, 0] + 0.5 for contour in contours]
    areas = []
    for number, outline in enumerate(simple):
        if hierarchy[0, number, 3] < 0 and len(outline) >= 3:
            holes = [simple[k] for k in range(len(simple)) if hierarchy[0, k, 3] == number and len(simple[k]) >= 3]
            areas.append(shapely.Polygon(outline, holes))
    return areas


# ------------------------------------------------------------------------------------------------------------------- time
def time_report() -> list[dict[str, float]]:
    """Median CPU times on road networks that grow with the image, the methods taking turns; and areas against contours."""
    rows = []
    for side in (200, 400, 1000, 2000):
        mask = street_grid(side)
        methods = {"ours": ours, "sknw": sknw_lines, "skeletonize": skeletonized, "ours_areas": our_areas, "contours": contour_areas}
        times: dict[str, list[float]] = {name: [] for name in methods}
        for repeat in range(200 if side == 200 else 8):
            for name, method in methods.items():
                start = time.process_time()
                method(mask)
                if repeat:
                    times[name].append(1000.0 * (time.process_time() - start))
        rows.append({"side_px": side, **{name: float(np.median(values)) for name, values in times.items()}})
    return rows


def street_grid(side: int) -> np.ndarray:
    """Streets 5 px wide, one every 50 px at two angles, a piece of each left out."""
    mask = np.zeros((side, side), np.uint8)
    for number, offset in enumerate(range(-side, 2 * side, 50)):
        for first, last in (((offset, 0), (offset + side // 4, side)), ((0, offset), (side, offset - side // 5))):
            cv2.line(mask, first, last, 1, 5)
        cv2.circle(mask, (offset + 20 + 3 * (number % 5), side // 2), 12, 0, -1)
    return mask


# Peak memory is VmHWM: ru_maxrss would start at the size of the process that started this one.
HUGE = """
import re, time
from pathlib import Path
from pipeline.maps.vectorize.command import vectorize_files
start = time.process_time()
done = vectorize_files([Path({mask!r})], 0.1, Path({out!r}))
peak_mb = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(f"{{done.masks[0].lines}} lines, {{time.process_time() - start:.1f}} CPU s, peak {{peak_mb:.0f}} MB")
"""


def huge_report(side: int = 20_000) -> str:
    """A grid of 20 by 20 streets, 5 px wide, in a one-bit PNG of `side` px square: read, traced and written by a process of its own.

    Its answer is known: 400 crossings and 840 lines between them and the border.
    """
    mask = np.zeros((side, side), np.uint8)
    for offset in range(500, side, 1000):
        cv2.line(mask, (offset, 0), (offset + 300, side), 1, 5)
        cv2.line(mask, (0, offset), (side, offset - 200), 1, 5)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"mask": f"{folder}/huge.png", "out": f"{folder}/huge.geojson"}
        Image.fromarray(mask.astype(bool)).save(paths["mask"], compress_level=1)
        return subprocess.run([sys.executable, "-c", HUGE.format(**paths)], capture_output=True, text=True, check=True).stdout.strip()


def skeletonized(mask: np.ndarray) -> np.ndarray:
    from skimage.morphology import skeletonize

    return skeletonize(mask)


def our_areas(mask: np.ndarray) -> list[shapely.Polygon]:
    return trace_areas(mask, VectorizeConfig())


def as_text(report: dict[str, Any]) -> str:
    lines = ["left out as undefined: " + ", ".join(f"{name} {number}" for name, number in report["lines"]["left_out"].items()), ""]
    lines.append(f"{'lines':34s} {'damage':16s} images   ours right  error px   sknw right  error px")
    for row in report["lines"]["rows"]:
        lines.append(
            f"{row['source']:34s} {row['damage']:16s} {row['images']:6d}   {100 * row['ours_right']:8.1f} %  {row['ours_error_px']:8.2f}"
            f"   {100 * row['sknw_right']:8.1f} %  {row['sknw_error_px']:8.2f}"
        )
    lines += ["", f"{'areas':51s} images   ours right  error px   contours right  error px"]
    for row in report["areas"]:
        lines.append(
            f"{row['source']:51s} {row['images']:6d}   {100 * row['ours_right']:8.1f} %  {row['ours_error_px']:8.2f}"
            f"   {100 * row['contours_right']:12.1f} %  {row['contours_error_px']:8.2f}"
        )
    lines += ["", "CPU, ms       lines: ours     sknw    ratio   (its thinning alone)   areas: ours   contours"]
    for row in report["time_ms"]:
        lines.append(
            f"{row['side_px']:5.0f} px square {row['ours']:10.2f} {row['sknw']:8.2f} {row['sknw'] / row['ours']:8.2f} {row['skeletonize']:16.2f}"
            f" {row['ours_areas']:18.2f} {row['contours']:10.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
