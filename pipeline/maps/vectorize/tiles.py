"""Masks of any size to lines and areas: the pixel work tile by tile, the rest once on what little the tiles leave.

A tile is read with a margin of its neighbours' pixels, wide enough for what it finds on its own pixels to be what the whole mask would give.
Kept between tiles are skeleton pixels, outline edges and one bit a pixel of line masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import shapely

from pipeline.config import VectorizeConfig
from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.areas import PixelEdges, areas_of, pixel_edges
from pipeline.maps.vectorize.raster import MaskSource
from pipeline.maps.vectorize.skeleton import SkeletonPixels
from pipeline.maps.vectorize.strokes import Strokes, skeleton_pixels, strokes_of
from pipeline.maps.vectorize.thinning import MaskArray, remove_noise

MARGIN_PX = 96  # lines up to a third of this wide are traced as if there were no tiles

# (rows, columns) of gray values -> the same of 0 and 1.
Selector = Callable[[MaskArray], MaskArray]


@dataclass(frozen=True)
class Tile:
    """Own pixels and margin of a tile; what lies outside the mask is 0."""

    values: MaskArray  # (h + 2 MARGIN_PX, w + 2 MARGIN_PX)
    row: int  # of the first own pixel
    column: int


def tiles(source: MaskSource, side_px: int) -> Iterator[Tile]:
    """Tiles of at most side_px x side_px own pixels, row by row. Memory: the mask's width times (2 side_px + 2 MARGIN_PX)."""
    side = max(side_px // 8 * 8, 2 * MARGIN_PX)  # BitMask wants multiples of 8
    blank = np.zeros((MARGIN_PX, source.width + 2 * MARGIN_PX), dtype=np.uint8)
    window, row = blank, 0
    strips = (np.pad(strip, ((0, 0), (MARGIN_PX, MARGIN_PX))) for strip in source.strips(side))
    for strip in _and_last(strips, blank):
        window = np.concatenate([window, strip])
        # A row of tiles is complete once the margin below it is there; the last strip is only a margin.
        while row < source.height and len(window) >= min(side, source.height - row) + 2 * MARGIN_PX:
            rows = min(side, source.height - row)
            for column in range(0, source.width, side):
                yield Tile(window[: rows + 2 * MARGIN_PX, column : column + min(side, source.width - column) + 2 * MARGIN_PX], row, column)
            window, row = window[rows:], row + rows


def _and_last(strips: Iterator[MaskArray], last: MaskArray) -> Iterator[MaskArray]:
    yield from strips
    yield last


class BitMask:
    """One bit a pixel, with the look-up that the refiner needs."""

    def __init__(self, height: int, width: int) -> None:
        self._shape = height, width
        self._bits = np.zeros((height, (width + 7) // 8), dtype=np.uint8)

    def write(self, row: int, column: int, values: MaskArray) -> None:
        """Put values (h, w) of 0 and 1 at a place whose column is a multiple of 8."""
        packed = np.packbits(values, axis=1)
        self._bits[row : row + len(values), column // 8 : column // 8 + packed.shape[1]] = packed

    def lookup(self, xy: FloatArray) -> np.ndarray:
        """(N,) 1 on the drawing, 0 off it, -1 outside the mask, for points (N, 2) x and y in pixels."""
        column, row = np.floor(xy).astype(np.int64).T
        inside = (row >= 0) & (row < self._shape[0]) & (column >= 0) & (column < self._shape[1])
        row, column = np.where(inside, row, 0), np.where(inside, column, 0)
        bit = (self._bits[row, column // 8] >> (7 - column % 8).astype(np.uint8)) & 1
        return np.where(inside, bit.astype(np.int8), np.int8(-1))


@dataclass
class StrokeCollector:
    """Gathers the skeleton of a line mask from tiles."""

    height: int
    width: int
    config: VectorizeConfig
    bits: BitMask = field(init=False)
    found: list[SkeletonPixels] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bits = BitMask(self.height, self.width)

    def add(self, tile: Tile, mask: MaskArray) -> None:
        """Take a tile whose own pixels and margin are `mask` (0 and 1)."""
        cleaned = remove_noise(mask, self.config.noise_px)
        pixels = skeleton_pixels(cleaned)
        rows, columns = pixels.rows - MARGIN_PX, pixels.columns - MARGIN_PX
        own = (rows >= 0) & (columns >= 0) & (rows < mask.shape[0] - 2 * MARGIN_PX) & (columns < mask.shape[1] - 2 * MARGIN_PX)
        self.found.append(SkeletonPixels(rows[own] + tile.row, columns[own] + tile.column, pixels.radius_px[own]))
        self.bits.write(tile.row, tile.column, cleaned[MARGIN_PX:-MARGIN_PX, MARGIN_PX:-MARGIN_PX])

    def result(self) -> Strokes:
        """Polylines of everything added."""
        if not self.found:
            return Strokes([], [])
        rows, columns, radius = (np.concatenate([getattr(part, name) for part in self.found]) for name in ("rows", "columns", "radius_px"))
        order = np.lexsort((columns, rows))
        return strokes_of(SkeletonPixels(rows[order], columns[order], radius[order]), self.bits.lookup, self.config)


@dataclass
class AreaCollector:
    """Gathers the outline of an area mask from tiles."""

    config: VectorizeConfig
    found: list[PixelEdges] = field(default_factory=list)

    def add(self, tile: Tile, mask: MaskArray) -> None:
        """Take a tile whose own pixels and margin are `mask` (0 and 1)."""
        self.found.append(pixel_edges(remove_noise(mask, self.config.noise_px), tile.row, tile.column, MARGIN_PX))

    def result(self) -> list[shapely.Polygon]:
        """Polygons of everything added, pixel frame."""
        if not self.found:
            return []
        rows, columns, direction = (np.concatenate([getattr(part, name) for part in self.found]) for name in ("rows", "columns", "direction"))
        return areas_of(PixelEdges(rows, columns, direction), self.config)


def mean_width_px(source: MaskSource, select: Selector, side_px: int) -> float:
    """Twice the area over the outline length of what `select` picks: about the width of lines, and much more for areas. 0 for nothing."""
    area = outline = 0
    for tile in tiles(source, side_px):
        mask = select(tile.values)
        area += int(np.count_nonzero(mask[MARGIN_PX:-MARGIN_PX, MARGIN_PX:-MARGIN_PX]))
        outline += len(pixel_edges(mask, margin=MARGIN_PX).rows)
    return 2.0 * area / outline if outline else 0.0
