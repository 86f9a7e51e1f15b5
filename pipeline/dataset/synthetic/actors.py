"""The ten detection classes: sizes and shapes.

Every shape is built from simple solids in its own frame (x forward, y left, origin at the centre of its base) and fits its box exactly in width,
length and height, so that the annotation is the tight box of what is rendered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeline.dataset.synthetic.mesh import Colour, Material, Mesh, blob, box, extruded, lathe
from pipeline.taxonomy import OCCUPANCY_CLASSES

# Mean length, width, height in metres of the nuScenes annotations of each class (as used for the anchors of public detectors).
MEAN_SIZE_LWH_M: dict[str, tuple[float, float, float]] = {
    "car": (4.63, 1.97, 1.74),
    "truck": (6.93, 2.51, 2.84),
    "bus": (10.5, 2.94, 3.47),
    "trailer": (12.29, 2.90, 3.87),
    "construction_vehicle": (6.37, 2.85, 3.19),
    "pedestrian": (0.73, 0.67, 1.77),
    "motorcycle": (2.11, 0.77, 1.47),
    "bicycle": (1.70, 0.60, 1.28),
    "traffic_cone": (0.41, 0.41, 1.07),
    "barrier": (0.50, 2.53, 0.98),
}
CATEGORY: dict[str, str] = {
    "car": "vehicle.car",
    "truck": "vehicle.truck",
    "bus": "vehicle.bus.rigid",
    "trailer": "vehicle.trailer",
    "construction_vehicle": "vehicle.construction",
    "pedestrian": "human.pedestrian.adult",
    "motorcycle": "vehicle.motorcycle",
    "bicycle": "vehicle.bicycle",
    "traffic_cone": "movable_object.trafficcone",
    "barrier": "movable_object.barrier",
}

GLASS: Colour = (0.03, 0.04, 0.05)
RUBBER: Colour = (0.015, 0.015, 0.016)
SKINS: tuple[Colour, ...] = ((0.65, 0.42, 0.3), (0.45, 0.27, 0.18), (0.22, 0.13, 0.09), (0.75, 0.52, 0.4))
PAINTS: tuple[Colour, ...] = (
    (0.75, 0.75, 0.75), (0.5, 0.51, 0.53), (0.2, 0.21, 0.22), (0.03, 0.03, 0.035), (0.4, 0.03, 0.03), (0.04, 0.1, 0.35),
    (0.1, 0.22, 0.12), (0.45, 0.35, 0.22), (0.55, 0.2, 0.05), (0.15, 0.3, 0.4), (0.6, 0.5, 0.1), (0.3, 0.07, 0.15),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """An object ready to be placed: detection class, size and mesh; `with_rider` holds for bicycles and motorcycles."""

    name: str
    size_lwh_m: tuple[float, float, float]
    mesh: Mesh
    with_rider: bool


def make_shape(name: str, rng: np.random.Generator, with_rider: bool = True) -> Shape:
    """Draw an object of a detection class: size (about 6 % spread) and colours vary."""
    spread = rng.normal(1.0, 0.06, 3).clip(0.85, 1.15)
    length, width, height = (float(m * s) for m, s in zip(MEAN_SIZE_LWH_M[name], spread, strict=True))
    if name in ("bicycle", "motorcycle"):
        height = height * (1.2 if with_rider else 0.82)
        parts = _two_wheeler(length, width, height, name == "motorcycle", with_rider, rng)
    else:
        parts = _BUILDERS[name](length, width, height, rng)
    mesh = _fit(Mesh.join(parts), length, width, height).labelled(OCCUPANCY_CLASSES.index(name))
    return Shape(name, (length, width, height), mesh, with_rider)


def _fit(mesh: Mesh, length: float, width: float, height: float) -> Mesh:
    """Stretch the mesh to fill its box exactly."""
    corners = mesh.triangles.reshape(-1, 3)
    low, high = corners.min(axis=0), corners.max(axis=0)
    size = np.array([length, width, height])
    triangles = (mesh.triangles - low) / (high - low) * size - np.array([0.5 * length, 0.5 * width, 0.0])
    return Mesh(triangles.astype(np.float32), mesh.colours, mesh.materials, mesh.labels)


def _paint(rng: np.random.Generator) -> Colour:
    base = np.array(PAINTS[int(rng.integers(len(PAINTS)))])
    return (base * rng.uniform(0.8, 1.2)).clip(0.01, 0.9).tolist()


def _wheels(xs: list[float], width: float, radius: float) -> list[Mesh]:
    """Pairs of wheels with light hubs at the positions `xs`."""
    parts = []
    for x in xs:
        for y0, y1 in ((-0.5 * width, -0.5 * width + 0.24), (0.5 * width - 0.24, 0.5 * width)):
            parts.append(lathe((x, 0.0, radius), (radius, radius), (y0, y1), RUBBER, 10, axis="y"))
            parts.append(lathe((x, 0.0, radius), (0.55 * radius,) * 2, (y0 - 0.02, y1 + 0.02), (0.35, 0.35, 0.36), 6, axis="y"))
    return parts


def _lights(length: float, width: float, z: float) -> list[Mesh]:
    """White lamps in front and red ones at the back."""
    half, parts = 0.5 * length, []
    for side in (-1, 1):
        y0, y1 = sorted((side * 0.30 * width, side * 0.47 * width))
        parts.append(box((half - 0.1, y0, z), (half + 0.01, y1, z + 0.16), (0.85, 0.85, 0.75)))
        parts.append(box((-half - 0.01, y0, z), (-half + 0.1, y1, z + 0.18), (0.5, 0.01, 0.01)))
    return parts


def _car(length: float, width: float, height: float, rng: np.random.Generator) -> list[Mesh]:
    """Body, cabin of glass with a painted roof, wheels and lamps; sedan, hatchback or van by the cabin's profile."""
    paint, half, side = _paint(rng), 0.5 * length, 0.5 * width
    belt, sill = 0.55 * height, 0.16 * height
    hood, rear = {0: (0.16, 0.36), 1: (0.2, 0.47), 2: (0.3, 0.49)}[int(rng.integers(3))]
    body = [(-half, sill), (-half, 0.9 * belt), (-half + 0.1, belt), (half - 0.9, belt), (half - 0.05, 0.8 * belt), (half, sill)]
    top = [(-rear * length, belt), (-(rear - 0.07) * length, 0.97 * height), ((hood - 0.12) * length, 0.97 * height), (hood * length, belt)]
    roof_x = (-(rear - 0.075) * length, (hood - 0.125) * length)
    parts = [
        extruded(body, -0.97 * side, 0.97 * side, paint),
        extruded(top, -0.9 * side, 0.9 * side, GLASS),
        box((roof_x[0], -0.88 * side, 0.95 * height), (roof_x[1], 0.88 * side, height), paint),
    ]
    pillar = (roof_x[0] + roof_x[1]) / 2
    parts.append(box((pillar - 0.06, -0.91 * side, belt), (pillar + 0.06, 0.91 * side, 0.96 * height), paint))
    parts.append(box((half - 0.02, -0.8 * side, sill), (half + 0.005, 0.8 * side, 0.5 * belt), (0.05, 0.05, 0.05)))
    parts.append(box((-half - 0.005, -0.25 * side, 0.6 * belt), (-half + 0.02, 0.25 * side, 0.75 * belt), (0.7, 0.7, 0.7)))
    return parts + _wheels([-0.3 * length, 0.31 * length], width, 0.19 * height) + _lights(length, width, 0.66 * belt)


