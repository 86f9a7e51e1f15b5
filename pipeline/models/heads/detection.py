"""Sparse detection head, after Sparse4D v2 (Lin et al., arXiv 2305.14018): anchors sample features, talk to each other, and are refined layer by
layer.

A box state is 11 numbers: x, y, z (m), log width, log length, log height, sin yaw, cos yaw, vx, vy (m/s) and vz (m/s), all in the BEV frame. The
head takes the state of all N instances (anchors and features) as inputs and returns the refined one; what becomes of it before the next frame is
the host's business (`instance_bank`).

Where the head samples the BEV feature, it also reads a dense field there: for each BEV cell the class scores, the way to the nearest box and its
shape. An instance takes the field's answer at its place and corrects it with what it has gathered itself. The field learns from every cell, so it
is right long before the few instances that own a label would be.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.models.heads.decoder import FeatureSampler, FeedForward, InstanceAttention, LinearNorm, PointMixer, prior_bias
from pipeline.models.henet import ConvNormAct, start_at
from pipeline.taxonomy import DETECTION_CLASSES

BOX_STATE = 11
# Brings each number of the state to about one: tens of metres, decades of size, metres per second.
STATE_SCALE = (1 / 32, 1 / 32, 0.25, 0.5, 0.5, 0.5, 1.0, 1.0, 0.1, 0.1, 0.1)
SMALLEST_REACH_M = 1.0
SHAPE_NUMBERS = 6  # z, log w, log l, log h, sin yaw, cos yaw
FIELD = len(DETECTION_CLASSES) + 2 + SHAPE_NUMBERS + 2
# Unit of a correction: metres for the position. Anchors are several metres apart, and a layer's outputs start near one.
POSITION_STEP_M = 4.0
# Unit of the field's velocity, m/s.
SPEED_STEP_MPS = 4.0


class BoxEncoder(nn.Module):
    """Box state to an embedding: position, size, heading and velocity are encoded apart and added."""

    state_scale: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("state_scale", torch.tensor(STATE_SCALE), persistent=False)
        self.position, self.size = FeedForward(3, channels), FeedForward(3, channels)
        self.heading, self.velocity = FeedForward(2, channels), FeedForward(3, channels)

    def forward(self, boxes: Tensor) -> Tensor:
        """(B, N, 11) -> (B, N, C)."""
        state = (boxes * self.state_scale).clamp(-4.0, 4.0)
        position, size, heading, velocity = state.split((3, 3, 2, 3), dim=-1)
        return self.position(position) + self.size(size) + self.heading(heading) + self.velocity(velocity)


def key_point_pattern(points: int) -> Tensor:
    """(P, 3) first offsets in units of the box (forward, left, up): the centre, then alternately near and far around it, low on the box."""
    number = torch.arange(points, dtype=torch.float32)
    ring = number * (2 * torch.pi / max(points - 1, 1))
    radius = torch.where(number % 2 == 1, 0.5, 1.0)
    pattern = torch.stack([radius * ring.cos(), radius * ring.sin(), torch.full((points,), -0.3)], dim=-1)
    pattern[0] = 0.0
    return pattern


class KeyPoints(nn.Module):
    """Points of a box, by a linear offset from the instance feature, scaled by the box and turned with it."""

    def __init__(self, channels: int, points: int) -> None:
        super().__init__()
        self.points = points
        self.offset = nn.Linear(channels, points * 3)
        nn.init.zeros_(self.offset.weight)
        self.offset.bias.data.copy_(key_point_pattern(points).reshape(-1))

    def forward(self, instance: Tensor, boxes: Tensor) -> Tensor:
        """(B, N, C), (B, N, 11) -> (B, N, P, 3) in metres."""
        batch, instances, _ = boxes.shape
        offset = self.offset(instance).clamp(-3.0, 3.0).reshape(batch, instances, self.points, 3)
        size_m = boxes[..., 3:6].clamp(-2.0, 3.0).exp().clamp(min=SMALLEST_REACH_M).unsqueeze(2)
        forward, left, up = offset[..., 0] * size_m[..., 1], offset[..., 1] * size_m[..., 0], offset[..., 2] * size_m[..., 2]
        sin, cos = boxes[..., 6:7].clamp(-1.0, 1.0), boxes[..., 7:8].clamp(-1.0, 1.0)
        turned = torch.stack([forward * cos - left * sin, forward * sin + left * cos, up], dim=-1)
        return boxes[..., :3].unsqueeze(2) + turned


class BoxField(nn.Module):
    """BEV feature to a dense field of FIELD channels: class logits (10), shift to the nearest box (2, in POSITION_STEP_M), its z, log size, sin and
    cos (6).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden = ConvNormAct(channels, channels, kernel=1)
        self.out = nn.Conv2d(channels, FIELD, 1)
        start_at(self.out)
        self.out.bias.data[: len(DETECTION_CLASSES)] = prior_bias(0.02)  # type: ignore[union-attr]

    def forward(self, bev: Tensor) -> Tensor:
        """(B, C, Y, X) -> (B, FIELD, Y, X)."""
        return self.out(self.hidden(bev))


