"""Occupancy metrics: IoU per class on the Occ3D label grid and on each level's own grid.

Definition. IoU of a class = TP / (TP + FP + FN), from one confusion matrix over all samples; mIoU is its mean over the classes without
'free' that occur in the evaluated ground truth. The headline counts the voxels of the Occ3D grid (200 x 200 x 16 of 0.4 m, BEV frame)
that some camera sees (mask_camera) and some level covers; `mIoU_all_voxels` counts them without the camera mask. A voxel takes the
prediction of the finest level that holds its centre. `per_level` scores each level on its own grid, where a voxel's label is that of
the Occ3D voxel around its centre. `geometric_IoU` is the IoU of occupied against free, whatever the class.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.dataset.occupancy import ORIGIN_M, SHAPE, VOXEL_M
from pipeline.errors import ModelError
from pipeline.models.prediction import OccupancyGrid, OccupancyPrediction
from pipeline.taxonomy import OCCUPANCY_CLASSES, OCCUPANCY_FREE

Range = tuple[float, float]
Labels = NDArray[np.uint8]
CLASSES = len(OCCUPANCY_CLASSES)
NOT_COVERED = 255


@dataclass(frozen=True)
class GridSpec:
    """Geometry of a voxel grid in the BEV frame: numbers of voxels and ranges along x, y, z."""

    shape: tuple[int, int, int]
    ranges_m: tuple[Range, Range, Range]

    def voxel_m(self) -> tuple[float, float, float]:
        """Edge lengths of a voxel along x, y, z, m."""
        x, y, z = ((high - low) / n for n, (low, high) in zip(self.shape, self.ranges_m, strict=True))
        return x, y, z

    def volume_m3(self) -> float:
        """Volume of one voxel, m3."""
        x, y, z = self.voxel_m()
        return x * y * z


def _label_axis(axis: int) -> Range:
    return ORIGIN_M[axis], round(ORIGIN_M[axis] + SHAPE[axis] * VOXEL_M, 6)


OCC3D = GridSpec(SHAPE, (_label_axis(0), _label_axis(1), _label_axis(2)))


def spec_of(grid: OccupancyGrid) -> GridSpec:
    """Geometry of a predicted level."""
    x, y, z = grid.labels.shape
    return GridSpec((x, y, z), (grid.x_range_m, grid.y_range_m, grid.z_range_m))


@lru_cache(maxsize=32)
def lookup(target: GridSpec, source: GridSpec) -> NDArray[np.int64]:
    """For each voxel of `target` the flat index of the voxel of `source` that holds its centre (`target.shape`); -1 outside `source`."""
    axes = []
    for n, (low, high), source_n, source_range in zip(target.shape, target.ranges_m, source.shape, source.ranges_m, strict=True):
        source_low, source_high = source_range
        centers_m = low + (np.arange(n) + 0.5) * (high - low) / n
        # Rounding keeps a centre that lies on a border between voxels on the same side on every machine.
        index = np.floor(np.round((centers_m - source_low) * source_n / (source_high - source_low), 9)).astype(np.int64)
        axes.append(np.where((index >= 0) & (index < source_n), index, -1))
    x, y, z = np.meshgrid(*axes, indexing="ij")
    flat = (x * source.shape[1] + y) * source.shape[2] + z
    return np.where((x < 0) | (y < 0) | (z < 0), -1, flat)


def resample_labels(labels: Labels, source: GridSpec, target: GridSpec) -> Labels:
    """Labels on `target`, from the voxel of `source` around each centre; `NOT_COVERED` outside."""
    index = lookup(target, source)
    return np.where(index >= 0, labels.reshape(-1)[index], np.uint8(NOT_COVERED))


def on_label_grid(prediction: OccupancyPrediction) -> Labels:
    """Prediction on the Occ3D grid (200,200,16): the finest level that covers a voxel; `NOT_COVERED` where none does."""
    merged = np.full(OCC3D.shape, NOT_COVERED, dtype=np.uint8)
    for level in sorted(prediction.levels, key=lambda grid: -spec_of(grid).volume_m3()):
        labels = resample_labels(level.labels, spec_of(level), OCC3D)
        np.copyto(merged, labels, where=labels != NOT_COVERED)
    return merged


def confusion(truth: Labels, predicted: Labels, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Confusion matrix (18,18), rows are labels, of the voxels where `mask` holds and both sides have a class."""
    counted = mask & (truth < CLASSES) & (predicted < CLASSES)
    pairs = truth[counted].astype(np.int64) * CLASSES + predicted[counted]
    return np.bincount(pairs, minlength=CLASSES * CLASSES).reshape(CLASSES, CLASSES)