def _truck(length: float, width: float, height: float, rng: np.random.Generator) -> list[Mesh]:
    """A cab in front and a separate cargo box or a flat bed with sides."""
    cab, cargo, half, side = _paint(rng), _paint(rng), 0.5 * length, 0.5 * width
    cab_x, deck = half - 0.27 * length, 0.3 * height
    cab_top = float(rng.uniform(0.78, 0.95)) * height
    profile = [(cab_x, 0.14 * height), (cab_x, cab_top), (half - 0.25, cab_top), (half, 0.55 * height), (half, 0.14 * height)]
    parts = [
        extruded(profile, -0.95 * side, 0.95 * side, cab),
        extruded([(half - 0.24, 0.9 * cab_top), (half + 0.01, 0.57 * height), (half - 0.1, 0.55 * height)], -0.8 * side, 0.8 * side, GLASS),
        box((half - 0.9, -0.96 * side, 0.55 * height), (half - 0.35, 0.96 * side, 0.88 * cab_top), GLASS),
        box((-half, -0.5 * side, 0.2 * height), (cab_x, 0.5 * side, deck), (0.04, 0.04, 0.04)),
    ]
    if rng.random() < 0.7:
        parts.append(box((-half, -0.985 * side, deck), (cab_x - 0.15, 0.985 * side, height), cargo))
        parts.append(box((-half - 0.01, -0.03, deck), (-half + 0.01, 0.03, height - 0.1), (0.1, 0.1, 0.1)))
    else:
        parts.append(box((-half, -side, deck), (cab_x - 0.15, side, 0.55 * height), cargo))
        parts.append(box((-half + 0.3, -0.7 * side, 0.5 * height), (cab_x - 0.8, 0.7 * side, height), (0.35, 0.25, 0.14)))
    return parts + _wheels([-0.32 * length, 0.33 * length], width, 0.17 * height) + _lights(length, width, 0.22 * height)


