"""Training batches: B streams of samples in scene order, augmented, with their targets.

Everything random is drawn from (seed, step, slot) or, for the augmentation of a pass over a scene, from (seed, step at which the pass began, slot).
A run that is resumed at step s
therefore sees what an uninterrupted run sees, without any generator state to be saved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.config import Config
from pipeline.dataset.images import ImageStore, network_ego2img
from pipeline.dataset.index import Index
from pipeline.dataset.records import SampleRecord
from pipeline.dataset.stream import StreamItem, epoch_batches, segments
from pipeline.models.point_maps import point_maps
from pipeline.models.preprocess import normalise_batch
from pipeline.training.augmentation import Augmentation, augment_ego2img, augment_images, augment_labels, draw, photometric
from pipeline.training.image_targets import ImageTargets, make_image_targets
from pipeline.training.labels import LabelStore, keep_latest
from pipeline.training.ranks import ALONE, Ranks
from pipeline.training.targets import Targets, make_targets


@dataclass(frozen=True)
class Sample:
    """One slot of a batch."""

    token: str
    starts_scene: bool
    images: NDArray[np.uint8]  # (6, H, W, 3) RGB
    ego2img: NDArray[np.float32]  # (6, 4, 4)
    point_map_feature: NDArray[np.float32]
    point_map_depth: NDArray[np.float32]
    ego2global: NDArray[np.float64]  # (4, 4) augmented BEV frame to global
    timestamp_us: int
    targets: Targets


@dataclass(frozen=True)
class Batch:
    """B samples as tensors; the temporal state is added by the trainer, because it depends on the step before."""

    samples: list[Sample]
    images: Tensor  # (B * 6, 3, H, W)
    ego2img: Tensor  # (B, 6, 4, 4)
    point_map_feature: Tensor  # (B, K, Y, X, 2)
    point_map_depth: Tensor

    @property
    def tokens(self) -> list[str]:
        """Sample tokens."""
        return [sample.token for sample in self.samples]

    @property
    def targets(self) -> list[Targets]:
        """Targets of the samples."""
        return [sample.targets for sample in self.samples]


class BatchLoader:
    """Batches of the training split, step by step; each rank has its own slots of a batch."""

    def __init__(self, config: Config, index: Index, images: ImageStore, labels: LabelStore, ranks: Ranks = ALONE) -> None:
        self._config, self._index, self._images, self._labels = config, index, images, labels
        self._ranks, self._slots = ranks, config.train.batch_scenes // ranks.size
        self._runs = segments(index, "train")
        self._augmentations = [Augmentation()] * self._slots
        self._records: dict[str, SampleRecord] = {}
        self._image_targets: OrderedDict[str, ImageTargets] = OrderedDict()

    def steps(self, first: int = 0) -> Iterator[Batch]:
        """Batches from step `first` on, without end."""
        for step, items in enumerate(self._items()):
            self._draw_augmentations(step, items)
            if step >= first:
                yield collate([self._sample(item, step, slot) for slot, item in enumerate(items)])

    def record(self, token: str) -> SampleRecord:
        """The record of a sample, read once."""
        if token not in self._records:
            self._records[token] = self._index.sample(token)
        return self._records[token]

    def _items(self) -> Iterator[list[StreamItem]]:
        train = self._config.train
        epoch = 0
        while True:
            yield from epoch_batches(self._runs, train.seed, epoch, self._ranks.rank, self._ranks.size, self._slots)
            epoch += 1

    def _draw_augmentations(self, step: int, items: list[StreamItem]) -> None:
        for slot, item in enumerate(items):
            if not item.previous:
                random = self._random(1, step, slot)
                self._augmentations[slot] = draw(self._config.train.augmentation, random)

    def _sample(self, item: StreamItem, step: int, slot: int) -> Sample:
        image_only = step < self._config.train.image_steps
        return self.build(self.record(item.token), self._augmentations[slot], not item.previous, self._random(2, step, slot), image_only)

    def _random(self, purpose: int, step: int, slot: int) -> np.random.Generator:
        return np.random.default_rng([self._config.train.seed, purpose, step, self._ranks.rank * self._slots + slot])

    def image_targets(self, record: SampleRecord) -> ImageTargets:
        """Targets in the images as they were taken; most expensive of all targets, and the same in every pass, so the latest are kept."""
        model = self._config.model

        def make() -> ImageTargets:
            ego2img = network_ego2img(record, model.image_size).astype(np.float32)
            return make_image_targets(self._labels.get(record), ego2img, model)

        return keep_latest(self._image_targets, record.token, make)

    def build(
        self, record: SampleRecord, augmentation: Augmentation, starts_scene: bool, random: np.random.Generator, image_only: bool = False
    ) -> Sample:
        """One augmented sample; `image_only` leaves out what lies in the BEV grid."""
        model, topology = self._config.model, self._config.maps.topology
        size = model.image_size
        pixels = photometric(self._images.images(record), self._config.train.augmentation.photometric, random)
        ego2img = augment_ego2img(network_ego2img(record, size), augmentation, size[1]).astype(np.float32)
        no_map = np.zeros((0, 2), dtype=np.float32)
        map_feature, map_depth = (no_map, no_map) if image_only else point_maps(ego2img, size, model.view)
        image = self.image_targets(record)
        labels = augment_labels(self._labels.get(record), augmentation, topology.x_range_m, topology.y_range_m)
        return Sample(
            token=record.token,
            starts_scene=starts_scene,
            images=augment_images(pixels, augmentation),
            ego2img=ego2img,
            point_map_feature=map_feature,
            point_map_depth=map_depth,
            ego2global=record.ego2global @ np.linalg.inv(augmentation.matrix),
            timestamp_us=record.timestamp_us,
            targets=make_targets(labels, augmentation, image.mirrored() if augmentation.flip else image, model, random, image_only),
        )


def collate(samples: list[Sample]) -> Batch:
    """Stack samples and normalise their images."""
    return Batch(
        samples,
        normalise_batch(torch.from_numpy(np.concatenate([sample.images for sample in samples]))),
        torch.from_numpy(np.stack([sample.ego2img for sample in samples])),
        torch.from_numpy(np.stack([sample.point_map_feature for sample in samples])),
        torch.from_numpy(np.stack([sample.point_map_depth for sample in samples])),
    )
