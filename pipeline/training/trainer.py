"""The training loop: plain PyTorch, from the data set to models/float.

    for each step: batch of B streams -> temporal state from the instance banks -> forward -> weighted losses -> AdamW -> averaged weights -> banks
    remember

A run is keyed by its parameters and the data's fingerprint; killed, it goes on from its last checkpoint and ends with the weights of an
uninterrupted run.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import Config, TrainConfig
from pipeline.dataset.images import ImageStore
from pipeline.dataset.index import Index
from pipeline.errors import ConfigError, ModelError
from pipeline.execution import prepare_worker
from pipeline.io import write_json, write_text
from pipeline.maps.store import MapStore
from pipeline.models.anchors import build_anchors
from pipeline.models.instance_bank import InstanceBank
from pipeline.models.multitask import Inputs, MultitaskModel, Outputs
from pipeline.models.weights import channels_last, save_model
from pipeline.paths import Paths
from pipeline.progress import track
from pipeline.taxonomy import OCCUPANCY_CLASSES
from pipeline.training.auxiliary import AuxiliaryLosses
from pipeline.training.balance import gradient_norms, update_weights
from pipeline.training.batches import Batch, BatchLoader
from pipeline.training.checkpoint import CheckpointFile, run_key
from pipeline.training.labels import UNSEEN, LabelStore, available_tasks
from pipeline.training.losses import MapLoss, OccupancyLoss, detection_loss
from pipeline.training.muon import Muon, is_matrix
from pipeline.training.prefetch import prefetch
from pipeline.training.priors import set_priors
from pipeline.training.ranks import ALONE, Ranks, run_ranks

# A short memory of squared gradients: the default 0.999 averages over more steps than a warm-up has.
ADAM_BETAS = (0.9, 0.99)
# Left to AdamW: tables that are looked up, not multiplied with.
NOT_FOR_MUON = re.compile(r"(prior|point_index)$")


@dataclass(frozen=True)
class TrainResult:
    """What the stage prints."""

    steps: int
    loss: float
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        left_out = f", without labels: {', '.join(self.left_out)}" if self.left_out else ""
        return f"{self.steps} steps, loss {self.loss:.3f}{left_out}"


def train(config: Config, paths: Paths) -> TrainResult:
    """Train the model on the training split and write models/float. Under torchrun this process is one of its ranks.

    Raises:
        ConfigError: the ranks cannot share the batch evenly.
        DataError: no usable training sample, or a damaged image or label.
        ModelError: a loss is not finite.
    """
    return run_ranks(_train_rank, config.train.processes, config, paths)


def _train_rank(ranks: Ranks, config: Config, paths: Paths) -> TrainResult:
    if config.train.batch_scenes % ranks.size:
        raise ConfigError(f"train.batch_scenes is {config.train.batch_scenes}: it must be a multiple of the number of processes, {ranks.size}")
    prepare_worker()
    torch.set_num_threads(config.train.threads)
    torch.manual_seed(config.train.seed)
    index = Index.open(paths.index_dir)
    labels = LabelStore(index, MapStore.open(paths.maps_dir) if paths.maps_dir.is_dir() else None)
    loader = BatchLoader(config, index, ImageStore(index, config.model.image_size, paths.image_cache_dir), labels, ranks)
    records = [loader.record(token) for token in index.tokens("train")]
    counts = available_tasks(labels, records, config.model.tasks)
    trainer = Trainer(config, loader, build_model(config, labels, records), counts, occupancy_weights(labels, records), ranks)
    checkpoint = CheckpointFile(paths.checkpoint_dir, run_key(config, index.fingerprint))
    trainer.run(checkpoint)
    if ranks.rank == 0:
        trainer.save(paths.float_dir)
        checkpoint.remove()
    return TrainResult(config.train.steps, trainer.rows[-1]["loss"], tuple(task for task, count in counts.items() if count == 0))


def build_model(config: Config, labels: LabelStore, records: list[Any]) -> MultitaskModel:
    """A new model with anchors from the labels of `records`."""
    known = [labels.get(record) for record in records]
    centers_m = np.concatenate([label.boxes.centers_m for label in known])
    low, high = np.array([config.model.view.x_range_m, config.model.view.y_range_m]).T
    centers_m = centers_m[((centers_m[:, :2] > low) & (centers_m[:, :2] < high)).all(axis=1)]
    lines = [line for label in known if label.map is not None for line in label.map.points_m]
    model = MultitaskModel(config.model, build_anchors(config.model, centers_m, lines, config.train.seed))
    set_priors(model, labels, records)
    return model


def occupancy_weights(labels: LabelStore, records: list[Any]) -> Tensor:
    """(18,) class weights: one over the fourth root of the frequency among seen voxels, at most 5 times the smallest; ones without labels.

    With the square root (and 20 times) the model saw objects where there are none: subtracting half of the logarithm of those weights from the
    logits of a trained model raised mIoU from 0.271 to 0.280.
    """
    counts = np.zeros(UNSEEN + 1)
    for record in records[:: max(1, len(records) // 64)]:
        occupancy = labels.get(record).occupancy
        if occupancy is not None:
            counts += np.bincount(occupancy.reshape(-1), minlength=UNSEEN + 1)
    counts = counts[: len(OCCUPANCY_CLASSES)]
    if counts.sum() == 0:
        return torch.ones(len(OCCUPANCY_CLASSES))
    weights = np.maximum(counts / counts.sum(), 1e-9) ** -0.25
    weights = np.minimum(weights / weights.min(), 5.0)
    return torch.from_numpy((weights / (weights * counts).sum() * counts.sum()).astype(np.float32))


def use_bfloat16(precision: str) -> bool:
    """Whether `train.precision` asks for bfloat16; "auto" does where the processor multiplies it in hardware."""
    processor = torch.cpu.get_capabilities()
    in_hardware = any(processor.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return precision == "bfloat16" or (precision == "auto" and in_hardware)


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Share of the peak rate. In each part (image steps, steps of the whole network): linear rise, then a cosine to 1 % of the peak."""
    first, steps = (0, config.image_steps) if step < config.image_steps else (config.image_steps, config.steps)
    warmup = max(1, round(config.warmup_fraction * steps))
    if step - first < warmup:
        return (step - first + 1) / warmup
    progress = (step - first - warmup) / max(1, steps - warmup)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizers(modules: Sequence[nn.Module], config: TrainConfig, ranks: Ranks) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for all other parameters; only matrices decay."""
    named = [(name, parameter) for module in modules for name, parameter in module.named_parameters()]
    matrices = [parameter for name, parameter in named if is_matrix(parameter) and not NOT_FOR_MUON.search(name)]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for _, parameter in named if id(parameter) not in chosen]
    muon = Muon(matrices, lr=config.matrix_learning_rate, weight_decay=config.weight_decay, ranks=ranks)
    return muon, torch.optim.AdamW(others, lr=config.learning_rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True)


class Trainer:
    """State of a run on one rank: network, branches, optimizer, averaged weights, task weights (alike on all ranks), and its instance banks."""

    def __init__(
        self,
        config: Config,
        loader: BatchLoader,
        model: MultitaskModel,
        label_counts: Mapping[str, int],
        class_weights: Tensor,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config, self.loader, self.label_counts, self.ranks = config, loader, dict(label_counts), ranks
        self.model = channels_last(model)
        self.auxiliary = channels_last(AuxiliaryLosses(config.model, config.train.auxiliary))
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(config.train.ema_decay), use_buffers=False
        )
        self.parameters = [*self.model.parameters(), *self.auxiliary.parameters()]
        self.statistics = [buffer for name, buffer in self.model.named_buffers() if name.endswith(("running_mean", "running_var"))]
        self.optimizers = make_optimizers([self.model, self.auxiliary], config.train, ranks)
        self.tasks = tuple(task for task in config.model.tasks if label_counts[task] > 0)
        self.task_weights: dict[str, float] = {task: config.train.balance.initial.get(task, 1.0) for task in self.tasks}
        self.map_loss, self.occupancy_loss = MapLoss(config.model, config.train.one_to_one_last), OccupancyLoss(class_weights)
        anchors = self.model.box_anchors.numpy()
        slots = config.train.batch_scenes // ranks.size
        self.banks = [InstanceBank(config.model.detection, anchors, config.model.neck.channels) for _ in range(slots)]
        self.bfloat16 = use_bfloat16(config.train.precision)
        self.rows: list[dict[str, float]] = []
        self.step = 0

    def run(self, checkpoint: CheckpointFile) -> None:
        """Train from the checkpoint, if there is one, to the last step."""
        checkpoint.load_into(self)
        steps = self.config.train.image_steps + self.config.train.steps
        with closing(prefetch(self.loader.steps(self.step))) as ready:
            batches = zip(range(self.step, steps), ready, strict=False)
            for step, batch in track(batches, "train", total=steps - self.step) if self.ranks.rank == 0 else batches:
                losses = self.train_step(batch)
                self.step = step + 1
                if self.step % self.config.train.log_every == 0 or self.step == steps:
                    rate = self.config.train.learning_rate * learning_rate_factor(step, self.config.train)
                    self.rows.append({"step": self.step, "learning_rate": rate, **mean_values(self.ranks.gather(losses))})
                if self.step % self.config.train.checkpoint_every == 0 and self.step < steps:
                    checkpoint.save(self)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One optimizer step; returns the losses by name."""
        self.model.train()
        if self.step < self.config.train.image_steps:
            return self._image_step(batch)
        inputs = self.inputs(batch)
        outputs = self._forward(inputs)
        task_losses = self.task_losses(outputs, inputs, batch)
        extra = self.auxiliary(outputs, batch.targets)
        self._balance(task_losses, outputs)
        values = self._finish(extra, task_losses, batch)
        self._remember(batch, outputs)
        return values

    def _finish(self, extra: Mapping[str, Tensor], task_losses: Mapping[str, Tensor], batch: Batch) -> dict[str, float]:
        """Optimize the sum of the losses; returns all of them by name, the total as "loss"."""
        total = torch.stack([*(self.task_weights[task] * loss for task, loss in task_losses.items()), *extra.values()]).sum()
        losses = {name: float(loss.detach()) for name, loss in {"loss": total, **task_losses, **extra}.items()}
        if not math.isfinite(losses["loss"]):
            names = ", ".join(f"{name} {value:.3g}" for name, value in losses.items())
            raise ModelError(f"loss is not finite at step {self.step} ({names}); samples {', '.join(batch.tokens)}")
        self._optimize(total)
        return {**losses, **{f"weight_{task}": weight for task, weight in self.task_weights.items()}}

    def _forward(self, inputs: Inputs) -> Outputs:
        """What convolves runs in the reduced precision; heads and losses, which compute with metres and pixels, in float32."""
        features, depth_logits = self._image_part(inputs.images)
        with self._reduced_precision():
            outputs = self.model.lift(features, depth_logits, inputs)
        outputs.bev = {task: bev.float() for task, bev in outputs.bev.items()}
        return self.model.heads(outputs, inputs)

    def _image_part(self, images: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        with self._reduced_precision():
            features, depth_logits = self.model.image_part(images)
        return {stride: feature.float() for stride, feature in features.items()}, depth_logits.float()

    def _reduced_precision(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16)

    def _image_step(self, batch: Batch) -> dict[str, float]:
        features, depth_logits = self._image_part(batch.images)
        return self._finish(self.auxiliary.image_losses(features, depth_logits, batch.targets), {}, batch)

    def inputs(self, batch: Batch) -> Inputs:
        """Network inputs, with the temporal state of each stream."""
        states = []
        for bank, sample in zip(self.banks, batch.samples, strict=True):
            if sample.starts_scene:
                bank.reset()
            states.append(bank.inputs(sample.ego2global, sample.timestamp_us))
        anchors = torch.from_numpy(np.stack([state[0] for state in states]))
        features = torch.from_numpy(np.stack([state[1] for state in states]))
        return Inputs(batch.images, batch.ego2img, batch.point_map_feature, batch.point_map_depth, anchors, features)

    def task_losses(self, outputs: Outputs, inputs: Inputs, batch: Batch) -> dict[str, Tensor]:
        """Unweighted loss of each task that has labels."""
        losses: dict[str, Tensor] = {}
        if "detection" in self.tasks:
            losses["detection"] = detection_loss(outputs, inputs.det_anchors, batch.targets, self.config.train.one_to_one_last)
        if "map" in self.tasks and self.model.map is not None:
            losses["map"] = self.map_loss(outputs, self.model.map.anchors, batch.targets)
        if "occupancy" in self.tasks and outputs.occupancy_logits is not None:
            losses["occupancy"] = self.occupancy_loss(outputs.occupancy_logits, batch.targets)
        return losses

    def _balance(self, losses: dict[str, Tensor], outputs: Outputs) -> None:
        balance = self.config.train.balance
        if balance.method == "gradient_norm" and len(losses) > 1 and self.step % balance.every == 0:
            norms = mean_values(self.ranks.gather(gradient_norms(losses, list(outputs.image_features.values()))))
            self.task_weights = update_weights(self.task_weights, norms, balance)

    def _optimize(self, loss: Tensor) -> None:
        factor, train = learning_rate_factor(self.step, self.config.train), self.config.train
        for optimizer, peak in zip(self.optimizers, (train.matrix_learning_rate, train.learning_rate), strict=True):
            optimizer.param_groups[0]["lr"] = factor * peak
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.ranks.average_gradients(self.parameters, self.statistics)
        nn.utils.clip_grad_norm_(self.parameters, train.clip_norm, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.update_parameters(self.model)

    def _remember(self, batch: Batch, outputs: Outputs) -> None:
        if outputs.det_features is None:
            return
        scores = outputs.det_logits[-1].detach().sigmoid().amax(dim=-1).numpy()
        boxes, features = outputs.det_boxes[-1].detach().numpy(), outputs.det_features.detach().numpy()
        for slot, bank in enumerate(self.banks[: len(batch.samples)]):
            bank.update(boxes[slot], scores[slot], features[slot])

    def averaged_state(self) -> dict[str, Tensor]:
        """Averaged parameters with the latest BatchNorm statistics (which are running averages already)."""
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for name, parameter in self.average.module.named_parameters():
            state[name] = parameter.detach().clone(memory_format=torch.contiguous_format)
        return {name: value.contiguous() for name, value in state.items()}

    def save(self, directory: Path) -> None:
        """Write model.pt, metrics.json and curves.csv."""
        left_out = [task for task in self.config.model.tasks if task not in self.tasks]
        metrics = {
            "steps": self.step,
            "final": {name: round(value, 6) for name, value in self.rows[-1].items()},
            "samples_with_labels": self.label_counts,
            "tasks_without_labels": left_out,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
        }
        save_model(directory / "model.pt", self.config.model, self.averaged_state(), self.tasks)
        write_text(directory / "curves.csv", curves_csv(self.rows))
        write_json(directory / "metrics.json", metrics)


def mean_values(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each name over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


def curves_csv(rows: list[dict[str, float]]) -> str:
    """One row a logged step; columns in order of first appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"{row.get(name, float('nan')):.6g}" for name in columns])
    return buffer.getvalue()
