"""Masks with known answers: rendering of vector lines, damage done to masks, and the topology of line drawings.

Used by the tests and by benchmarks/vectorize.py. Pixel frame: x right, y down, the first pixel covers 0..1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import shapely
from scipy.sparse.csgraph import connected_components
from shapely.ops import substring

from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.skeleton import graph_of
from pipeline.maps.vectorize.thinning import MaskArray

SUPERSAMPLING = 4


@dataclass(frozen=True)
class LineTopology:
    """What must survive vectorization: connected parts, degrees of the junctions, independent closed loops, free ends."""

    components: int
    junction_degrees: tuple[int, ...]
    loops: int
    free_ends: int


@dataclass(frozen=True)
class LineGraph:
    """Edges that meet only at their ends, as nodes and node pairs."""

    node_xy: FloatArray  # (N, 2)
    ends: np.ndarray  # (E, 2) int
    edges: list[FloatArray]  # E of (P_i, 2)

    @property
    def degree(self) -> np.ndarray:
        """(N,) edge ends at each node."""
        return np.bincount(self.ends.ravel(), minlength=len(self.node_xy))

    def topology(self) -> LineTopology:
        """Counts that do not depend on geometry."""
        nodes, edges = len(self.node_xy), len(self.edges)
        components = int(connected_components(graph_of(self.ends, nodes), directed=False)[0]) if nodes else 0
        junctions = tuple(sorted(self.degree[self.degree >= 3].tolist()))
        return LineTopology(components, junctions, edges - nodes + components, int((self.degree == 1).sum()))

    def special_points(self) -> FloatArray:
        """(S, 2) free ends and junctions."""
        return self.node_xy[self.degree != 2]


def graph_of_polylines(polylines: Sequence[FloatArray]) -> LineGraph:
    """Graph of polylines (P_i, 2) that share end points exactly where they meet."""
    if not polylines:
        return LineGraph(np.empty((0, 2)), np.empty((0, 2), dtype=np.int64), [])
    ends = np.array([[line[0], line[-1]] for line in polylines]).reshape(-1, 2)
    node_xy, index = np.unique(np.round(ends, 6), axis=0, return_inverse=True)
    return LineGraph(node_xy, index.reshape(-1, 2), list(polylines))


def noded(lines: Sequence[FloatArray], width_px: int, height_px: int, snap_px: float) -> LineGraph:
    """Graph of lines as drawn: cut at the mask's border, split where they cross, equal where they lie within `snap_px` of each other."""
    inside = shapely.intersection(shapely.multilinestrings([shapely.linestrings(line) for line in lines]), shapely.box(0, 0, width_px, height_px))
    snapped = shapely.set_precision(inside, snap_px)
    merged = shapely.line_merge(shapely.union_all(snapped, grid_size=snap_px))
    parts = [part for part in shapely.get_parts(merged) if part.geom_type == "LineString" and part.length > 0]
    return graph_of_polylines([shapely.get_coordinates(part) for part in parts])


def render(lines: Sequence[FloatArray], line_width_px: float, width_px: int, height_px: int, flat_caps: bool = True) -> MaskArray:
    """Anti-aliased drawing (H, W), 0..255, of lines of one width."""
    strokes = shapely.buffer(
        shapely.linestrings(np.concatenate(lines), indices=np.repeat(np.arange(len(lines)), [len(line) for line in lines])),
        line_width_px / 2.0,
        cap_style="flat" if flat_caps else "round",
    )
    return render_areas(shapely.get_parts(shapely.union_all(strokes)), width_px, height_px)


def render_areas(areas: Sequence[shapely.Polygon], width_px: int, height_px: int) -> MaskArray:
    """Anti-aliased drawing (H, W), 0..255, of polygons with holes that do not overlap."""
    canvas = np.zeros((height_px * SUPERSAMPLING, width_px * SUPERSAMPLING), dtype=np.uint8)
    fixed_point = 1 << 8
    for area in areas:
        rings = [shapely.get_coordinates(ring) for ring in (area.exterior, *area.interiors)]
        # fillPoly takes pixel centres as integers; our frame has them at halves.
        cv2.fillPoly(canvas, [np.round((ring * SUPERSAMPLING - 0.5) * fixed_point).astype(np.int32) for ring in rings], (255,), shift=8)
    return cv2.resize(canvas, (width_px, height_px), interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)


def binary(gray: MaskArray) -> MaskArray:
    """Mask of 0 and 1 from a drawing of 0..255."""
    return (gray >= 128).astype(np.uint8)


def with_noise(mask: MaskArray, rng: np.random.Generator, speckle: float = 0.004, ragged: float = 0.15) -> MaskArray:
    """Specks and holes of 1 to 3 px, and an outline of which the share `ragged` of the pixels is flipped."""
    noisy = mask.copy()
    for value in (0, 1):
        for row, column in rng.integers(0, mask.shape, (int(speckle * mask.size / 4), 2)):
            height, width = rng.integers(1, 4, 2)
            noisy[row : row + height, column : column + width] = value
    outline = cv2.morphologyEx(mask, cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8)) > 0
    return noisy ^ (outline & (rng.random(mask.shape) < ragged)).astype(np.uint8)


def with_gaps(mask: MaskArray, graph: LineGraph, line_width_px: float, rng: np.random.Generator, gap_px: tuple[float, float]) -> MaskArray:
    """Every edge long enough is cut across once, away from its ends, by a gap of a length in the range `gap_px`."""
    cut = mask.copy()
    for edge in graph.edges:
        line = shapely.LineString(edge)
        gap = rng.uniform(*gap_px)
        clear = 2.0 * line_width_px + gap + 12.0
        if line.length > 2.0 * clear:
            middle = rng.uniform(clear, line.length - clear)
            _erase(cut, line, middle - gap / 2, middle + gap / 2, line_width_px)
    return cut


def dashed(mask: MaskArray, graph: LineGraph, line_width_px: float, dash_px: float, gap_px: float) -> MaskArray:
    """Every edge in dashes; it starts and ends with paint."""
    cut = mask.copy()
    for edge in graph.edges:
        line = shapely.LineString(edge)
        at = dash_px + line_width_px
        while at + gap_px + dash_px + line_width_px < line.length:
            _erase(cut, line, at, at + gap_px, line_width_px)
            at += dash_px + gap_px
    return cut


def _erase(mask: MaskArray, line: shapely.LineString, start: float, stop: float, line_width_px: float) -> None:
    piece = substring(line, start, stop).buffer(line_width_px / 2.0 + 2.0, cap_style="flat")
    cv2.fillPoly(mask, [np.round((shapely.get_coordinates(piece) - 0.5) * 256).astype(np.int32)], (0,), shift=8)


def rotated(gray: MaskArray, degrees: float) -> tuple[MaskArray, FloatArray]:
    """A drawing turned about its centre with bilinear interpolation, and the (2, 3) affine matrix that moves points of the pixel frame along."""
    height, width = gray.shape
    about_centers = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), degrees, 1.0)
    turned = cv2.warpAffine(gray, about_centers, (width, height), flags=cv2.INTER_LINEAR)
    about_corner = cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 1.0)
    return turned.astype(np.uint8, copy=False), about_corner.astype(np.float64)
