"""Camera images by ray casting: sun with hard shadows, sky light, filtered ground texture, haze, sensor noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.synthetic.ground import RESOLUTION_M
from pipeline.dataset.synthetic.mesh import Float32, Material
from pipeline.dataset.synthetic.paths2d import Float
from pipeline.dataset.synthetic.rig import Camera
from pipeline.dataset.synthetic.world import Hits, Instant, View, World

# Sub-pixel positions (columns, rows) of the extra rays that smooth edges.
_SUBPIXELS = ((0.4, 0.4),)
_DEPTH_JUMP = 0.15
_SKY = len(Material)


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
    scaled = [np.array(c, np.float32) * np.float32(strength) for c in (sun_colour, sky_light, zenith, horizon)]
    haze = float(rng.uniform(250.0, 900.0) if kind != "overcast" else rng.uniform(130.0, 450.0))
    return Light(sun.astype(np.float32), scaled[0], scaled[1], scaled[2], scaled[3], haze, float(rng.uniform(0.0, 0.9)), float(rng.uniform(1.5, 4.0)))


def render(world: World, instant: Instant, light: Light, camera: Camera, camera2tile: Float, noise_seed: int) -> Frame:
    """The image of a camera at the pose `camera2tile` (4,4)."""
    rotation = camera2tile[:3, :3].astype(np.float32)
    rays = camera.rays
    directions = rays @ rotation.T
    focal, origin = float(camera.intrinsics[0, 0]), camera2tile[:3, 3]
    view = View.around(origin, directions)
    near = world.near(instant, view, directions)
    hits = world.cast(instant, origin, directions, near)
    shader = _Shader(world, instant, light, view, focal)
    colour = shader.radiance(directions, hits)
    shape = (camera.height, camera.width)
    edges = np.flatnonzero(_silhouettes(hits.range_m.reshape(shape)))
    shifts = np.array([(column, row, 0.0) for column, row in _SUBPIXELS], np.float32) / np.float32(focal) @ rotation.T
    moved = (directions[edges] + shifts[:, None] * rays[edges, 2:]).reshape(-1, 3)
    moved /= np.sqrt(np.einsum("ij,ij->i", moved, moved))[:, None]
    extra = shader.radiance(moved, world.cast(instant, origin, moved)).reshape(3, len(_SUBPIXELS), -1)
    colour[:, edges] = (colour[:, edges] + extra.sum(axis=1)) * np.float32(1.0 / (1 + len(_SUBPIXELS)))
    instance = np.where(hits.triangle >= 0, world.instance[hits.triangle], -1)
    visible = np.bincount(instance[instance >= 0], minlength=len(world.actors))
    silhouettes = visible + world.hidden(instant, origin, directions, hits, near)
    bgr = _develop(colour.reshape(3, *shape), light.noise, noise_seed)
    return Frame(bgr, hits.range_m.reshape(shape), instance.reshape(shape), visible, silhouettes)


def _silhouettes(range_m: Float32) -> NDArray[np.bool_]:
    """Pixels (H,W) on either side of a jump in depth, where one surface ends before another."""
    inverse = np.float32(1.0) / range_m
    limit = np.maximum(inverse, np.float32(0.004)) * np.float32(_DEPTH_JUMP)
    down = np.abs(np.diff(inverse, axis=0)) > np.minimum(limit[1:], limit[:-1])
    right = np.abs(np.diff(inverse, axis=1)) > np.minimum(limit[:, 1:], limit[:, :-1])
    edges = np.zeros(range_m.shape, bool)
    edges[1:] |= down
    edges[:-1] |= down
    edges[:, 1:] |= right
    edges[:, :-1] |= right
    return edges


class _Shader:
    """Colours of rays of one view at one instant. Points and colours are (3,N) here: numpy works along rows much quicker than along columns."""

    def __init__(self, world: World, instant: Instant, light: Light, view: View, focal_px: float) -> None:
        self.world, self.instant, self.light, self.view, self.focal_px = world, instant, light, view, np.float32(focal_px)
        up = instant.normals[:, 2]
        # Light from the sky, less from below; the table's second half has the sun's light added.
        shade = light.sky_light[:, None] * (np.float32(0.62) + np.float32(0.38) * up)
        self._shine = np.maximum(instant.normals @ light.sun, 0.0)
        self._incoming = np.concatenate([shade, shade + light.sun_colour[:, None] * self._shine], axis=1)
        self._colours = np.ascontiguousarray(world.mesh.colours.T)
        # The last entry is for triangle -1, the sky.
        self._materials = np.append(world.mesh.materials, _SKY)

    def radiance(self, directions: Float32, hits: Hits) -> Float32:
        """Linear RGB (3,N) seen along unit directions (N,3)."""
        # Rays are sorted by material, the sky last, so that each kind of surface is a slice.
        material = self._materials[hits.triangle]
        order = np.argsort(material, kind="stable")
        ends = np.cumsum(np.bincount(material, minlength=_SKY + 1)).tolist()
        rays = np.ascontiguousarray(directions.T).take(order, axis=1)
        solid = ends[Material.MASONRY]
        colour = np.empty_like(rays)
        colour[:, solid:] = _sky(rays[:, solid:], self.light)
        triangle, distance, ray = hits.triangle[order[:solid]], hits.range_m[order[:solid]], rays[:, :solid]
        # Surface points, pulled 2 cm towards the camera so that shadow rays do not start inside the surface.
        points = ray * (distance - np.float32(0.02)) + self.view.apex.astype(np.float32)[:, None]
        surface = self._albedo(triangle, points, ray, distance, ends)
        surface *= self._light(triangle, points)
        horizon = self.light.horizon[:, None]
        surface -= horizon
        surface *= np.exp(distance * np.float32(-1.0 / self.light.haze_m))
        surface += horizon
        colour[:, :solid] = surface
        unsorted = np.empty_like(colour)
        for row, values in zip(unsorted, colour, strict=True):
            row[order] = values
        return unsorted

    def _light(self, triangle: NDArray[np.int32], points: Float32) -> Float32:
        """Light (3,N) that reaches surface points from the sky and, where nothing shades them, from the sun."""
        entry = triangle.copy()
        if self.light.sun_colour.any():
            turned = np.flatnonzero(self._shine[triangle])
            lit = self.world.lit(self.instant, self.view, points.take(turned, axis=1), self.light.sun)
            entry[turned[lit]] += len(self._shine)
        return self._incoming.take(entry, axis=1)

    def _albedo(self, triangle: NDArray[np.int32], points: Float32, ray: Float32, distance: Float32, ends: list[int]) -> Float32:
        """Linear RGB (3,N) of surfaces sorted by material; `ends` says where each material's rays end."""
        albedo = self._colours.take(triangle, axis=1)
        ground = slice(0, ends[Material.GROUND])
        albedo[:, ground] = self._ground(points[:2, ground], ray[:, ground], distance[ground])
        facade = slice(ends[Material.PLAIN], ends[Material.FACADE])
        normals = self.instant.normals[triangle[facade]]
        albedo[:, facade] = _facade_colour(albedo[:, facade], points[:, facade], normals, distance[facade], self.focal_px)
        mottled = slice(ends[Material.FACADE], ends[Material.MASONRY])
        x, y, z = points[:, mottled]
        grain = _lookup((x + 0.7 * z) * 24.0, (y + 1.3 * z) * 24.0)
        strength = np.full(len(x), 0.5, np.float32)
        strength[: ends[Material.FOLIAGE] - mottled.start] = 1.6
        strength /= 1.0 + distance[mottled] * np.float32(0.02)
        albedo[:, mottled] *= np.maximum(1.0 + (grain - 1.0) * strength, np.float32(0.15))
        return albedo

    def _ground(self, points: Float32, ray: Float32, distance: Float32) -> Float32:
        """Texture (3,N) averaged over the pixel's long footprint: three taps along the line of sight, a third of it apart."""
        across = distance * (np.float32(1.0) / self.focal_px)
        along = across / np.maximum(np.abs(ray[2]), np.float32(0.01))
        footprint = np.maximum(across, along * np.float32(0.33))
        # Near the car the footprint is no longer than a texture pixel and one tap does.
        step = np.where(along > 1.5 * RESOLUTION_M, along * np.float32(1.0 / 3.0), np.float32(0.0))
        step /= np.maximum(np.hypot(ray[0], ray[1]), np.float32(1e-6))
        return self.world.ground.colour_at(points, ray[:2] * step, footprint)


