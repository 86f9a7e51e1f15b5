"""Sparse map head: polyline anchors that feel along themselves for the line and pull their spline onto it.

The queries and outputs follow MapTR (Liao et al., ICLR 2023); an element is a class and 20 numbers: six control points x, y, z (m, BEV frame) of a
clamped B-spline and two attributes, the logit of "closed" and the logit of the localisation quality. Each of the points along the curve samples the
features where it stands and proposes its own shift; a constant least-squares matrix turns the shifts of the points into shifts of the control points,
so that what is learned is local and the same everywhere.

Where the head samples the BEV feature, it also reads a dense field there, as the detection head does: for each BEV cell and class whether an element
passes, and the way to the nearest one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.models import bspline
from pipeline.models.heads.decoder import POINT_SCALE_M, FeatureSampler, FeedForward, InstanceAttention, PointMixer, prior_bias
from pipeline.models.henet import ConvNormAct, start_at
from pipeline.taxonomy import MAP_CLASSES

FIELD = 3 * len(MAP_CLASSES)
CONTROL_NUMBERS = bspline.CONTROL_POINTS * 3
ATTRIBUTES = 2
# Where the BEV feature is looked at around a point, m.
NEIGHBOURS_M = ((0.0, 0.0, 0.0), (1.5, 0.0, 0.0), (-1.5, 0.0, 0.0), (0.0, 1.5, 0.0), (0.0, -1.5, 0.0))
# Unit of a point's shift, m.
STEP_M = 4.0


class LineField(nn.Module):
    """BEV feature to a dense field: logits of "an element of this class passes" (3), then the way to the nearest one for each class (3 x 2), m."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden = ConvNormAct(channels, channels, kernel=1)
        self.out = nn.Conv2d(channels, FIELD, 1)
        start_at(self.out)

    def forward(self, bev: Tensor) -> Tensor:
        """(B, C, Y, X) -> (B, FIELD, Y, X)."""
        return self.out(self.hidden(bev))