def _bus(length: float, width: float, height: float, rng: np.random.Generator) -> list[Mesh]:
    """One long body with a band of windows, a coloured stripe and doors on the right."""
    paint = _paint(rng)
    stripe, half, side = _paint(rng), 0.5 * length, 0.5 * width
    low, belt, top = 0.1 * height, 0.45 * height, 0.8 * height
    parts = [
        box((-half, -0.99 * side, low), (half, 0.99 * side, height), paint),
        box((half - 0.03, -0.9 * side, 0.35 * height), (half + 0.02, 0.9 * side, 0.85 * height), GLASS),
        box((-half - 0.02, -0.8 * side, 0.5 * height), (-half + 0.03, 0.8 * side, 0.8 * height), GLASS),
        box((-half, -0.992 * side, low), (half, 0.992 * side, 0.2 * height), stripe),
        box((half - 0.04, -0.6 * side, 0.88 * height), (half + 0.03, 0.6 * side, 0.97 * height), (0.7, 0.35, 0.02)),
        box((-0.6 * half, -0.5 * side, 0.97 * height), (0.2 * half, 0.5 * side, 1.03 * height), (0.6, 0.6, 0.6)),
    ]
    count = 6
    edges = np.linspace(-half + 0.3, half - 0.4, count + 1)
    for x0, x1 in pairwise(edges):
        parts.append(box((x0 + 0.08, -side, belt), (x1 - 0.08, side, top), GLASS))
    for x in (half - 1.6, -0.1 * half):
        parts.append(box((x, -side, low), (x + 1.0, -0.9 * side, top), GLASS))
    return parts + _wheels([-0.28 * length, 0.3 * length], width, 0.14 * height) + _lights(length, width, 0.2 * height)