def _sky(directions: Float32, light: Light) -> Float32:
    """Colour (3,N) of the sky along unit directions (3,N): gradient from horizon to zenith, a bright spot around the sun, clouds."""
    up = np.clip(directions[2], 0.0, 1.0)
    share = np.sqrt(up)
    colour = light.horizon[:, None] + (light.zenith - light.horizon)[:, None] * share
    if light.sun_colour.any():
        glow = np.clip(light.sun @ directions, 0.0, 1.0)
        for _ in range(6):
            glow *= glow
        colour += light.sun_colour[:, None] * glow
    reach = np.float32(260.0) / (up + np.float32(0.12))
    cloud = _lookup(directions[0] * reach, directions[1] * reach, blurred=True)
    cover = np.clip((cloud - 1.0) * 4.0 + np.float32(light.clouds - 0.4), 0.0, 0.8) * np.minimum(up * 6.0, 1.0)
    colour += cover * ((0.9 * (light.sky_light + 0.5 * light.sun_colour)).astype(np.float32)[:, None] - colour)
    return colour


def _facade_colour(wall: Float32, points: Float32, normals: Float32, distance: Float32, focal_px: np.float32) -> Float32:
    """Walls (3,N) with rows of windows that fade into their mean where they are smaller than a pixel; normals (N,3)."""
    u = (points[1] * normals[:, 0] - points[0] * normals[:, 1]) * np.float32(1 / 2.8)
    v = points[2] * np.float32(1 / 3.1)
    cell_u, cell_v = np.floor(u), np.floor(v)
    window = (np.abs(u - cell_u - 0.5) < 0.27) & (np.abs(v - cell_v - 0.55) < 0.25) & (np.abs(normals[:, 2]) < 0.5)
    fade = np.clip(1.6 - distance * (np.float32(2.0) / focal_px), 0.0, 1.0)
    share = (window * fade + 0.25 * (1.0 - fade)) * np.float32(0.9)
    tint = (np.sin(cell_u * 12.9898 + cell_v * 78.233) * 0.5 + 0.5) * np.float32(0.14) + np.float32(0.03)
    return wall * (1.0 - share) + np.array([[0.8], [0.95], [1.1]], np.float32) * (tint * share)


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
    return _pattern(blurred).ravel().take(((y.astype(np.int32) & 1023) << 10) | (x.astype(np.int32) & 1023))


@lru_cache(maxsize=4)
def _grain(height: int, width: int) -> Float32:
    return np.random.default_rng(11).standard_normal((3, height + 64, width + 64)).astype(np.float32)


@lru_cache(maxsize=4)
def _vignette(height: int, width: int) -> Float32:
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    return (1.0 - 0.14 * (x * x + y * y)).astype(np.float32)


def _develop(colour: Float32, noise: float, seed: int) -> NDArray[np.uint8]:
    """Linear RGB (3,H,W) to BGR bytes (H,W,3): highlights roll off, gamma 2, vignette, grain."""
    height, width = colour.shape[1:]
    row, column = np.random.default_rng(seed).integers(0, 64, 2)
    x = colour * _vignette(height, width)
    x = np.sqrt(x * np.float32(1.45) / (x + np.float32(0.45))) * np.float32(255.0)
    x += _grain(height, width)[:, row : row + height, column : column + width] * np.float32(noise)
    red, green, blue = np.clip(x, 0, 255).astype(np.uint8)
    return cv2.merge([blue, green, red])
