"""The loop, on random samples of a tiny network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import Config, merge
from pipeline.errors import ModelError
from pipeline.models.anchors import build_anchors
from pipeline.models.export import example_rig
from pipeline.models.multitask import MultitaskModel
from pipeline.models.point_maps import point_maps
from pipeline.training.augmentation import Augmentation
from pipeline.training.batches import Batch, Sample, collate
from pipeline.training.checkpoint import CheckpointFile
from pipeline.training.image_targets import make_image_targets
from pipeline.training.labels import BoxLabels, Labels, MapLines
from pipeline.training.ranks import ALONE, Ranks
from pipeline.training.targets import make_targets
from pipeline.training.trainer import Trainer, learning_rate_factor
from tests.models.tiny import TINY

ALL = {"detection": 1, "map": 1, "occupancy": 1}


def make_config(**train: object) -> Config:
    values = {
        "model": TINY,
        "train": {
            "image_steps": 0,
            "steps": 6,
            "batch_scenes": 2,
            "log_every": 1,
            "checkpoint_every": 3,
            "processes": 1,
            "threads": 2,
            "balance": {"every": 2},
        },
    }
    return Config.model_validate(merge(values, {"train": train}))


def random_sample(config: Config, seed: int, starts_scene: bool, empty: bool = False) -> Sample:
    random = np.random.default_rng(seed)
    count = 0 if empty else 5
    boxes = BoxLabels(
        random.uniform(-10, 10, (count, 3)).astype(np.float32), np.ones((count, 3), np.float32), np.zeros(count, np.float32),
        np.full((count, 2), np.nan, np.float32), random.integers(0, 10, count),
    )  # fmt: skip
    lines = MapLines(
        [] if empty else [np.float32([[-9, 1], [9, 2]]), np.float32([[0, 0], [3, 0], [3, 3], [0, 0]])],
        np.arange(0 if empty else 2),
        np.array([] if empty else [False, True], dtype=bool),
    )
    labels = Labels(
        boxes,
        lines,
        random.integers(0, 18, (200, 200, 16)).astype(np.uint8),
        random.uniform(-15, 15, (500, 3)).astype(np.float32),
        np.zeros(500, np.uint8),
    )
    rig = example_rig(config.model)
    maps = point_maps(rig, config.model.image_size, config.model.view)
    images = random.integers(0, 256, (6, *config.model.image_size, 3)).astype(np.uint8)
    targets = make_targets(labels, Augmentation(), make_image_targets(labels, rig, config.model), config.model, random)
    return Sample(f"sample-{seed}", starts_scene, images, rig, *maps, np.eye(4), seed * 500_000, targets)


class RandomLoader:
    """Batches that depend on the step alone, as the real loader's do."""

    def __init__(self, config: Config, empty: bool = False) -> None:
        self.config, self.empty = config, empty

    def steps(self, first: int = 0) -> Iterator[Batch]:
        step = first
        while True:
            slots = range(self.config.train.batch_scenes)
            yield collate([random_sample(self.config, 10 * step + slot, step % 3 == 0, self.empty) for slot in slots])
            step += 1


def new_trainer(config: Config, counts: dict[str, int] | None = None, empty: bool = False, ranks: Ranks = ALONE) -> Trainer:
    torch.manual_seed(0)
    model = MultitaskModel(config.model, build_anchors(config.model, np.zeros((0, 3), np.float32), [], 0))
    return Trainer(config, RandomLoader(config, empty), model, counts or ALL, torch.ones(18), ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_all_parameters_get_finite_gradients_and_the_loss_falls(precision: str) -> None:
    config = make_config(learning_rate=3e-3, precision=precision)
    trainer = new_trainer(config)
    batch = next(trainer.loader.steps())
    first = trainer.train_step(batch)["loss"]
    missing = [name for name, parameter in trainer.model.named_parameters() if parameter.grad is None]
    assert missing == []
    assert all(bool(parameter.grad.isfinite().all()) for parameter in trainer.model.parameters() if parameter.grad is not None)
    for trainer.step in range(1, 15):
        last = trainer.train_step(batch)["loss"]
    assert last < first


def test_bfloat16_changes_how_it_computes_but_not_what_it_learns_from() -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        trainer = new_trainer(make_config(precision=precision))
        losses[precision] = trainer.train_step(next(trainer.loader.steps()))
        assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path, precision: str) -> None:
    config = make_config(precision=precision)
    whole = new_trainer(config)
    whole.run(CheckpointFile(tmp_path, "whole"))
    killed = new_trainer(config)
    file = CheckpointFile(tmp_path, "killed")
    for step, batch in zip(range(4), killed.loader.steps(), strict=False):
        killed.train_step(batch)
        killed.step = step + 1
        killed.rows.append({"step": killed.step})
        if killed.step == 3:
            file.save(killed)
    resumed = new_trainer(config)
    resumed.run(file)
    assert resumed.step == whole.step == 6
    for (name, expected), found in zip(whole.averaged_state().items(), resumed.averaged_state().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)


def test_a_damaged_checkpoint_starts_over(tmp_path: Path) -> None:
    config = make_config(steps=1)
    (tmp_path / "key.pt").write_bytes(b"cut")
    trainer = new_trainer(config)
    trainer.run(CheckpointFile(tmp_path, "key"))
    assert trainer.step == 1


def test_a_loss_that_is_not_finite_stops_with_the_samples() -> None:
    trainer = new_trainer(make_config())
    batch = next(trainer.loader.steps())
    broken = replace(batch, images=batch.images * float("nan"))
    with pytest.raises(ModelError, match="sample-0, sample-1"):
        trainer.train_step(broken)


def test_samples_without_boxes_and_lines_train() -> None:
    trainer = new_trainer(make_config(), empty=True)
    values = trainer.train_step(next(trainer.loader.steps()))
    assert all(np.isfinite(value) for value in values.values())


def test_a_task_without_labels_is_left_out_and_reported(tmp_path: Path) -> None:
    config = make_config(steps=1)
    trainer = new_trainer(config, {**ALL, "occupancy": 0})
    trainer.run(CheckpointFile(tmp_path / "checkpoints", "key"))
    trainer.save(tmp_path)
    assert trainer.tasks == ("detection", "map")
    assert '"tasks_without_labels": [\n    "occupancy"\n  ]' in (tmp_path / "metrics.json").read_text()
    assert (tmp_path / "curves.csv").read_text().startswith("step,learning_rate,loss,detection,map")


def test_learning_rate_rises_then_falls_in_both_parts() -> None:
    config = make_config(image_steps=50, steps=100, warmup_fraction=0.1).train
    factors = [learning_rate_factor(step, config) for step in range(150)]
    assert factors[0] == pytest.approx(0.2)
    assert factors[4] == factors[59] == pytest.approx(1.0)
    assert max(factors) == pytest.approx(1.0)
    assert factors[49] < 0.02 > factors[149]


def test_the_image_part_trains_backbone_and_depth_only() -> None:
    trainer = new_trainer(make_config(image_steps=1))
    values = trainer.train_step(next(trainer.loader.steps()))
    assert "detection" not in values
    trained = {name.split(".")[0] for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}
    assert trained == {"backbone", "neck", "depth_head"}
