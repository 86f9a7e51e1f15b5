"""Sensor files of the key frames: camera images and lidar sweeps. Each worker process looks at one chunk of files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.images import is_cut_jpeg
from pipeline.dataset.lidar import read_points
from pipeline.errors import DataError
from pipeline.execution import map_ordered
from pipeline.progress import track
from pipeline.taxonomy import CAMERAS, LIDAR
from pipeline.validation.context import Context, problems

File = TypeVar("File")
_CHUNK = 64
# An image whose mean grey value is below this (of 255) shows nothing: real night images of nuScenes have means above 10.
BLACK_MEAN = 2.0


@dataclass(frozen=True)
class ImageFile:
    """What was found in one image file; `mean_rgb` is NaN where it was not decoded."""

    problem: str
    width: int
    height: int
    mean_rgb: tuple[float, float, float]
    digest: str


@dataclass(frozen=True)
class LidarFile:
    """What was found in one lidar file."""

    problem: str
    points: int
    invalid_points: int
    max_range_m: float


_NO_MEAN = (math.nan, math.nan, math.nan)


def inspect_image(path: Path) -> ImageFile:
    """Read and decode one image (at an eighth of its size, which still reads every byte of the file)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        return ImageFile(f"file cannot be read ({error.strerror})", 0, 0, _NO_MEAN, "")
    if not data:
        return ImageFile("file has 0 bytes", 0, 0, _NO_MEAN, "")
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    if is_cut_jpeg(data):
        return ImageFile("JPEG is truncated", 0, 0, _NO_MEAN, digest)
    width, height = _header_size(path)
    small = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_REDUCED_COLOR_8)
    if small is None or not width:
        return ImageFile("image cannot be decoded", width, height, _NO_MEAN, digest)
    blue, green, red = small.reshape(-1, 3).mean(axis=0)
    return ImageFile("", width, height, (float(red), float(green), float(blue)), digest)


def _header_size(path: Path) -> tuple[int, int]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.size
    except (OSError, UnidentifiedImageError):
        return 0, 0


def inspect_lidar(path: Path) -> LidarFile:
    """Read one lidar file."""
    if not path.is_file():
        return LidarFile("file is missing", 0, 0, math.nan)
    try:
        points = read_points(path)[:, :3]
    except DataError as error:
        return LidarFile(str(error).removeprefix(f"{path}: "), 0, 0, math.nan)
    valid = np.isfinite(points).all(axis=1)
    farthest = float(np.linalg.norm(points[valid].astype(np.float64), axis=1).max()) if valid.any() else math.nan
    return LidarFile("", len(points), int((~valid).sum()), farthest)


def measure_images(context: Context) -> pa.Table:
    """One row a key frame of the six cameras: file_problem, size_problem, dark_problem, repeat_problem and the mean colour of the image."""
    frames = context.index.frames
    frames = frames.filter(pc.is_in(frames["channel"], value_set=pa.array(CAMERAS)))
    files = _inspect_all(context, frames, _inspect_images, "checking images")
    sizes = np.array([(file.width, file.height) for file in files], dtype=np.int64).reshape(-1, 2)
    table_sizes = np.stack([frames["width"].to_numpy(), frames["height"].to_numpy()], axis=1)
    mean_rgb = np.array([file.mean_rgb for file in files]).reshape(-1, 3)
    wrong_size = (sizes != table_sizes).any(axis=1) & (sizes > 0).all(axis=1)
    columns = {name: pa.array(mean_rgb[:, i], mask=np.isnan(mean_rgb[:, i])) for i, name in enumerate(("mean_red", "mean_green", "mean_blue"))}
    return pa.table(
        {
            "token": frames["token"],
            "sample_token": frames["sample_token"],
            "channel": frames["channel"],
            "filename": frames["filename"],
            "file_problem": pa.array([file.problem for file in files], pa.string()),
            "size_problem": problems(len(files), [("width or height differs from sample_data", wrong_size)]),
            "dark_problem": problems(len(files), [("image is black", (mean_rgb < BLACK_MEAN).all(axis=1))]),
            "repeat_problem": _repeated([file.digest for file in files]),
            **columns,
        }
    )


def _repeated(digests: Sequence[str]) -> pa.Array:
    """Files with the same bytes as an earlier one."""
    seen: set[str] = set()
    repeated = np.zeros(len(digests), dtype=bool)
    for row, digest in enumerate(digests):
        repeated[row] = digest in seen
        if digest:
            seen.add(digest)
    return problems(len(digests), [("same bytes as an earlier image", repeated)])


def measure_lidar(context: Context) -> pa.Table:
    """One row a LIDAR_TOP key frame: file_problem, points, invalid_points, max_range_m."""
    frames = context.index.frames
    frames = frames.filter(pc.equal(frames["channel"], LIDAR))
    files = _inspect_all(context, frames, _inspect_lidars, "checking lidar")
    readable = np.array([not file.problem for file in files], dtype=bool)
    ranges = np.array([file.max_range_m for file in files], dtype=np.float64)
    return pa.table(
        {
            "token": frames["token"],
            "sample_token": frames["sample_token"],
            "filename": frames["filename"],
            "file_problem": pa.array([file.problem for file in files], pa.string()),
            "points": pa.array(np.array([file.points for file in files], dtype=np.int64), mask=~readable),
            "invalid_points": pa.array(np.array([file.invalid_points for file in files], dtype=np.int64), mask=~readable),
            "max_range_m": pa.array(ranges, mask=~np.isfinite(ranges)),
        }
    )


def _inspect_images(root: Path, names: Sequence[str]) -> list[ImageFile]:
    return [inspect_image(root / name) for name in names]


def _inspect_lidars(root: Path, names: Sequence[str]) -> list[LidarFile]:
    return [inspect_lidar(root / name) for name in names]


def _inspect_all(context: Context, frames: pa.Table, inspect: Callable[[Path, Sequence[str]], list[File]], description: str) -> list[File]:
    names = frames["filename"].to_pylist()
    chunks = [names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK)]
    # Starting processes costs seconds: not for a few thousand small files.
    workers = context.workers if len(chunks) > 64 else 1
    results = map_ordered(partial(inspect, context.dataroot), chunks, workers)
    return [file for chunk in track(results, description, len(chunks)) for file in chunk]
