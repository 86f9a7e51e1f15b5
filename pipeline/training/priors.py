"""What is known before an image is looked at, counted over the training labels. A network that starts there learns from its first step what the
images add.

Counts are smoothed by one observation spread over all outcomes, and come from at most `SAMPLES` samples, evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.config import ModelConfig
from pipeline.dataset.images import network_ego2img
from pipeline.dataset.records import SampleRecord
from pipeline.models.multitask import MultitaskModel
from pipeline.taxonomy import CAMERAS, OCCUPANCY_CLASSES
from pipeline.training.augmentation import Augmentation
from pipeline.training.image_targets import feature_shape, lidar_targets
from pipeline.training.labels import UNSEEN, LabelStore
from pipeline.training.targets import occupancy_target

Floats = NDArray[np.float64]
SAMPLES = 100
CLASSES = len(OCCUPANCY_CLASSES)


def set_priors(model: MultitaskModel, labels: LabelStore, records: Sequence[SampleRecord]) -> None:
    """Start the depth distribution and the occupancy head at the frequencies of the labels; heads whose labels are missing stay even."""
    chosen = records[:: -(-len(records) // SAMPLES)]
    with torch.no_grad():
        model.depth_head.prior.copy_(log_frequency(depth_counts(model.config, labels, chosen), axis=1).unsqueeze(-1))
        if model.occupancy is None:
            return
        counts = occupancy_counts(model.config, labels, chosen)
        for head, level in zip(model.occupancy.logits_layers(), counts, strict=True):
            assert head.bias is not None
            head.bias.copy_(log_frequency(level, axis=1).reshape(-1))


def log_frequency(counts: Floats, axis: int) -> Tensor:
    """Logarithm of the smoothed frequencies along an axis."""
    smoothed = counts + 1.0 / counts.shape[axis]
    return torch.from_numpy(np.log(smoothed / smoothed.sum(axis=axis, keepdims=True)).astype(np.float32))


def depth_counts(config: ModelConfig, labels: LabelStore, records: Sequence[SampleRecord]) -> Floats:
    """(6, D, Hd): how often the lidar falls into each depth bin, by camera and row."""
    bins, rows = config.view.depth_bins, feature_shape(config, config.view.depth_stride)[0]
    counts = np.zeros((len(CAMERAS), rows, bins))
    for record in records:
        label = labels.get(record)
        if label.lidar_m is None or label.lidar_class is None:
            continue
        found, _ = lidar_targets(label.lidar_m, label.lidar_class, network_ego2img(record, config.image_size).astype(np.float32), config)
        camera, row, column = np.nonzero(found >= 0)
        np.add.at(counts, (camera, row, np.round(found[camera, row, column]).astype(np.int64)), 1.0)
    return np.moveaxis(counts, 2, 1)


def occupancy_counts(config: ModelConfig, labels: LabelStore, records: Sequence[SampleRecord]) -> list[Floats]:
    """For each level (z cells, 18): how often a seen voxel of that height has each class."""
    counts = [np.zeros((level.cells[2], CLASSES)) for level in config.occupancy.levels]
    for record in records:
        semantics = labels.get(record).occupancy
        if semantics is None:
            continue
        target, start = occupancy_target(semantics, Augmentation(), config), 0
        for level, count in zip(config.occupancy.levels, counts, strict=True):
            x, y, z = level.cells
            voxels = target[start : start + x * y * z].reshape(-1, z)
            column, height = np.nonzero(voxels != UNSEEN)
            np.add.at(count, (height, voxels[column, height]), 1.0)
            start += x * y * z
    return counts
