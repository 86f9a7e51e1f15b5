"""Camera images at network size: where each pixel goes, decoding, and a memory-mapped cache.

nuScenes convention: scale the image to the network's width and cut rows off the top, because the sky carries nothing. Pixel coordinates
have the centre of the first pixel at (0, 0), so scaling by s moves a pixel u to s (u + 1/2) - 1/2.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray, pad_intrinsics
from pipeline.dataset.index import Index
from pipeline.dataset.records import CameraFrame, SampleRecord
from pipeline.errors import file_error
from pipeline.io import canonical_hash
from pipeline.taxonomy import CAMERAS

ImageArray = NDArray[np.uint8]
# Change it when decoding or resizing changes, so that old caches are not read.
_CACHE_FORMAT = 1
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"


@dataclass(frozen=True)
class ImageGeometry:
    """Resize by one factor, then crop to (height, width) at (crop_left, crop_top), all in pixels."""

    resize: float
    crop_left: int
    crop_top: int
    height: int
    width: int

    @classmethod
    def fit(cls, original_width: int, original_height: int, size: tuple[int, int]) -> ImageGeometry:
        """Geometry from an original image to the network input `size` (height, width): keep the bottom rows and the middle columns."""
        height, width = size
        resize = max(width / original_width, height / original_height)
        left = (round(original_width * resize) - width) // 2
        return cls(resize, left, round(original_height * resize) - height, height, width)

    def matrix(self) -> FloatArray:
        """(3,3) map of homogeneous original pixels to network pixels.

        `pad_intrinsics(matrix) @ ego2img` projects into the network input.
        """
        shift = (self.resize - 1) / 2
        return np.array([[self.resize, 0, shift - self.crop_left], [0, self.resize, shift - self.crop_top], [0, 0, 1]])

    def apply(self, image: ImageArray) -> ImageArray:
        """Resize (area average when shrinking, linear when enlarging) and crop an image (H,W,3)."""
        # OpenCV's area mode is not linear interpolation when it enlarges: it would shift edges by a fraction of a pixel.
        mode = cv2.INTER_AREA if self.resize < 1 else cv2.INTER_LINEAR
        resized: ImageArray = cv2.resize(image, None, fx=self.resize, fy=self.resize, interpolation=mode).astype(np.uint8, copy=False)
        return resized[self.crop_top : self.crop_top + self.height, self.crop_left : self.crop_left + self.width]


def load_image(path: Path) -> ImageArray:
    """Decode an image file to RGB (H,W,3).

    Raises:
        DataError: the file is missing, empty, cut or not an image.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise file_error(path, f"image cannot be read ({error.strerror})") from None
    if not data:
        raise file_error(path, "image is empty (0 bytes)")
    if is_cut_jpeg(data):
        raise file_error(path, "image is truncated (no JPEG end marker)")
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise file_error(path, "image cannot be decoded")
    return np.ascontiguousarray(image[:, :, ::-1])


def is_cut_jpeg(data: bytes) -> bool:
    """Whether a JPEG lacks its end marker: decoders fill the lost rows with grey instead of failing.

    Some writers pad, so the tail is searched.
    """
    return data.startswith(_JPEG_START) and _JPEG_END not in data[-256:]


def load_resized(frame: CameraFrame, size: tuple[int, int]) -> ImageArray:
    """The image of a camera frame as RGB uint8 (height, width, 3) at network size. Raises `DataError` as `load_image` does."""
    image = load_image(frame.path)
    return ImageGeometry.fit(image.shape[1], image.shape[0], size).apply(image)


def load_cameras(record: SampleRecord, size: tuple[int, int]) -> ImageArray:
    """`load_resized` of all cameras, in the order of taxonomy.CAMERAS: (6, H, W, 3)."""
    return np.stack([load_resized(record.cameras[channel], size) for channel in CAMERAS])


def network_ego2img(record: SampleRecord, size: tuple[int, int]) -> FloatArray:
    """Projections (6,4,4) of BEV points to network input pixels, cameras in the order of taxonomy.CAMERAS.

    Args:
        record: one sample.
        size: network input height and width, px.
    """
    matrices = []
    for channel in CAMERAS:
        frame = record.cameras[channel]
        geometry = ImageGeometry.fit(frame.width, frame.height, size)
        matrices.append(pad_intrinsics(geometry.matrix()) @ record.ego2img(channel))
    return np.stack(matrices)


class ImageStore:
    """Images of samples at network size, decoded once and kept in a memory-mapped file.

    The cache is filled as samples are asked for. Its name is a hash of the data set's fingerprint and the geometry, so another data set
    or size never reads it; it can be deleted at any time. Without room for it (`max_cache_bytes`, or the disk) every call decodes.
    """

    def __init__(self, index: Index, size: tuple[int, int], cache_dir: Path, max_cache_bytes: int = 8 << 30) -> None:
        self._size = size
        self._row = {token: row for row, token in enumerate(index.samples["token"].to_pylist())}
        self._folder = cache_dir / _cache_key(index, size)
        shape = (len(index), len(CAMERAS), *size, 3)
        room = self._folder.is_dir() or _has_room(cache_dir, int(np.prod(shape)), max_cache_bytes)
        self._images = _open_memmap(self._folder / "images.npy", shape) if room else None
        self._filled = _open_memmap(self._folder / "filled.npy", shape[:1]) if room else None

    def images(self, record: SampleRecord) -> ImageArray:
        """RGB images (6,height,width,3) of a sample, cameras in the order of taxonomy.CAMERAS. Raises `DataError` for an unusable image."""
        row = self._row[record.token]
        if self._images is None or self._filled is None:
            return self._decode(record)
        if not self._filled[row]:
            self._images[row] = self._decode(record)
            # Marked only after the pixels are written: a killed process leaves an unmarked row.
            self._filled[row] = 1
        return np.array(self._images[row])

    def _decode(self, record: SampleRecord) -> ImageArray:
        return load_cameras(record, self._size)


def _cache_key(index: Index, size: tuple[int, int]) -> str:
    sizes = index.table("frames", ["width", "height"]).group_by(["width", "height"]).aggregate([]).to_pylist()
    geometries = [asdict(ImageGeometry.fit(row["width"], row["height"], size)) for row in sizes if row["width"] and row["height"]]
    parts = [index.fingerprint, index.version, _CACHE_FORMAT, *sorted(geometries, key=str)]
    return f"images-{canonical_hash(parts)[:16]}"


def _has_room(cache_dir: Path, needed_bytes: int, max_cache_bytes: int) -> bool:
    cache_dir.mkdir(parents=True, exist_ok=True)
    return needed_bytes <= max_cache_bytes and needed_bytes * 1.1 < shutil.disk_usage(cache_dir).free


def _open_memmap(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        try:
            stored = np.lib.format.open_memmap(path, mode="r+")
            if stored.shape == shape and stored.dtype == np.uint8:
                return stored
        except ValueError:  # cut or foreign file: it is only a cache, make a new one
            pass
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
