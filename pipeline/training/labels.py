"""Labels of a sample, read once and kept: boxes, map lines, occupancy and lidar points, in the BEV frame.

A label that does not exist is None, never invented; `available_tasks` says which tasks a data set can train.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.index import Index
from pipeline.dataset.lidar import points_in_ego
from pipeline.dataset.occupancy import ORIGIN_M, SHAPE, VOXEL_M, load_labels
from pipeline.dataset.records import Boxes, SampleRecord
from pipeline.errors import DataError
from pipeline.maps.store import MapStore
from pipeline.taxonomy import MAP_CLASSES, OCCUPANCY_FREE

Floats = NDArray[np.float32]
Held = TypeVar("Held")
UNSEEN = 255
# Samples kept in memory: 0.8 MB each.
HELD_SAMPLES = 2048
# Depth supervision fills 4,000 feature cells a sample; more lidar points only cost time.
LIDAR_POINTS = 8_000


@dataclass(frozen=True)
class BoxLabels:
    """N boxes of the detection classes with at least one lidar point (or an unknown number).

    `centers_m` (N, 3), `size_wlh_m` (N, 3), `yaw_rad` (N,), `velocity_mps` (N, 2) with NaN where unknown, `class_id` (N,).
    """

    centers_m: Floats
    size_wlh_m: Floats
    yaw_rad: Floats
    velocity_mps: Floats
    class_id: NDArray[np.int64]


@dataclass(frozen=True)
class MapLines:
    """L map elements: `points_m` [(P_i, 2)], `class_id` (L,), `closed` (L,).

    `labelled` (3,): the classes that the map knows. Of others (dividers, where there is only a raster of the drivable area) having none says nothing.
    """

    points_m: list[Floats]
    class_id: NDArray[np.int64]
    closed: NDArray[np.bool_]
    labelled: NDArray[np.bool_] = field(default_factory=lambda: np.ones(len(MAP_CLASSES), dtype=bool))


@dataclass(frozen=True)
class Labels:
    """All labels of one sample; None where the data set has none."""

    boxes: BoxLabels
    map: MapLines | None
    occupancy: NDArray[np.uint8] | None  # (200, 200, 16) Occ3D classes, UNSEEN where no camera looks
    lidar_m: Floats | None  # (M, 3)
    lidar_class: NDArray[np.uint8] | None  # (M,) Occ3D class of the voxel a point hit, UNSEEN where unknown


def keep_latest(held: OrderedDict[str, Held], token: str, make: Callable[[], Held]) -> Held:
    """`held[token]`, made where it is absent; the oldest of more than HELD_SAMPLES is given up."""
    if token not in held:
        held[token] = make()
        if len(held) > HELD_SAMPLES:
            held.popitem(last=False)
    return held[token]


class LabelStore:
    """Reads labels through the index and the map store and keeps the most recent ones."""

    def __init__(self, index: Index, maps: MapStore | None) -> None:
        self.index, self.maps = index, maps
        self._held: OrderedDict[str, Labels] = OrderedDict()

    def get(self, record: SampleRecord) -> Labels:
        """Labels of a sample. Raises `DataError` for a damaged label file."""
        return keep_latest(self._held, record.token, lambda: self._read(record))

    def _read(self, record: SampleRecord) -> Labels:
        occupancy, lidar_m = self._occupancy(record), _lidar(record)
        classes = None if lidar_m is None else point_classes(lidar_m, occupancy)
        return Labels(box_labels(record.boxes), self._map(record), occupancy, lidar_m, classes)

    def _map(self, record: SampleRecord) -> MapLines | None:
        label = self.maps.get(record.token) if self.maps is not None else None
        if label is None:
            return None
        lines_m = [line.astype(np.float32) for line in label.polylines]
        return MapLines(lines_m, label.polyline_class.astype(np.int64), label.closed.astype(bool), label.labelled)

    def _occupancy(self, record: SampleRecord) -> NDArray[np.uint8] | None:
        labels = load_labels(self.index.dataroot, record)
        return None if labels is None else np.where(labels.mask_camera, labels.semantics, np.uint8(UNSEEN))


def box_labels(boxes: Boxes) -> BoxLabels:
    """The boxes a detector can be asked for: of a detection class, and not without any lidar point."""
    keep = (boxes.class_id >= 0) & (boxes.num_lidar_pts != 0)
    return BoxLabels(
        boxes.center_m[keep].astype(np.float32),
        boxes.size_wlh_m[keep].astype(np.float32),
        boxes.yaw_rad[keep].astype(np.float32),
        boxes.velocity_mps[keep].astype(np.float32),
        boxes.class_id[keep].astype(np.int64),
    )


def _lidar(record: SampleRecord) -> Floats | None:
    """Points of the sweep, thinned evenly; None without a readable sweep."""
    if record.lidar is None or not record.lidar.path.is_file():
        return None
    points_m = points_in_ego(record.lidar)
    return points_m[:: max(1, len(points_m) // LIDAR_POINTS)].astype(np.float32)


def point_classes(points_m: Floats, occupancy: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """(M,) Occ3D class of the voxel that holds each point (M, 3) of the ego frame.

    UNSEEN outside the labels and in free space (a point just off a surface).
    """
    if occupancy is None:
        return np.full(len(points_m), UNSEEN, dtype=np.uint8)
    index = np.floor((points_m - np.array(ORIGIN_M, dtype=np.float32)) / VOXEL_M).astype(np.int64)
    inside = ((index >= 0) & (index < SHAPE)).all(axis=1)
    x, y, z = np.where(inside[:, None], index, 0).T
    classes = occupancy[x, y, z]
    return np.where(inside & (classes != OCCUPANCY_FREE), classes, np.uint8(UNSEEN))


def available_tasks(store: LabelStore, records: Sequence[SampleRecord], tasks: Sequence[str]) -> dict[str, int]:
    """Number of samples with a label, by task; a sample without boxes counts for detection, because "nothing there" is a label.

    Raises:
        DataError: there is no training sample, or none of the tasks has a label.
    """
    if not records:
        raise DataError("data/index: the training split has no sample that may be used (split 'train', keep true)")
    counts = {"detection": len(records), "map": 0, "occupancy": 0}
    for record in records:
        labels = store.get(record)
        counts["map"] += labels.map is not None
        counts["occupancy"] += labels.occupancy is not None
    if not any(counts[task] for task in tasks):
        raise DataError(f"model.tasks is {list(tasks)}: no training sample has a label for any of them")
    return {task: counts[task] for task in tasks}
