"""Camera images by ray casting: sun with hard shadows, sky light, filtered ground texture, haze, sensor noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.synthetic.mesh import Float32, Material
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.dataset.synthetic.rig import Camera
from pipeline.dataset.synthetic.world import Hits, Instant, World

# Sub-pixel positions (columns, rows) of the extra rays that smooth edges.
_SUBPIXELS = ((0.125, -0.375), (-0.375, 0.125), (0.3, 0.35))
_EDGE_CONTRAST = 0.035


@dataclass(frozen=True)
class Light:
    """Light and air of a scene. Colours are linear RGB; `sun` is the unit vector (3,) towards the sun, `sun_colour` black when it is overcast."""

    sun: Float32
    sun_colour: Float32
    sky_light: Float32
    zenith: Float32
    horizon: Float32
    haze_m: float
    clouds: float
    noise: float


@dataclass(frozen=True)
class Frame:
    """A rendered image: BGR uint8 (H,W,3), range along the ray in metres (H,W; inf for sky), actor of each pixel (H,W; -1 none),
    and for each actor (A,) the pixels it covers and those it would cover alone."""

    bgr: NDArray[np.uint8]
    range_m: Float32
    instance: NDArray[np.int32]
    visible_px: NDArray[np.int64]
    silhouette_px: NDArray[np.int64]


def make_light(rng: np.random.Generator) -> Light:
    """Draw the light of a scene: sunny (55 %), overcast (25 %) or low evening sun (20 %)."""
    kind = str(rng.choice(["sunny", "overcast", "evening"], p=[0.55, 0.25, 0.2]))
    height = np.deg2rad(float(rng.uniform(28.0, 65.0) if kind == "sunny" else rng.uniform(12.0, 22.0)))
    azimuth = float(rng.uniform(-np.pi, np.pi))
    sun = np.array([np.cos(height) * np.cos(azimuth), np.cos(height) * np.sin(azimuth), np.sin(height)])
    sun_colour, sky_light, zenith, horizon = {
        "sunny": ((1.25, 1.15, 1.0), (0.42, 0.47, 0.56), (0.12, 0.27, 0.6), (0.6, 0.7, 0.82)),
        "overcast": ((0.0, 0.0, 0.0), (0.95, 0.97, 1.0), (0.62, 0.65, 0.7), (0.75, 0.77, 0.8)),
        "evening": ((1.15, 0.75, 0.42), (0.36, 0.37, 0.46), (0.16, 0.22, 0.42), (0.8, 0.55, 0.4)),
    }[kind]
    strength = float(rng.uniform(0.8, 1.15))
    colours = [np.array(c, np.float32) * np.float32(strength) for c in (sun_colour, sky_light, zenith, horizon)]
    haze = float(rng.uniform(250.0, 900.0) if kind != "overcast" else rng.uniform(130.0, 450.0))
    return Light(sun.astype(np.float32), *colours, haze_m=haze, clouds=float(rng.uniform(0.0, 0.9)), noise=float(rng.uniform(1.5, 4.0)))


def render(world: World, instant: Instant, light: Light, camera: Camera, camera2tile: Float, noise_seed: int) -> Frame:
    """The image of a camera at the pose `camera2tile` (4,4)."""
    rotation = camera2tile[:3, :3].astype(np.float32)
    origin = camera2tile[:3, 3]
    rays = camera.rays()
    directions = rays @ rotation.T
    focal = float(camera.intrinsics[0, 0])
    hits = world.cast(instant, origin, directions)
    colour = _radiance(world, instant, light, origin, directions, hits, focal)
    shape = (camera.height, camera.width)
    edges = np.flatnonzero(_edges(colour.reshape(*shape, 3)))
    for column, row in _SUBPIXELS:
        shift = (np.array([column, row, 0.0], np.float32) / np.float32(focal)) @ rotation.T
        moved = directions[edges] + shift * rays[edges, 2:]
        moved /= np.linalg.norm(moved, axis=1, keepdims=True)
        extra = _radiance(world, instant, light, origin, moved, world.cast(instant, origin, moved), focal)
        colour[edges] += extra
    colour[edges] *= np.float32(1.0 / (1 + len(_SUBPIXELS)))
    instance = np.where(hits.triangle >= 0, world.instance[hits.triangle], -1)
    visible = np.bincount(instance[instance >= 0], minlength=len(world.actors))
    silhouettes = world.silhouettes(instant, origin, directions)
    bgr = _develop(colour.reshape(*shape, 3), light.noise, noise_seed)
    return Frame(bgr, hits.range_m.reshape(shape), instance.reshape(shape), visible, silhouettes)


def _edges(colour: Float32) -> NDArray[np.bool_]:
    """Pixels (H,W) that differ in brightness from a neighbour."""
    bright = np.sqrt(colour[..., 1])
    down, right = np.abs(np.diff(bright, axis=0)) > _EDGE_CONTRAST, np.abs(np.diff(bright, axis=1)) > _EDGE_CONTRAST
    edges = np.zeros(bright.shape, bool)
    edges[1:] |= down
    edges[:-1] |= down
    edges[:, 1:] |= right
    edges[:, :-1] |= right
    return edges


def _radiance(world: World, instant: Instant, light: Light, origin: Float, directions: Float32, hits: Hits, focal_px: float) -> Float32:
    """Linear RGB (N,3) seen along the rays."""
    colour = np.empty((len(directions), 3), np.float32)
    sky = np.flatnonzero(hits.triangle < 0)
    colour[sky] = _sky(directions[sky], light)
    solid = np.flatnonzero(hits.triangle >= 0)
    triangle, distance, ray = hits.triangle[solid], hits.range_m[solid], directions[solid]
    points = ray * distance[:, None] + origin.astype(np.float32)
    normals = instant.normals[triangle]
    facing = np.einsum("ij,ij->i", normals, ray)
    normals *= -np.sign(facing)[:, None]
    albedo = _albedo(world, triangle, points, normals, ray, distance, focal_px)
    shine = normals @ light.sun
    lit = np.flatnonzero(shine > 0.0) if light.sun_colour.any() else np.zeros(0, int)
    lit = lit[world.lit(instant, points[lit], normals[lit], light.sun)] if len(lit) else lit
    # Sky light comes from above, a weaker part is reflected by the ground.
    incoming = (np.float32(0.62) + np.float32(0.38) * normals[:, 2:]) * light.sky_light
    incoming[lit] += shine[lit, None] * light.sun_colour
    surface = albedo * incoming
    clear = np.exp(distance * np.float32(-1.0 / light.haze_m))[:, None]
    colour[solid] = surface * clear + (1.0 - clear) * light.horizon
    return colour


def _sky(directions: Float32, light: Light) -> Float32:
    """Gradient from horizon to zenith, a bright spot around the sun, clouds."""
    up = np.clip(directions[:, 2], 0.0, 1.0)
    share = np.sqrt(up)[:, None]
    colour = light.horizon * (1.0 - share) + light.zenith * share
    if light.sun_colour.any():
        glow = np.clip(directions @ light.sun, 0.0, 1.0) ** 64
        colour = colour + glow[:, None] * light.sun_colour
    reach = np.float32(260.0) / (up + np.float32(0.12))
    cloud = _lookup(directions[:, 0] * reach, directions[:, 1] * reach, blurred=True)
    cover = (np.clip((cloud - 1.0) * 4.0 + light.clouds - 0.4, 0.0, 0.8) * np.minimum(up * 6.0, 1.0))[:, None]
    return colour * (1.0 - cover) + cover * (0.9 * (light.sky_light + 0.5 * light.sun_colour))


def _albedo(
    world: World, triangle: NDArray[np.int32], points: Float32, normals: Float32, ray: Float32, distance: Float32, focal_px: float
) -> Float32:
    """Linear RGB (N,3) of the surfaces, by material."""
    albedo = world.mesh.colours[triangle]
    material = world.mesh.materials[triangle]
    index = np.flatnonzero(material == Material.GROUND)
    albedo[index] = _ground_colour(world, points[index], ray[index], distance[index], focal_px)
    index = np.flatnonzero(material == Material.FACADE)
    albedo[index] = _facade_colour(albedo[index], points[index], normals[index], distance[index], focal_px)
    index = np.flatnonzero((material == Material.FOLIAGE) | (material == Material.MASONRY))
    p = points[index]
    grain = _lookup((p[:, 0] + 0.7 * p[:, 2]) * 24.0, (p[:, 1] + 1.3 * p[:, 2]) * 24.0)
    strength = np.where(material[index] == Material.FOLIAGE, np.float32(1.6), np.float32(0.5)) / (1.0 + distance[index] * np.float32(0.02))
    albedo[index] *= np.maximum(1.0 + (grain - 1.0) * strength, 0.15)[:, None]
    return albedo


def _ground_colour(world: World, points: Float32, ray: Float32, distance: Float32, focal_px: float) -> Float32:
    """Texture averaged over the pixel's long footprint: three taps along the line of sight."""
    across = distance * np.float32(1.0 / focal_px)
    flat = np.maximum(np.hypot(ray[:, 0], ray[:, 1]), 1e-6)
    along = across / np.maximum(np.abs(ray[:, 2]), 0.01)
    step = (ray[:, :2] / flat[:, None]) * (along / 3.0)[:, None]
    footprint = np.maximum(across, along * np.float32(0.33))
    base = points[:, :2]
    total = world.ground.colour_at(base, footprint)
    total += world.ground.colour_at(base - step, footprint)
    total += world.ground.colour_at(base + step, footprint)
    return total * np.float32(1.0 / 3.0)