class DetectionLayer(nn.Module):
    """One round: attention between instances, sampling, feed-forward, then class scores and a refined box."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        head, channels = config.detection, config.neck.channels
        self.attention = InstanceAttention(channels)
        self.norm_attention = nn.LayerNorm(channels)
        self.key_points = KeyPoints(channels, head.key_points)
        self.sampler = FeatureSampler(config)
        self.from_cameras = PointMixer(channels, head.key_points, head.groups)
        self.from_bev = PointMixer(channels, head.key_points, head.groups, config.view.channels) if head.sample_bev else None
        self.merge = nn.Linear(channels * (2 if head.sample_bev else 1), channels)
        self.norm_sample = nn.LayerNorm(channels)
        self.feed_forward = FeedForward(channels, channels)
        self.norm_out = nn.LayerNorm(channels)
        self.classify = nn.Linear(channels, len(DETECTION_CLASSES))
        nn.init.constant_(self.classify.bias, prior_bias(0.02))
        self.refine = Refinement(channels, head.velocity_refinement)

    def forward(
        self, instance: Tensor, boxes: Tensor, embedding: Tensor, feature: Tensor, bev: Tensor, ego2img: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Instances (B, N, C), boxes (B, N, 11) -> instances, class logits (B, N, 10), boxes, both without the field's part."""
        instance = self.norm_attention(instance + self.attention(instance, embedding))
        query = instance + embedding
        points_m = self.key_points(query, boxes)
        found = self.from_cameras(self.sampler.cameras(points_m, feature, ego2img), query)
        if self.from_bev is not None:
            found_bev = self.from_bev(self.sampler.bird_eye(points_m, bev), query)
            found = torch.cat([found, found_bev], dim=-1)
        instance = self.norm_sample(instance + self.merge(found))
        instance = self.norm_out(instance + self.feed_forward(instance))
        return instance, self.classify(instance), self.refine(instance + embedding, boxes)


class Refinement(nn.Module):
    """Adds a correction to the box state; velocity has its own block, which can be left out."""

    def __init__(self, channels: int, velocity: bool) -> None:
        super().__init__()
        self.box = correction(channels, BOX_STATE - 3, hidden=2 * channels)
        self.velocity = correction(channels, 3, hidden=channels) if velocity else None

    def forward(self, instance: Tensor, boxes: Tensor) -> Tensor:
        """(B, N, C), (B, N, 11) -> (B, N, 11)."""
        shift, change = self.box(instance).split((2, BOX_STATE - 5), dim=-1)
        state = boxes[..., : BOX_STATE - 3] + torch.cat([shift * POSITION_STEP_M, change], dim=-1)
        velocity = boxes[..., BOX_STATE - 3 :]
        if self.velocity is not None:
            velocity = velocity + self.velocity(instance)
        return torch.cat([state, velocity], dim=-1)


def correction(channels: int, outputs: int, hidden: int) -> nn.Sequential:
    """Features to a correction, none at first."""
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(LinearNorm(channels, hidden), nn.ReLU(), last)


class DetectionHead(nn.Module):
    """All layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encode = BoxEncoder(config.neck.channels)
        self.field = BoxField(config.view.channels) if config.detection.sample_bev else None
        self.layers = nn.ModuleList(DetectionLayer(config) for _ in range(config.detection.layers))
        self.sampler = FeatureSampler(config)
        # Velocity gained by a remembered instance for each metre that it is found away from where its old velocity took it, 1/s.
        self.catch_up = nn.Parameter(torch.full((config.detection.layers,), 1.0))

    def forward(
        self, anchors: Tensor, features: Tensor, feature: Tensor, bev: Tensor, ego2img: Tensor
    ) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]:
        """Refine the instances.

        Args:
            anchors: (B, N, 11) box states.
            features: (B, N, C) instance features, zero for fixed anchors.
            feature: (B * 6, C, Hf, Wf) image features.
            bev: (B, Cb, Y, X).
            ego2img: (B, 6, 4, 4), pixels of the network input.

        Returns:
            Class logits (B, N, 10) and boxes (B, N, 11) of every layer, the last instance features (B, N, C), and the field (B, FIELD, Y, X) or None.
        """
        field = None if self.field is None else self.field(bev)
        logits, boxes = [], [anchors]
        instance = features
        remembered = (features * features).sum(dim=-1, keepdim=True).clamp(max=1.0)
        for number, layer in enumerate(self.layers):
            # Each layer learns its own correction; gradients through the previous layer's boxes would make a chain of them unstable.
            reference = boxes[-1].detach()
            instance, scores, refined = layer(instance, reference, self.encode(reference), feature, bev, ego2img)
            if field is not None:
                new = 1 - remembered if number == 0 else torch.zeros_like(remembered)
                scores, refined = add_field(scores, refined, self.sampler.bird_eye(reference[..., None, :3], field), new)
            logits.append(scores)
            boxes.append(catch_up(refined, reference, remembered * self.catch_up[number]))
        return logits, boxes[1:], instance, field


def add_field(scores: Tensor, boxes: Tensor, sampled: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Add the field where the instances stand, (B, FIELD, N, 1), to class logits (B, N, 10) and boxes (B, N, 11).

    Shape and velocity are added where `new` (B, N, 1) is one: later layers and remembered instances start from known ones.
    """
    classes, shift, shape, speed = sampled.squeeze(-1).transpose(1, 2).split((scores.shape[-1], 2, SHAPE_NUMBERS, 2), dim=-1)
    position, form, velocity, vertical = boxes.split((2, SHAPE_NUMBERS, 2, 1), dim=-1)
    position = position + shift * POSITION_STEP_M
    return scores + classes, torch.cat([position, form + shape * new, velocity + speed * (new * SPEED_STEP_MPS), vertical], dim=-1)


def catch_up(boxes: Tensor, reference: Tensor, gain: Tensor) -> Tensor:
    """Add to the velocity the shift from `reference` times `gain` (B, N, 1), 1/s; boxes (B, N, 11)."""
    shift_m = (boxes[..., :2] - reference[..., :2]).detach()
    state, velocity, vertical = boxes.split((BOX_STATE - 3, 2, 1), dim=-1)
    return torch.cat([state, velocity + shift_m * gain, vertical], dim=-1)