def _trailer(length: float, width: float, height: float, rng: np.random.Generator) -> list[Mesh]:
    """A long box (or a container on a frame) on rear axles, with landing legs and no cab."""
    wall, half, side = _paint(rng), 0.5 * length, 0.5 * width
    deck = 0.31 * height
    parts = [
        box((-half, -side, deck), (half, side, height), wall),
        box((-half, -0.35 * side, 0.22 * height), (half, 0.35 * side, deck), (0.05, 0.05, 0.05)),
        box((-half - 0.02, -0.02, deck), (-half + 0.01, 0.02, 0.98 * height), (0.08, 0.08, 0.08)),
        box((-half - 0.02, -0.95 * side, 0.2 * height), (-half + 0.15, 0.95 * side, 0.25 * height), (0.5, 0.05, 0.03)),
    ]
    for x in (0.22 * length, 0.25 * length):
        parts += [box((x, y - 0.08, 0.0), (x + 0.15, y + 0.08, deck), (0.1, 0.1, 0.1)) for y in (-0.6 * side, 0.6 * side)]
    # Upright ribs tell the side of a trailer from the smooth wall of a bus or of a lorry.
    dark = [0.7 * c for c in wall]
    for x in np.linspace(-half + 0.6, half - 0.6, 10):
        parts.append(box((x - 0.05, -1.01 * side, deck), (x + 0.05, 1.01 * side, height), dark))
    return parts + _wheels([-0.44 * length, -0.36 * length, -0.28 * length], width, 0.13 * height)


def _construction_vehicle(length: float, width: float, height: float, rng: np.random.Generator) -> list[Mesh]:
    """An excavator or a wheel loader, yellow or orange."""
    yellow = (np.array([0.75, 0.42, 0.02]) * rng.uniform(0.75, 1.1)).tolist()
    half, side, grey = 0.5 * length, 0.5 * width, (0.06, 0.06, 0.06)
    parts = [
        box((-0.45 * length, -0.75 * side, 0.3 * height), (0.02 * length, 0.75 * side, 0.62 * height), yellow),
        box((-0.16 * length, 0.05 * side, 0.6 * height), (0.06 * length, 0.75 * side, 0.97 * height), GLASS),
        box((-0.17 * length, 0.02 * side, 0.94 * height), (0.07 * length, 0.78 * side, 1.0 * height), yellow),
    ]
    if rng.random() < 0.6:
        for y0, y1 in ((-side, -0.55 * side), (0.55 * side, side)):
            track = [(-0.46 * length, 0.05 * height), (-0.5 * length, 0.15 * height), (-0.44 * length, 0.27 * height),
                     (0.06 * length, 0.27 * height), (0.12 * length, 0.15 * height), (0.08 * length, 0.0)]  # fmt: skip
            parts.append(extruded(track, y0, y1, grey))
        boom = [(0.0, 0.5 * height), (0.0, 0.62 * height), (0.24 * length, 0.98 * height), (0.28 * length, 0.88 * height)]
        stick = [(0.24 * length, 0.98 * height), (0.3 * length, 0.95 * height), (0.42 * length, 0.25 * height), (0.37 * length, 0.25 * height)]
        parts += [extruded(boom, -0.25 * side, 0.0, yellow), extruded(stick, -0.22 * side, -0.03 * side, yellow)]
        parts.append(box((0.34 * length, -0.4 * side, 0.05 * height), (half, 0.15 * side, 0.27 * height), grey))
    else:
        parts += _wheels([-0.32 * length, 0.12 * length], width, 0.24 * height)
        parts.append(box((0.0, -0.6 * side, 0.2 * height), (0.25 * length, 0.6 * side, 0.55 * height), yellow))
        arm = [(0.1 * length, 0.5 * height), (0.12 * length, 0.6 * height), (0.42 * length, 0.25 * height), (0.38 * length, 0.15 * height)]
        parts += [extruded(arm, y - 0.1, y + 0.1, yellow) for y in (-0.5 * side, 0.5 * side)]
        bucket = [(0.36 * length, 0.02 * height), (0.36 * length, 0.35 * height), (0.42 * length, 0.35 * height), (half, 0.0)]
        parts.append(extruded(bucket, -side, side, grey))
    return parts


