"""What goes wrong with camera images: a camera that delivers nothing, and weather.

The weather is simulated, on the image alone and in one strength: a check that every data set can have, not a substitute for scenes recorded in rain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from zlib import crc32

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.images import load_cameras
from pipeline.dataset.records import SampleRecord
from pipeline.taxonomy import CAMERAS

Images = NDArray[np.uint8]  # (6, H, W, 3) RGB at network size, cameras in the order of taxonomy.CAMERAS
Disturbance = Callable[[Images, np.random.Generator], Images]

FOG_VEIL, FOG_LIGHT = 0.55, 200.0  # share of the light that fog adds, and its grey value
NIGHT_GAIN, NIGHT_NOISE = 0.3, 6.0  # share of the light that is left, and the noise of a sensor that amplifies it, grey values
RAIN_BLUR_PX, RAIN_CONTRAST = 1.0, 0.75  # drops on the lens: standard deviation of the blur at network size, and the contrast that is left


def unchanged(images: Images, _random: np.random.Generator) -> Images:
    """The images as they were recorded."""
    return images


def fog(images: Images, _random: np.random.Generator) -> Images:
    """A veil of even light over everything."""
    return _to_bytes((1.0 - FOG_VEIL) * images + FOG_VEIL * FOG_LIGHT)


def night(images: Images, random: np.random.Generator) -> Images:
    """Little light, and noise."""
    return _to_bytes(NIGHT_GAIN * images + random.normal(0.0, NIGHT_NOISE, images.shape))


def rain(images: Images, _random: np.random.Generator) -> Images:
    """Blurred by drops on the lens, with less contrast around each camera's own mean."""
    blurred = np.stack([cv2.GaussianBlur(image, (0, 0), RAIN_BLUR_PX) for image in images])
    mean = blurred.mean(axis=(1, 2, 3), keepdims=True)
    return _to_bytes(mean + RAIN_CONTRAST * (blurred - mean))


def lost(camera: int, images: Images, _random: np.random.Generator) -> Images:
    """Black where the camera at position `camera` should be."""
    kept = images.copy()
    kept[camera] = 0
    return kept


WEATHER: Mapping[str, Disturbance] = {"fog": fog, "night": night, "rain": rain}
LOST: Mapping[str, Disturbance] = {channel: partial(lost, position) for position, channel in enumerate(CAMERAS)}


class DisturbedImages:
    """The image source of a predictor. Images are decoded once and then disturbed by `disturbance`, which can be exchanged between passes.

    The random numbers of a sample follow from its token: the same images in every run.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        """`size`: network input height and width, px."""
        self.disturbance: Disturbance = unchanged
        self._size = size
        self._decoded: dict[str, Images] = {}

    def __call__(self, record: SampleRecord) -> Images:
        """(6, H, W, 3) RGB images of a sample. Raises `DataError` for an unusable image."""
        if record.token not in self._decoded:
            self._decoded[record.token] = load_cameras(record, self._size)
        return self.disturbance(self._decoded[record.token], np.random.default_rng(crc32(record.token.encode())))


def _to_bytes(values: NDArray[np.floating]) -> Images:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)
