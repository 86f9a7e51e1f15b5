"""Occupancy labels in the layout of Occ3D-nuScenes: `<dataroot>/gts/<scene>/<sample token>/labels.npz`.

A label is a grid of 200 x 200 x 16 voxels of 0.4 m over x and y in [-40, 40) m and z in [-1, 5.4) m of the BEV frame, indexed [x, y, z];
values are indices into OCCUPANCY_CLASSES, 17 is free. The masks mark the voxels that were observed by the lidar and by the cameras.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.records import SampleRecord
from pipeline.errors import file_error
from pipeline.taxonomy import OCCUPANCY_CLASSES

SHAPE = (200, 200, 16)
VOXEL_M = 0.4
ORIGIN_M = (-40.0, -40.0, -1.0)
_ARRAYS = ("semantics", "mask_lidar", "mask_camera")


@dataclass(frozen=True)
class OccupancyLabels:
    """Labels of one sample."""

    semantics: NDArray[np.uint8]  # (200,200,16) index into OCCUPANCY_CLASSES
    mask_lidar: NDArray[np.bool_]  # (200,200,16)
    mask_camera: NDArray[np.bool_]  # (200,200,16)


def labels_path(dataroot: Path, scene_name: str, sample_token: str) -> Path:
    """Where the label of a sample is, present or not."""
    return dataroot / "gts" / scene_name / sample_token / "labels.npz"


def load_labels(dataroot: Path, record: SampleRecord) -> OccupancyLabels | None:
    """The label of a sample, or None if the data set has none for it. Raises `DataError` as `read_labels` does."""
    path = labels_path(dataroot, record.scene_name, record.token)
    return read_labels(path) if path.is_file() else None


def read_labels(path: Path) -> OccupancyLabels:
    """Read one label file.

    Raises:
        DataError: the file is damaged, an array is missing or has the wrong shape, or a label is not a class.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in _ARRAYS if name in stored.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise file_error(path, f"occupancy label cannot be read ({error})") from None
    for name in _ARRAYS:
        if name not in arrays:
            raise file_error(path, f"array {name!r} is missing")
        if arrays[name].shape != SHAPE:
            raise file_error(path, f"array {name!r} has shape {arrays[name].shape}: it must be {SHAPE}")
    semantics = arrays["semantics"]
    if semantics.min() < 0 or semantics.max() >= len(OCCUPANCY_CLASSES):
        raise file_error(path, f"labels range over {semantics.min()}..{semantics.max()}: they must be 0..{len(OCCUPANCY_CLASSES) - 1}")
    return OccupancyLabels(semantics.astype(np.uint8), arrays["mask_lidar"].astype(bool), arrays["mask_camera"].astype(bool))


def voxel_centers_m() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Coordinates of the voxel centres along x (200,), y (200,) and z (16,), BEV frame."""
    x, y, z = (origin + VOXEL_M * (np.arange(count) + 0.5) for origin, count in zip(ORIGIN_M, SHAPE, strict=True))
    return x, y, z