def _facade_colour(wall: Float32, points: Float32, normals: Float32, distance: Float32, focal_px: float) -> Float32:
    """Walls with rows of windows that fade into their mean where they are smaller than a pixel."""
    u = (points[:, 1] * normals[:, 0] - points[:, 0] * normals[:, 1]) * np.float32(1 / 2.8)
    v = points[:, 2] * np.float32(1 / 3.1)
    cell_u, cell_v = np.floor(u), np.floor(v)
    window = (np.abs(u - cell_u - 0.5) < 0.27) & (np.abs(v - cell_v - 0.55) < 0.25) & (np.abs(normals[:, 2]) < 0.5)
    fade = np.clip(1.6 - distance * np.float32(2.0 / focal_px), 0.0, 1.0)
    share = (window * fade + 0.25 * (1.0 - fade)) * np.float32(0.9)
    tint = (np.sin(cell_u * 12.9898 + cell_v * 78.233) * 0.5 + 0.5) * np.float32(0.14) + np.float32(0.03)
    return wall * (1.0 - share)[:, None] + (tint * share)[:, None] * np.array([0.8, 0.95, 1.1], np.float32)


@lru_cache(maxsize=2)
def _pattern(blurred: bool) -> Float32:
    """A repeating random pattern (1024,1024) of mean 1."""
    rng = np.random.default_rng(7)
    fine = rng.standard_normal((1024, 1024)).astype(np.float32)
    wrapped = np.pad(fine, 64, mode="wrap")
    sigmas = ((28.0, 1.0), (9.0, 0.4)) if blurred else ((1.0, 0.6), (4.0, 1.0))
    total = np.zeros_like(fine)
    for sigma, weight in sigmas:
        layer = cv2.GaussianBlur(wrapped, (0, 0), sigma)[64:-64, 64:-64]
        total += weight * layer / layer.std()
    return (1.0 + 0.25 * total / total.std()).astype(np.float32)


def _lookup(x: Float32, y: Float32, blurred: bool = False) -> Float32:
    """Values (N,) of the pattern at cells (x, y)."""
    return _pattern(blurred)[y.astype(np.int32) & 1023, x.astype(np.int32) & 1023]


@lru_cache(maxsize=4)
def _grain(height: int, width: int) -> Float32:
    return np.random.default_rng(11).standard_normal((height + 64, width + 64, 3)).astype(np.float32)


@lru_cache(maxsize=4)
def _vignette(height: int, width: int) -> Float32:
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    return (1.0 - 0.14 * (x * x + y * y)).astype(np.float32)[..., None]


def _develop(colour: Float32, noise: float, seed: int) -> NDArray[np.uint8]:
    """Linear RGB (H,W,3) to BGR bytes: highlights roll off, gamma 2, vignette, grain."""
    height, width = colour.shape[:2]
    row, column = np.random.default_rng(seed).integers(0, 64, 2)
    x = colour[..., ::-1] * _vignette(height, width)
    x = np.sqrt(x * 1.45 / (x + 0.45)) * np.float32(255.0)
    x += _grain(height, width)[row : row + height, column : column + width] * np.float32(noise)
    return np.clip(x, 0, 255).astype(np.uint8)
