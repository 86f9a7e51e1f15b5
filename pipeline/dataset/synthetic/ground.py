"""The ground of a tile: a label raster and a colour texture with coarser levels, both drawn from the street plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.synthetic.layout import TILE_M, Layout
from pipeline.dataset.synthetic.mesh import Float32
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.taxonomy import OCCUPANCY_CLASSES

RESOLUTION_M = 0.1
"""Pixel size of the rasters. As in nuScenes map masks, pixel (row, column) lies at y = TILE_M / 2 - row * 0.1, x = column * 0.1 - TILE_M / 2."""
HORIZON_M = 400.0
"""The ground plane is a square that reaches this far from the tile's centre along both axes."""
GROUND_PLANE_TRIANGLES = 2
"""The plane's triangles are the first ones of every scene."""
SIZE_PX = round(TILE_M / RESOLUTION_M)
ROAD, LOT, WALK, TERRAIN = (OCCUPANCY_CLASSES.index(name) for name in ("driveable_surface", "other_flat", "sidewalk", "terrain"))

_SHIFT = 4
_LEVELS = 6
_PAINT_WIDTH_M = 0.15


@dataclass(frozen=True)
class Ground:
    """`labels` (H,W) Occ3D labels; `texture`: levels (H/2^k, W/2^k, 3) uint8, square root of linear RGB (even steps for the eye)."""

    labels: NDArray[np.uint8]
    texture: tuple[NDArray[np.uint8], ...]

    def label_at(self, xy_m: NDArray[np.floating]) -> NDArray[np.uint8]:
        """Occ3D labels (N,) of ground points (N,2); terrain outside the tile."""
        column = np.rint((xy_m[:, 0] + 0.5 * TILE_M) / RESOLUTION_M).astype(np.int64)
        row = np.rint((0.5 * TILE_M - xy_m[:, 1]) / RESOLUTION_M).astype(np.int64)
        inside = (column >= 0) & (column < SIZE_PX) & (row >= 0) & (row < SIZE_PX)
        return np.where(inside, self.labels[row.clip(0, SIZE_PX - 1), column.clip(0, SIZE_PX - 1)], np.uint8(TERRAIN))

    def colour_at(self, xy_m: Float32, step_m: Float32, footprint_m: Float32) -> Float32:
        """Linear RGB (3,N) averaged over about `footprint_m` (N,) around ground points (2,N).

        Where `step_m` (2,N) is not zero, it is also averaged over the points one step before and after.
        """
        colour = np.empty((3, len(footprint_m)), np.float32)
        level = np.clip(np.log2(np.maximum(footprint_m, 1e-6) / RESOLUTION_M) + 0.5, 0, _LEVELS - 1).astype(np.int8)
        # Twice the level, plus one for points with a single tap.
        kind = 2 * level + (step_m == 0.0).all(axis=0)
        for k in range(2 * _LEVELS):
            index = np.flatnonzero(kind == k)
            if len(index):
                xy, step = xy_m.take(index, axis=1), step_m.take(index, axis=1)
                taps = xy[:, None] if k % 2 else np.stack([xy - step, xy, xy + step], axis=1)
                mean = np.square(self._texture_at(taps, k // 2), dtype=np.float32).mean(axis=0).T
                for row, values in zip(colour, mean, strict=True):
                    row[index] = values
        colour *= np.float32(1.0 / 255.0**2)
        return colour

    def _texture_at(self, xy_m: Float32, level: int) -> NDArray[np.uint8]:
        """Interpolated texture (...,3) at ground points (2,...)."""
        pixel = RESOLUTION_M * 2**level
        # Level k averages 2^k pixels, so its pixel centres lie (2^k - 1) / 2 fine pixels further in.
        first = np.float32(0.5 * TILE_M / pixel - 0.5 * (1.0 - 0.5**level))
        scale = np.float32(1.0 / pixel)
        colours = _bilinear(self.texture[level], (first + xy_m[0] * scale).ravel(), (first - xy_m[1] * scale).ravel())
        return colours.reshape(*xy_m.shape[1:], 3)


def _bilinear(image: NDArray[np.uint8], column: Float32, row: Float32) -> NDArray[np.uint8]:
    """Interpolated colours (N,3); points outside see the image mirrored."""
    # cv2.remap takes at most 32767 rows, so the list of points is folded into a rectangle.
    count, width = len(column), 256
    rows = -(-count // width)
    maps = np.zeros((2, rows * width), np.float32)
    maps[0, :count], maps[1, :count] = column, row
    folded = maps.reshape(2, rows, width)
    colours = cv2.remap(image, folded[0], folded[1], cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)
    return np.asarray(colours, np.uint8).reshape(-1, 3)[:count]


def make_ground(plan: Layout, rng: np.random.Generator) -> Ground:
    """Draw labels and texture of a street plan; colours, wear and dash lengths vary."""
    labels = np.full((SIZE_PX, SIZE_PX), TERRAIN, np.uint8)
    fill(labels, [band.outline for band in plan.sidewalks], WALK)
    fill(labels, [lot.outline for lot in plan.lots], LOT)
    fill(labels, _carriageways(plan), ROAD)
    image = _surface(labels, rng)
    _paint(image, plan, rng)
    levels = [image]
    while len(levels) < _LEVELS:
        levels.append(np.asarray(cv2.resize(levels[-1], None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA), np.uint8))
    return Ground(labels, tuple(levels))


def _carriageways(plan: Layout) -> list[Float]:
    outlines = [road.strip(road.right_m, road.left_m) for road in plan.roads]
    return outlines if plan.junction is None else [*outlines, plan.junction]


def to_pixels(points_m: Float) -> NDArray[np.int32]:
    """Raster coordinates (N,2) of tile points, in 1/16 pixel as cv2's `shift` wants them."""
    pixels = np.stack([points_m[:, 0] + 0.5 * TILE_M, 0.5 * TILE_M - points_m[:, 1]], axis=1) / RESOLUTION_M
    return np.rint(pixels * 2**_SHIFT).astype(np.int32)


def fill(image: NDArray[np.uint8], outlines: list[Float], value: int, smooth: bool = False) -> None:
    """Fill polygons (N,2) in metres into a raster of the tile, in place."""
    for outline in outlines:
        cv2.fillPoly(image, [to_pixels(outline)], (value,), cv2.LINE_AA if smooth else cv2.LINE_8, _SHIFT)


@lru_cache(maxsize=1)
def _noise() -> NDArray[np.uint8]:
    """Mottling of mean 128, the same for all scenes: fine grain and blotches of up to 6 m. It repeats every 1024 px and leaves room for a shift."""
    rng = np.random.default_rng(20240607)
    total = np.zeros((1024, 1024), np.float32)
    for size, weight in ((16, 14.0), (64, 11.0), (256, 9.0), (1024, 12.0)):
        # A margin of wrapped cells makes the enlarged noise fit itself when it is repeated.
        cells = np.pad(rng.standard_normal((size, size)).astype(np.float32), 2, mode="wrap")
        scale = 1024 // size
        enlarged = cv2.resize(cells, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
        total += weight * enlarged[2 * scale : -2 * scale, 2 * scale : -2 * scale]
    tile = np.clip(total + 128.0, 40, 216).astype(np.uint8)
    return np.tile(tile, (3, 3))


def _surface(labels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Unpainted surfaces (H,W,3): asphalt, concrete or brick, lots, grass or soil."""
    table = np.zeros((3, 256), np.uint8)
    grey = float(rng.uniform(0.22, 0.34))
    walks = ((0.56, 0.55, 0.52), (0.6, 0.56, 0.5), (0.52, 0.4, 0.34), (0.48, 0.48, 0.5))
    greens = ((0.3, 0.38, 0.2), (0.36, 0.42, 0.22), (0.45, 0.4, 0.28), (0.33, 0.36, 0.24))
    colours = {
        ROAD: (grey, grey, 1.02 * grey),
        LOT: (1.35 * grey, 1.32 * grey, 1.25 * grey),
        WALK: walks[int(rng.integers(len(walks)))],
        TERRAIN: greens[int(rng.integers(len(greens)))],
    }
    for label, colour in colours.items():
        table[:, label] = np.clip(255.0 * np.array(colour) * rng.uniform(0.92, 1.08), 0, 255)
    row, column = (-rng.integers(0, 1024, 2) % 1024).tolist()
    noise = _noise()[row : row + SIZE_PX, column : column + SIZE_PX]
    image = np.asarray(cv2.merge([cv2.multiply(cv2.LUT(labels, channel), noise, scale=1.0 / 128.0) for channel in table]), np.uint8)
    spacing = int(rng.integers(9, 18))
    for joints in (np.s_[::spacing, :], np.s_[:, ::spacing]):
        rows, columns = np.nonzero(labels[joints] == WALK)
        image[joints][rows, columns] = (image[joints][rows, columns] * 0.8).astype(np.uint8)
    return image


def _paint(image: NDArray[np.uint8], plan: Layout, rng: np.random.Generator) -> None:
    """Lay worn white and yellow paint over the texture, in place."""
    white, yellow = np.zeros((2, SIZE_PX, SIZE_PX), np.uint8)
    dash, gap = float(rng.uniform(2.0, 3.5)), float(rng.uniform(2.5, 5.0))
    for marking in plan.markings:
        if marking.kind == "double_yellow":
            fill(yellow, [_line(marking.points, offset) for offset in (-0.15, 0.15)], 255, smooth=True)
        else:
            cuts = dashes(marking.points, dash, gap) if marking.kind == "dashed_white" else [marking.points]
            fill(white, [_line(points, 0.0) for points in cuts], 255, smooth=True)
    fill(white, [line.outline for line in plan.stop_lines], 255, smooth=True)
    fill(white, zebra(plan), 255, smooth=True)
    wear = float(rng.uniform(0.7, 0.95))
    for alpha, colour in ((white, (0.9, 0.9, 0.88)), (yellow, (0.85, 0.62, 0.15))):
        rows, columns = _nonzero(alpha)
        share = (alpha[rows, columns] * (wear * _noise()[rows, columns] / 128.0)).clip(0, 255)[:, None] / 255.0
        image[rows, columns] = (image[rows, columns] * (1.0 - share) + 255.0 * np.array(colour) * share).astype(np.uint8)


def _nonzero(image: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of the pixels of a mostly black raster that are not black, row by row."""
    words = np.flatnonzero(image.view(np.uint64).ravel())
    pixels = (words[:, None] * 8 + np.arange(8)).ravel()
    return np.divmod(pixels[image.ravel()[pixels] > 0], image.shape[1])


def _line(points: Float, offset_m: float) -> Float:
    """Outline of a painted line (N,2), `offset_m` left of the curve."""
    tangent = np.gradient(points, axis=0)
    normal = np.stack([-tangent[:, 1], tangent[:, 0]], axis=1) / np.linalg.norm(tangent, axis=1, keepdims=True)
    half = 0.5 * _PAINT_WIDTH_M
    return np.concatenate([points + (offset_m - half) * normal, (points + (offset_m + half) * normal)[::-1]])


def dashes(points: Float, dash_m: float, gap_m: float) -> list[Float]:
    """The pieces (K,2) of a polyline that are painted when dashes of `dash_m` alternate with gaps of `gap_m`."""
    along = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(points, axis=0), axis=1))])
    pieces = []
    for start in np.arange(0.5 * gap_m, along[-1] - 0.5, dash_m + gap_m):
        s = np.linspace(start, min(start + dash_m, along[-1]), 4)
        pieces.append(np.stack([np.interp(s, along, points[:, axis]) for axis in range(2)], axis=1))
    return pieces


def zebra(plan: Layout, stripe_m: float = 0.5) -> list[Float]:
    """Outlines of the stripes of all crossings, parallel to the road."""
    stripes = []
    for crossing in plan.crossings:
        road = plan.roads[crossing.road]
        for low in np.arange(road.right_m + 0.3, road.left_m - 0.3 - stripe_m, 2.0 * stripe_m):
            stripes.append(road.strip(float(low), float(low) + stripe_m, crossing.start_m, crossing.stop_m))
    return stripes