class OccupancyEvaluator:
    """Accumulates confusion matrices sample by sample, so that no prediction has to be kept."""

    def __init__(self) -> None:
        self.samples = 0
        self._visible = np.zeros((CLASSES, CLASSES), dtype=np.int64)
        self._all = np.zeros((CLASSES, CLASSES), dtype=np.int64)
        self._levels: dict[GridSpec, NDArray[np.int64]] = {}

    def add(self, semantics: Labels, mask_camera: NDArray[np.bool_], prediction: OccupancyPrediction) -> None:
        """Count one sample: Occ3D labels (200,200,16), camera mask of the same shape, predicted levels.

        Raises:
            ModelError: a predicted label is no class.
        """
        for level in prediction.levels:
            if level.labels.size and level.labels.max() >= CLASSES:
                raise ModelError(f"occupancy prediction: label {level.labels.max()} is no class (0 to {CLASSES - 1})")
        merged = on_label_grid(prediction)
        self._visible += confusion(semantics, merged, mask_camera)
        self._all += confusion(semantics, merged, np.ones_like(mask_camera))
        for level in prediction.levels:
            spec = spec_of(level)
            truth = resample_labels(semantics, OCC3D, spec)
            visible = resample_labels(mask_camera.astype(np.uint8), OCC3D, spec) == 1
            counts = self._levels.setdefault(spec, np.zeros((CLASSES, CLASSES), dtype=np.int64))
            counts += confusion(truth, level.labels, visible)
        self.samples += 1

    def result(self) -> dict[str, Any]:
        """mIoU, mIoU_all_voxels, geometric_IoU, per_class, per_level, samples; None where a value is undefined."""
        summary = _scores(self._visible)
        levels = sorted(self._levels.items(), key=lambda item: -item[0].volume_m3())
        return {
            **summary,
            "mIoU_all_voxels": _scores(self._all)["mIoU"],
            "samples": self.samples,
            "per_level": [{"grid": _describe(spec), **_headline(_scores(counts))} for spec, counts in levels],
        }


def _scores(counts: NDArray[np.int64]) -> dict[str, Any]:
    true_positives = np.diag(counts)
    truth, predicted = counts.sum(axis=1), counts.sum(axis=0)
    union = truth + predicted - true_positives
    iou = [float(tp / u) if n else None for tp, u, n in zip(true_positives, union, truth, strict=True)]
    occurring = [value for i, value in enumerate(iou) if i != OCCUPANCY_FREE and value is not None]
    both = np.delete(np.delete(counts, OCCUPANCY_FREE, 0), OCCUPANCY_FREE, 1).sum()
    either = counts.sum() - counts[OCCUPANCY_FREE, OCCUPANCY_FREE]
    return {
        "mIoU": float(np.mean(occurring)) if occurring else None,
        "geometric_IoU": float(both / either) if either else None,
        "per_class": {
            name: {"IoU": iou[i], "ground_truth": int(truth[i]), "predictions": int(predicted[i])} for i, name in enumerate(OCCUPANCY_CLASSES)
        },
    }


def _headline(scores: dict[str, Any]) -> dict[str, Any]:
    return {"mIoU": scores["mIoU"], "geometric_IoU": scores["geometric_IoU"]}


def _describe(spec: GridSpec) -> dict[str, Any]:
    edges_m = [round(edge, 6) for edge in spec.voxel_m()]
    return {"shape": list(spec.shape), "ranges_m": [list(limits) for limits in spec.ranges_m], "voxel_m": edges_m}