def _pedestrian(length: float, width: float, height: float, rng: np.random.Generator) -> list[Mesh]:
    """Two legs in mid-stride, torso, arms and head."""
    shirt, trousers, skin = _paint(rng), (np.array(_paint(rng)) * 0.5).tolist(), SKINS[int(rng.integers(len(SKINS)))]
    hip, neck, stride = 0.48 * height, 0.84 * height, 0.22 * length
    arm = [(0.0, 0.8 * height), (0.4 * length, 0.46 * height), (0.48 * length, 0.5 * height), (0.1, 0.82 * height)]
    parts = [
        extruded([(-0.1, hip), (stride - 0.08, 0.0), (stride + 0.1, 0.0), (0.1, hip)], 0.02, 0.17, trousers),
        extruded([(-0.1, hip), (-stride - 0.1, 0.0), (-stride + 0.08, 0.0), (0.1, hip)], -0.17, -0.02, trousers),
        lathe((0.0, 0.0, 0.0), (0.16, 0.2, 0.1), (0.46 * height, 0.75 * height, neck), shirt, 8),
        extruded(arm, -0.5 * width, -0.36 * width, shirt),
        extruded([(-x, z) for x, z in arm], 0.36 * width, 0.5 * width, shirt),
        box((-0.1, -0.36 * width, 0.74 * height), (0.1, 0.36 * width, 0.82 * height), shirt),
        blob((0.0, 0.0, 0.92 * height), (0.12, 0.1, 0.085 * height), skin, Material.PLAIN, 0, rng),
        lathe((-0.02, 0.0, 0.0), (0.12, 0.08), (0.95 * height, 1.0 * height), (0.03, 0.02, 0.01), 8),
    ]  # fmt: skip
    return parts


def _two_wheeler(length: float, width: float, height: float, motor: bool, with_rider: bool, rng: np.random.Generator) -> list[Mesh]:
    """Two wheels, frame and handlebar; a motorcycle has a bulky body and wide tyres; the rider sits on top."""
    paint = _paint(rng)
    radius = 0.33 if not motor else 0.31
    tyre = 0.05 if not motor else 0.14
    top = height / 1.2 if with_rider else height
    axles = (-0.5 * length + radius, 0.5 * length - radius)
    parts = [lathe((x, 0.0, radius), (radius, radius), (-0.5 * tyre, 0.5 * tyre), RUBBER, 12, axis="y") for x in axles]
    saddle = 0.72 * top
    if motor:
        tank = [(-0.42, 0.45), (-0.45, 0.62), (0.15, 0.75), (0.3, 0.5), (0.0, 0.22)]
        parts.append(extruded([(x * length, z * top) for x, z in tank], -0.16, 0.16, paint))
        parts.append(box((0.28 * length, -0.12, 0.55 * top), (0.36 * length, 0.12, 0.78 * top), (0.8, 0.8, 0.7)))
        parts.append(box((-0.25 * length, -0.2, 0.2 * top), (0.1 * length, 0.2, 0.4 * top), (0.12, 0.12, 0.12)))
    else:
        rear, front, crank, seat, head = (axles[0], radius), (axles[1], radius), (-0.05, 0.3), (-0.15 * length, saddle), (0.3 * length, 0.72 * top)
        for (x0, z0), (x1, z1) in ((rear, crank), (crank, head), (seat, head), (crank, seat), (front, (0.28 * length, 0.9 * top)), (rear, seat)):
            parts.append(extruded([(x0 - 0.03, z0), (x1 - 0.03, z1), (x1 + 0.03, z1), (x0 + 0.03, z0)], -0.03, 0.03, paint))
        parts.append(box((-0.24 * length, -0.08, saddle), (-0.08 * length, 0.08, saddle + 0.06), RUBBER))
    parts.append(box((0.24 * length, -0.5 * width, 0.86 * top), (0.3 * length, 0.5 * width, 0.9 * top), (0.1, 0.1, 0.1)))
    if not with_rider:
        parts.append(box((0.26 * length, -0.04, 0.86 * top), (0.29 * length, 0.04, top), (0.1, 0.1, 0.1)))
        return parts
    return parts + _rider(length, saddle, height, motor, rng)


