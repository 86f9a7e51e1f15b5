"""Everything that never moves and is not annotated: ground, kerbs, buildings, trees, hedges, walls, lamps, a skyline around the tile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.synthetic.ground import HORIZON_M, SIZE_PX, TERRAIN, WALK, Ground, fill
from pipeline.dataset.synthetic.layout import TILE_M, Layout, Road
from pipeline.dataset.synthetic.mesh import Colour, Material, Mesh, blob, box, lathe, soup
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.dataset.synthetic.traffic import KERB_HEIGHT_M
from pipeline.taxonomy import OCCUPANCY_CLASSES

MANMADE, VEGETATION = OCCUPANCY_CLASSES.index("manmade"), OCCUPANCY_CLASSES.index("vegetation")

_CONCRETE: Colour = (0.28, 0.28, 0.27)
_WALLS: tuple[Colour, ...] = (
    (0.45, 0.4, 0.34), (0.3, 0.13, 0.09), (0.5, 0.48, 0.45), (0.25, 0.25, 0.27), (0.55, 0.47, 0.33), (0.36, 0.2, 0.13), (0.2, 0.26, 0.3),
)  # fmt: skip
_GREENS: tuple[Colour, ...] = ((0.06, 0.12, 0.03), (0.09, 0.16, 0.05), (0.05, 0.1, 0.04), (0.14, 0.15, 0.05), (0.18, 0.1, 0.03))


def make_scenery(plan: Layout, ground: Ground, rng: np.random.Generator) -> Mesh:
    """All static triangles of a tile, labelled for occupancy. The first two are the ground plane (`GROUND_PLANE_TRIANGLES`)."""
    free = ground.labels.copy()
    parts = [_plane(), *_raised_walks(plan)]
    trees = [tree(rng) for _ in range(10)]
    urban = float(rng.uniform(0.25, 0.95))
    for road in plan.roads:
        for side in (-1, 1):
            parts += _row_of_buildings(road, side, free, urban, rng)
            parts += _street_trees(road, side, free, trees, rng)
            parts += _lamps(road, side, rng)
    parts += _scattered_trees(free, trees, rng, int(rng.integers(30, 90)))
    parts += _skyline(rng, urban)
    return Mesh.join(parts)


def _plane() -> Mesh:
    r = HORIZON_M
    corners = np.array([[-r, -r, 0], [r, -r, 0], [r, r, 0], [-r, r, 0]], float)
    return soup(corners[[[0, 1, 2], [0, 2, 3]]], (0.1, 0.1, 0.1), Material.GROUND, TERRAIN)


def _raised_walks(plan: Layout) -> Iterator[Mesh]:
    """Sidewalk tops, coloured by the ground texture, and the kerb faces on both edges."""
    for band in plan.sidewalks:
        left, right = (np.insert(edge, 2, KERB_HEIGHT_M, axis=1) for edge in (band.left, band.right))
        yield soup(_quads(right, left), _CONCRETE, Material.GROUND, WALK)
        for edge in (left[::-1], right):
            yield soup(_quads(edge * [1.0, 1.0, 0.0], edge), _CONCRETE, Material.MASONRY, WALK)


def _quads(low: Float, high: Float) -> Float:
    """Two triangles for each pair of successive points of two curves (N,3)."""
    first = np.stack([low[:-1], low[1:], high[1:]], axis=1)
    return np.concatenate([first, np.stack([low[:-1], high[1:], high[:-1]], axis=1)])


def _is_free(free: NDArray[np.uint8], points_m: Float) -> bool:
    """Whether all points (N,2) lie inside the tile on unused terrain."""
    pixels = np.rint(np.stack([0.5 * TILE_M - points_m[:, 1], points_m[:, 0] + 0.5 * TILE_M], axis=1) * 10.0).astype(int)
    if pixels.min() < 0 or pixels.max() >= SIZE_PX:
        return False
    return bool((free[pixels[:, 0], pixels[:, 1]] == TERRAIN).all())


def _rectangle(x: float, y: float, yaw: float, length: float, width: float, samples: int = 5) -> tuple[Float, Float]:
    """Corners (4,2) of a rectangle and a grid of points (N,2) inside it."""
    rotation = np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]])
    corner = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * 0.5 * np.array([length, width])
    return corner @ rotation + [x, y], (_unit_grid(samples) * [length, width]) @ rotation + [x, y]


@lru_cache(maxsize=4)
def _unit_grid(samples: int) -> Float:
    """Points (samples^2,2) of a regular grid that spans the unit square around the origin."""
    u = np.linspace(-0.5, 0.5, samples)
    return np.stack(np.meshgrid(u, u), axis=-1).reshape(-1, 2)


def _row_of_buildings(road: Road, side: int, free: NDArray[np.uint8], urban: float, rng: np.random.Generator) -> Iterator[Mesh]:
    """Buildings (or walls and hedges in gaps) along one side of a road; used ground is marked in `free`."""
    along = float(rng.uniform(0.0, 8.0))
    while along < road.path.length_m - 4.0:
        length = float(rng.uniform(8.0, 22.0))
        depth, setback = float(rng.uniform(8.0, 15.0)), float(rng.uniform(0.6, 6.0))
        middle = along + 0.5 * length
        edge = road.kerb_m(side) + side * road.walk_m(side)
        yaw = road.path.pose_at(middle)[2]
        along += length + float(rng.uniform(0.3, 7.0))
        if rng.random() > urban:
            yield from _fence(road, side, middle, length, free, rng)
            continue
        x, y = road.path.point_at(middle, edge + side * (setback + 0.5 * depth))
        corners, grid = _rectangle(x, y, yaw, length + 0.6, depth + 0.6)
        if _is_free(free, grid):
            fill(free, [corners], MANMADE)
            yield building(length, depth, rng).moved(x, y, 0.0, yaw)


def building(length: float, depth: float, rng: np.random.Generator) -> Mesh:
    """A block with windows, a parapet or a set-back upper part, and sometimes a plain ground floor."""
    height = float(rng.choice([rng.uniform(4.0, 8.0), rng.uniform(8.0, 20.0), rng.uniform(15.0, 34.0)]))
    wall = (np.array(_WALLS[int(rng.integers(len(_WALLS)))]) * rng.uniform(0.7, 1.2)).clip(0, 0.8)
    x, y = 0.5 * length, 0.5 * depth
    parts = [box((-x, -y, 0.0), (x, y, height), wall.tolist(), Material.FACADE, MANMADE)]
    parts.append(box((-x - 0.15, -y - 0.15, height), (x + 0.15, y + 0.15, height + 0.4), (0.8 * wall).tolist(), Material.MASONRY, MANMADE))
    if rng.random() < 0.4:
        shop = (np.array(_WALLS[int(rng.integers(len(_WALLS)))]) * 0.6).tolist()
        parts.append(box((-x - 0.1, -y - 0.1, 2.9), (x + 0.1, y + 0.1, 3.5), shop, Material.MASONRY, MANMADE))
    if rng.random() < 0.4:
        parts.append(box((-0.6 * x, -0.6 * y, height), (0.6 * x, 0.6 * y, height + 3.0), wall.tolist(), Material.FACADE, MANMADE))
    return Mesh.join(parts)


def _fence(road: Road, side: int, middle: float, length: float, free: NDArray[np.uint8], rng: np.random.Generator) -> Iterator[Mesh]:
    """A wall or a hedge at the outer edge of the sidewalk."""
    hedge = rng.random() < 0.5
    thick, height = (0.9, float(rng.uniform(0.8, 1.6))) if hedge else (0.25, float(rng.uniform(0.8, 2.2)))
    offset = road.kerb_m(side) + side * (road.walk_m(side) + 0.4 + 0.5 * thick)
    x, y = road.path.point_at(middle, offset)
    yaw = road.path.pose_at(middle)[2]
    corners, grid = _rectangle(x, y, yaw, length, thick)
    if not _is_free(free, grid):
        return
    fill(free, [corners], MANMADE)
    colour = _GREENS[int(rng.integers(3))] if hedge else _WALLS[int(rng.integers(len(_WALLS)))]
    material, label = (Material.FOLIAGE, VEGETATION) if hedge else (Material.MASONRY, MANMADE)
    yield box((-0.5 * length, -0.5 * thick, 0.0), (0.5 * length, 0.5 * thick, height), colour, material, label).moved(x, y, 0.0, yaw)


def tree(rng: np.random.Generator) -> Mesh:
    """A trunk with two or three rough balls of leaves, or a cone of needles; or a bush without a trunk."""
    green = (np.array(_GREENS[int(rng.integers(len(_GREENS)))]) * rng.uniform(0.8, 1.4)).tolist()
    kind, height = rng.random(), float(rng.uniform(4.0, 9.0))
    if kind < 0.2:
        r = float(rng.uniform(0.5, 1.2))
        return blob((0.0, 0.0, 0.7 * r), (r, r, 0.8 * r), green, Material.FOLIAGE, VEGETATION, rng)
    trunk = lathe((0.0, 0.0, 0.0), (0.18, 0.12), (0.0, 0.5 * height), (0.1, 0.07, 0.05), 6, Material.PLAIN, VEGETATION)
    if kind < 0.4:
        radii, levels = (0.26 * height, 0.17 * height, 0.02), (0.2 * height, 0.5 * height, height)
        crown = lathe((0.0, 0.0, 0.0), radii, levels, green, 8, Material.FOLIAGE, VEGETATION)
        return Mesh.join([trunk, crown])
    parts = [trunk]
    for _ in range(int(rng.integers(2, 4))):
        r = float(rng.uniform(0.16, 0.26)) * height
        x, y = rng.normal(0.0, 0.09 * height, 2).tolist()
        centre = (x, y, float(rng.uniform(0.6, 0.8)) * height)
        parts.append(blob(centre, (r, r, 0.85 * r), green, Material.FOLIAGE, VEGETATION, rng))
    return Mesh.join(parts)


def _variant(trees: list[Mesh], rng: np.random.Generator) -> Mesh:
    """One of the trees, grown or shrunk and a little darker or lighter."""
    chosen = trees[int(rng.integers(len(trees)))]
    triangles = chosen.triangles * rng.uniform(0.75, 1.2, 3).astype(np.float32)
    return Mesh(triangles, chosen.colours * np.float32(rng.uniform(0.8, 1.2)), chosen.materials, chosen.labels)


def _street_trees(road: Road, side: int, free: NDArray[np.uint8], trees: list[Mesh], rng: np.random.Generator) -> Iterator[Mesh]:
    """A row of trees just outside the sidewalk, where nothing else stands."""
    if rng.random() < 0.25:
        return
    spacing = float(rng.uniform(7.0, 15.0))
    offset = road.kerb_m(side) + side * (road.walk_m(side) + float(rng.uniform(1.0, 2.5)))
    for along in np.arange(float(rng.uniform(0.0, spacing)), road.path.length_m, spacing):
        x, y = road.path.point_at(along, offset)
        if rng.random() < 0.8 and _is_free(free, _rectangle(x, y, 0.0, 1.0, 1.0, 3)[1]):
            yield _variant(trees, rng).moved(x, y, 0.0, float(rng.uniform(0, 6)))


def _scattered_trees(free: NDArray[np.uint8], trees: list[Mesh], rng: np.random.Generator, count: int) -> Iterator[Mesh]:
    for x, y in rng.uniform(-0.48 * TILE_M, 0.48 * TILE_M, (count, 2)):
        if _is_free(free, _rectangle(x, y, 0.0, 2.5, 2.5, 3)[1]):
            yield _variant(trees, rng).moved(x, y, 0.0, float(rng.uniform(0, 6)))


def _lamps(road: Road, side: int, rng: np.random.Generator) -> Iterator[Mesh]:
    """Street lamps and sign posts on the kerb side of the sidewalk."""
    spacing, height = float(rng.uniform(20.0, 32.0)), float(rng.uniform(5.5, 8.0))
    for along in np.arange(float(rng.uniform(5.0, 14.0)), road.path.length_m, spacing):
        x, y = road.path.point_at(along, road.kerb_m(side) + side * 0.3)
        yaw = road.path.pose_at(along)[2] - side * 0.5 * np.pi
        pole = lathe((0.0, 0.0, KERB_HEIGHT_M), (0.09, 0.06), (0.0, height), (0.12, 0.13, 0.13), 6, Material.PLAIN, MANMADE)
        arm = box((0.0, -0.05, height), (1.6, 0.05, height + 0.1), (0.12, 0.13, 0.13), Material.PLAIN, MANMADE)
        yield Mesh.join([pole, arm]).moved(x, y, 0.0, yaw)
        if rng.random() < 0.5:
            colour = ((0.5, 0.03, 0.03), (0.05, 0.1, 0.5), (0.7, 0.55, 0.05))[int(rng.integers(3))]
            plate = box((-0.03, -0.3, 2.3), (0.03, 0.3, 2.9), colour, Material.PLAIN, MANMADE)
            post = lathe((0.0, 0.0, 0.0), (0.04, 0.04), (0.0, 2.9), (0.3, 0.3, 0.3), 5, Material.PLAIN, MANMADE)
            x, y = road.path.point_at(along + 7.0, road.kerb_m(side) + side * 0.35)
            yield Mesh.join([plate, post]).moved(x, y, 0.0, road.path.pose_at(along)[2])


def _skyline(rng: np.random.Generator, urban: float) -> Iterator[Mesh]:
    """Blocks and tall trees just outside the tile, so that roads end in a town and not in a void."""
    for angle in np.arange(0.0, 2.0 * np.pi, 2.0 * np.pi / 26):
        direction = np.array([np.cos(angle), np.sin(angle)])
        x, y = direction * float(rng.uniform(125.0, 170.0)) + rng.normal(0, 4.0, 2)
        if rng.random() < urban:
            yield building(float(rng.uniform(14.0, 32.0)), 12.0, rng).moved(x, y, 0.0, float(angle + 0.5 * np.pi + rng.normal(0, 0.2)))
        else:
            green = (np.array(_GREENS[int(rng.integers(len(_GREENS)))]) * rng.uniform(0.8, 1.2)).tolist()
            size = rng.uniform(10.0, 20.0, 3) * [1.0, 1.0, 0.6]
            yield blob((float(x), float(y), 0.0), size.tolist(), green, Material.FOLIAGE, VEGETATION, rng)