class MapLayer(nn.Module):
    """One round: attention between elements, sampling along the curve, then class, attributes and a pulled curve."""

    basis: Tensor
    fit: Tensor
    neighbours_m: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        head, channels = config.map, config.neck.channels
        points = head.sample_points
        self.register_buffer("basis", torch.from_numpy(bspline.basis(points, head.spline_degree)), persistent=False)
        self.register_buffer("fit", torch.from_numpy(bspline.fit_matrix(points, head.spline_degree)), persistent=False)
        self.register_buffer("neighbours_m", torch.tensor(NEIGHBOURS_M), persistent=False)
        self.attention = InstanceAttention(channels)
        self.norm_attention = nn.LayerNorm(channels)
        self.sampler = FeatureSampler(config)
        self.point_cameras = nn.Linear(channels, channels) if head.sample_cameras else None
        self.point_bev = nn.Linear(config.view.channels * len(NEIGHBOURS_M), channels) if head.sample_bev else None
        # Where a point is along its line and in the world: the ends must be able to move differently from the middle.
        self.point_place = FeedForward(3, channels)
        self.point_index = nn.Parameter(torch.zeros(points, channels))
        self.norm_point = nn.LayerNorm(channels)
        self.aggregate = PointMixer(channels, points, 1)
        self.merge = nn.Linear(channels, channels)
        self.norm_sample = nn.LayerNorm(channels)
        self.feed_forward = FeedForward(channels, channels)
        self.norm_out = nn.LayerNorm(channels)
        self.classify = nn.Linear(channels, len(MAP_CLASSES))
        nn.init.constant_(self.classify.bias, prior_bias(0.05))
        # How much the field's logits count in the class scores, for each class.
        self.evidence = nn.Parameter(torch.full((len(MAP_CLASSES),), 0.5))
        self.attributes = nn.Linear(channels, ATTRIBUTES)
        self.pull_point, self.pull_instance = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.pull_out = nn.Linear(channels, 3)
        nn.init.zeros_(self.pull_out.weight)
        nn.init.zeros_(self.pull_out.bias)

    def forward(
        self, instance: Tensor, control_m: Tensor, embedding: Tensor, feature: Tensor, bev: Tensor, field: Tensor | None, ego2img: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Instances (B, Q, C), control points (B, Q, 6, 3) -> instances, class logits (B, Q, 3), control points, attributes (B, Q, 2)."""
        instance = self.norm_attention(instance + self.attention(instance, embedding))
        points_m = self.basis @ control_m  # (B, Q, P, 3)
        point = self._sample(points_m, feature, bev, ego2img)  # (B, Q, P, C)
        found = self.aggregate(point.permute(0, 3, 1, 2), instance + embedding)
        instance = self.norm_sample(instance + self.merge(found))
        instance = self.norm_out(instance + self.feed_forward(instance))
        scores = self.classify(instance)
        pull = torch.relu(self.pull_point(point) + self.pull_instance(instance + embedding).unsqueeze(2))
        shift_m = self.pull_out(pull) * STEP_M
        if field is not None:
            passes, way_m = self._read(field, points_m, scores)
            scores, shift_m = scores + passes * self.evidence, shift_m + way_m
        return instance, scores, control_m + self.fit @ shift_m, self.attributes(instance)

    def _read(self, field: Tensor, points_m: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The field along the curve: mean class logits (B, Q, 3), and each point's way (B, Q, P, 3) to the nearest element of the class it may be."""
        batch, queries, points, _ = points_m.shape
        sampled = self.sampler.bird_eye(points_m, field).permute(0, 2, 3, 1)  # (B, Q, P, FIELD)
        passes, ways_m = sampled.split((len(MAP_CLASSES), 2 * len(MAP_CLASSES)), dim=-1)
        likely = scores.softmax(dim=-1).reshape(batch, queries, 1, len(MAP_CLASSES), 1)
        way_m = (ways_m.reshape(batch, queries, points, len(MAP_CLASSES), 2) * likely).sum(dim=3)
        return passes.sum(dim=2) * (1 / points), torch.cat([way_m, torch.zeros_like(way_m[..., :1])], dim=-1)

    def _sample(self, points_m: Tensor, feature: Tensor, bev: Tensor, ego2img: Tensor) -> Tensor:
        point = self.point_place(points_m * (2 / POINT_SCALE_M)) + self.point_index
        if self.point_cameras is not None:
            point = point + self.point_cameras(self.sampler.cameras(points_m, feature, ego2img).permute(0, 2, 3, 1))
        if self.point_bev is not None:
            point = point + self.point_bev(self._around(points_m, bev))
        return self.norm_point(point)

    def _around(self, points_m: Tensor, bev: Tensor) -> Tensor:
        """(B, Q, P, 3) points -> (B, Q, P, 5 * Cb): the BEV feature at each point and beside it, which tells the side the line is on."""
        batch, queries, points, _ = points_m.shape
        places = (points_m.unsqueeze(3) + self.neighbours_m).reshape(batch, queries, points * len(NEIGHBOURS_M), 3)
        return self.sampler.bird_eye(places, bev).permute(0, 2, 3, 1).reshape(batch, queries, points, -1)


class MapHead(nn.Module):
    """All layers, and the anchors: control points that training does not move."""

    anchors: Tensor

    def __init__(self, config: ModelConfig, anchors: Tensor) -> None:
        super().__init__()
        self.register_buffer("anchors", anchors.reshape(1, config.map.num_query, bspline.CONTROL_POINTS, 3))
        self.encode = FeedForward(CONTROL_NUMBERS, config.neck.channels)
        self.field = LineField(config.view.channels) if config.map.sample_bev else None
        self.layers = nn.ModuleList(MapLayer(config) for _ in range(config.map.layers))

    def forward(self, feature: Tensor, bev: Tensor, ego2img: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Find the map elements.

        Args:
            feature: (B * 6, C, Hf, Wf) image features.
            bev: (B, Cb, Y, X).
            ego2img: (B, 6, 4, 4), pixels of the network input.

        Returns:
            Class logits (B, Q, 3) and element states (B, Q, 20) of every layer, and the field (B, FIELD, Y, X) or None.
        """
        batch = len(ego2img)
        control_m = self.anchors if batch == 1 else self.anchors.expand(batch, -1, -1, -1)
        instance = self.embed(control_m)
        field = None if self.field is None else self.field(bev)
        logits, states = [], []
        for layer in self.layers:
            reference = control_m.detach()
            instance, scores, control_m, attributes = layer(instance, reference, self.embed(reference), feature, bev, field, ego2img)
            logits.append(scores)
            states.append(torch.cat([control_m.reshape(batch, -1, CONTROL_NUMBERS), attributes], dim=-1))
        return logits, states, field

    def embed(self, control_m: Tensor) -> Tensor:
        """(B, Q, 6, 3) -> (B, Q, C)."""
        return self.encode(control_m.reshape(len(control_m), -1, CONTROL_NUMBERS) * (2 / POINT_SCALE_M))
