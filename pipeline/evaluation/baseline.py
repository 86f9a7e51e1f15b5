"""A constant prior: the best guess without looking at the images, made from the training split and judged by the same metrics.

Detection: for each class the cells of a 4 m BEV grid in which it stands most often, each with the mean box found there and its
frequency as score. Map: for each class the training elements that have the most other training elements within 1 m (Chamfer), chosen
one after another so that each explains elements that the earlier ones do not; the score is the number explained per sample. Occupancy:
for each voxel the most frequent class among the samples in which a camera saw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray
from pipeline.dataset.index import Index
from pipeline.dataset.occupancy import load_labels
from pipeline.dataset.records import Boxes, SampleRecord
from pipeline.evaluation.chamfer import chamfer_matrix
from pipeline.evaluation.map import label_elements
from pipeline.evaluation.occupancy import CLASSES, OCC3D
from pipeline.maps.store import MapLabel, MapStore
from pipeline.models.prediction import BoxPrediction, MapPrediction, OccupancyGrid, OccupancyPrediction, Prediction
from pipeline.taxonomy import DETECTION_CLASSES, MAP_CLASSES, OCCUPANCY_FREE

CELL_M = 4.0
BOXES_PER_CLASS = 30
ELEMENTS_PER_CLASS = 30
SAME_ELEMENT_M = 1.0
_MOST_ELEMENTS = 500  # of a class that are compared with each other: 250,000 Chamfer distances of 20 points


@dataclass(frozen=True)
class ConstantPredictor:
    """Predicts the same for every sample; a head that the training split has no labels for is None."""

    boxes: BoxPrediction | None
    map: MapPrediction | None
    occupancy: OccupancyPrediction | None

    def reset(self) -> None:
        """Nothing to forget."""

    def step(self, record: SampleRecord) -> Prediction:
        """The constant."""
        return Prediction(record.token, self.boxes, self.map, self.occupancy)


def constant_prior(index: Index, maps: MapStore, max_samples: int) -> ConstantPredictor:
    """The prior of the training split, from at most `max_samples` of its samples, evenly chosen."""
    tokens = index.tokens("train")
    tokens = tokens[:: max(1, -(-len(tokens) // max_samples))]
    boxes, labels, occupancy = [], [], _OccupancyCounts()
    for token in tokens:
        record = index.sample(token)
        boxes.append(record.boxes)
        label = maps.get(token)
        if label is not None:
            labels.append(label)
        grid = load_labels(index.dataroot, record)
        if grid is not None:
            occupancy.add(grid.semantics, grid.mask_camera)
    return ConstantPredictor(box_prior(boxes), map_prior(labels), occupancy.prior())


def box_prior(samples: Sequence[Boxes]) -> BoxPrediction | None:
    """Most frequent cells of each class with their mean boxes; None without any box. Boxes of all samples, BEV frame."""
    center, size, velocity = (np.concatenate([getattr(s, f) for s in samples] or [np.zeros((0, n))]) for f, n in _BOX_FIELDS)
    yaw = np.concatenate([s.yaw_rad for s in samples] or [np.zeros(0)])
    class_id = np.concatenate([s.class_id for s in samples] or [np.zeros(0, np.int64)])
    cell = np.floor(center[:, :2] / CELL_M).astype(np.int64)
    rows = []
    for wanted in range(len(DETECTION_CLASSES)):
        of_class = np.flatnonzero(class_id == wanted)
        _, group, counts = np.unique(cell[of_class], axis=0, return_inverse=True, return_counts=True)
        for best in np.argsort(-counts, kind="stable")[:BOXES_PER_CLASS]:
            members = of_class[group.reshape(-1) == best]
            heading = np.arctan2(np.sin(yaw[members]).mean(), np.cos(yaw[members]).mean())
            moving = velocity[members][np.isfinite(velocity[members]).all(axis=1)]
            mean_velocity = moving.mean(axis=0) if len(moving) else np.zeros(2)
            score = min(1.0, counts[best] / len(samples))
            rows.append([*center[members].mean(axis=0), *size[members].mean(axis=0), heading, *mean_velocity, wanted, score])
    if not rows:
        return None
    table = np.array(rows)
    order = np.argsort(-table[:, 10], kind="stable")
    values = table[order].astype(np.float32)
    return BoxPrediction(values[:, :3], values[:, 3:6], values[:, 6], values[:, 7:9], table[order, 9].astype(np.int64), values[:, 10])


_BOX_FIELDS = (("center_m", 3), ("size_wlh_m", 3), ("velocity_mps", 2))


def map_prior(labels: Sequence[MapLabel]) -> MapPrediction | None:
    """Elements that explain most training elements, per class; None without any element."""
    lines, classes, scores = [], [], []
    for class_id in range(len(MAP_CLASSES)):
        elements = [label_elements(label, class_id) for label in labels]
        found = np.concatenate([each for each in elements if len(each)] or [np.zeros((0, 100, 2))])
        sample_share = max(1, -(-len(found) // _MOST_ELEMENTS))
        chosen, explained = _most_explaining(found[::sample_share])
        lines.append(chosen)
        classes.append(np.full(len(chosen), class_id, dtype=np.int64))
        scores.append(explained * sample_share / max(1, len(labels)))
    polylines, class_ids, score = np.concatenate(lines), np.concatenate(classes), np.concatenate(scores)
    if not len(polylines):
        return None
    order = np.argsort(-score, kind="stable")
    nothing, no_line = np.zeros((0, 2, 2), np.float32), np.zeros(0, np.int64)
    return MapPrediction(
        polylines[order].astype(np.float32), class_ids[order], np.minimum(score[order], 1.0).astype(np.float32),
        nothing, np.zeros((0, 4, 2), np.float32), np.zeros((0, 0), np.uint8), no_line, no_line,
    )  # fmt: skip


def _most_explaining(elements_m: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Elements (K,100,2) that explain most of `elements_m` (N,100,2), greedily, and how many each explains (K,)."""
    coarse = elements_m[:, np.linspace(0, 99, 20).round().astype(int)]
    near = chamfer_matrix(coarse, coarse, SAME_ELEMENT_M) <= SAME_ELEMENT_M
    chosen: list[int] = []
    explained: list[int] = []
    while len(chosen) < ELEMENTS_PER_CLASS and near.any():
        counts = near.sum(axis=1)
        best = int(counts.argmax())
        chosen.append(best)
        explained.append(int(counts[best]))
        near[:, near[best]] = False
    return elements_m[chosen], np.array(explained, dtype=np.float64)


class _OccupancyCounts:
    """How often each class was seen in each voxel of the Occ3D grid."""

    def __init__(self) -> None:
        self._counts: NDArray[np.uint16] | None = None

    def add(self, semantics: NDArray[np.uint8], mask_camera: NDArray[np.bool_]) -> None:
        """Count one sample; shapes (200,200,16)."""
        if self._counts is None:
            self._counts = np.zeros((semantics.size, CLASSES), dtype=np.uint16)
        seen = np.flatnonzero(mask_camera)
        self._counts[seen, semantics.reshape(-1)[seen]] += 1

    def prior(self) -> OccupancyPrediction | None:
        """Most frequent class of each voxel, free where it was never seen; None without any sample."""
        if self._counts is None:
            return None
        labels = self._counts.argmax(axis=1).astype(np.uint8)
        labels[self._counts.max(axis=1) == 0] = OCCUPANCY_FREE
        return OccupancyPrediction([OccupancyGrid(labels.reshape(OCC3D.shape), *OCC3D.ranges_m)])