def _rider(length: float, saddle: float, height: float, motor: bool, rng: np.random.Generator) -> list[Mesh]:
    """Torso leaning forward, arms to the handlebar, legs to the pedals, head or helmet."""
    shirt, trousers = _paint(rng), (np.array(_paint(rng)) * 0.5).tolist()
    head = _paint(rng) if motor else SKINS[int(rng.integers(len(SKINS)))]
    shoulder, back = 0.82 * height, -0.16 * length
    parts = [
        extruded([(back - 0.14, saddle), (back, shoulder), (back + 0.24, shoulder), (back + 0.12, saddle)], -0.19, 0.19, shirt),
        blob((back + 0.18, 0.0, 0.91 * height), (0.13, 0.12, 0.09 * height), head, Material.PLAIN, 0, rng),
    ]
    for side in (-1, 1):
        y0, y1 = sorted((0.12 * side, 0.24 * side))
        arm = [(back + 0.1, shoulder - 0.1), (back + 0.15, shoulder), (0.3 * length, 1.06 * saddle), (0.26 * length, 0.97 * saddle)]
        parts.append(extruded(arm, y0, y1, shirt))
        parts.append(extruded([(back - 0.1, saddle), (0.02, 0.25), (0.14, 0.25), (back + 0.15, saddle + 0.08)], y0 * 0.9, y1 * 0.9, trousers))
    return parts


def _traffic_cone(length: float, width: float, height: float, rng: np.random.Generator) -> list[Mesh]:
    """An orange cone with white bands on a dark foot."""
    orange = (np.array([0.8, 0.16, 0.02]) * rng.uniform(0.8, 1.1)).tolist()
    half, foot = 0.5 * min(length, width), 0.05 * height
    parts = [box((-half, -half, 0.0), (half, half, foot), (0.05, 0.05, 0.05) if rng.random() < 0.5 else orange)]
    levels = np.array([0.05, 0.3, 0.45, 0.62, 0.77, 1.0]) * height
    for low, high, colour in zip(levels[:-1], levels[1:], (orange, (0.8, 0.8, 0.8), orange, (0.8, 0.8, 0.8), orange), strict=True):
        radii = [half * (0.8 - 0.65 * level / height) for level in (low, high)]
        parts.append(lathe((0.0, 0.0, 0.0), radii, (low, high), colour, 8))
    return parts


def _barrier(length: float, width: float, height: float, rng: np.random.Generator) -> list[Mesh]:
    """A plastic or concrete road barrier: wide foot, narrow top, red and white (or plain grey) sections along its width."""
    grey = float(rng.uniform(0.3, 0.5))
    styles = [((0.6, 0.04, 0.03), (0.8, 0.8, 0.8)), ((0.75, 0.25, 0.02), (0.8, 0.8, 0.8)), ((grey,) * 3, (0.9 * grey,) * 3)]
    colours = styles[int(rng.choice(3, p=[0.45, 0.3, 0.25]))]
    edges, parts = np.linspace(-0.5 * width, 0.5 * width, 7), []
    half = 0.5 * length
    profile = [(-half, 0.0), (-half, 0.25 * height), (-0.4 * half, 0.55 * height), (-0.35 * half, height),
               (0.35 * half, height), (0.4 * half, 0.55 * height), (half, 0.25 * height), (half, 0.0)]  # fmt: skip
    lower, upper = [profile[i] for i in (0, 1, 2, 5, 6, 7)], [profile[i] for i in (2, 3, 4, 5)]
    for index, (y0, y1) in enumerate(pairwise(edges)):
        parts += [extruded(lower, y0, y1, colours[index % 2]), extruded(upper, y0, y1, colours[index % 2])]
    return parts


_BUILDERS: dict[str, Callable[[float, float, float, np.random.Generator], list[Mesh]]] = {
    "car": _car,
    "truck": _truck,
    "bus": _bus,
    "trailer": _trailer,
    "construction_vehicle": _construction_vehicle,
    "pedestrian": _pedestrian,
    "traffic_cone": _traffic_cone,
    "barrier": _barrier,
}
