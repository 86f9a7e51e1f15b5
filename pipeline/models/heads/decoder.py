"""Parts that the two sparse heads share: sampling of image and BEV features, attention between instances, feed-forward network.

Shapes: B samples, N instances, P points an instance, C channels, G channel groups, six cameras. All indexing is static and masks are arithmetic, so
that the exported graph has
fixed shapes and no scatter, NonZero or boolean indexing. Ranges are bounded on purpose: points enter the projection divided by `POINT_SCALE_M`, the
reciprocal is of a clamped
depth, and sampling positions are clamped to [-2, 2], so that an int16 (projection) and int8 (features) grid covers them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.config import ModelConfig
from pipeline.taxonomy import CAMERAS

POINT_SCALE_M = 64.0
NEAREST_DEPTH = 0.5 / POINT_SCALE_M
OUTSIDE = 4.0  # added to a position in [-2, 2] it leaves the image


def prior_bias(probability: float) -> float:
    """Bias at which a sigmoid starts at `probability` (Lin et al., focal loss, ICCV 2017)."""
    return -math.log((1 - probability) / probability)


class Projection(nn.Module):
    """Points of the BEV frame to normalised positions in the network inputs."""

    image_norm: Tensor

    def __init__(self, image_size: tuple[int, int]) -> None:
        super().__init__()
        height, width = image_size
        # Rows of the projection are pixel * depth; combined with the depth row they become position * depth with positions in [-1, 1].
        norm = torch.tensor([[2 / width, 0, 1 / width - 1], [0, 2 / height, 1 / height - 1], [0, 0, 1.0]])
        self.register_buffer("image_norm", norm, persistent=False)

    def forward(self, points_m: Tensor, ego2img: Tensor) -> Tensor:
        """Project (B, M, 3) points with (B, 6, 4, 4), pixels, to positions (B, 6, M, 2) for GridSample.

        Points behind a camera are moved out of the image, where GridSample gives zero; so are points beside it.
        """
        matrix = self.image_norm @ ego2img[:, :, :3]  # (B, 6, 3, 4)
        rotation, shift = matrix[..., :3].transpose(2, 3), matrix[..., 3].unsqueeze(2)
        camera = (points_m * (1 / POINT_SCALE_M)).unsqueeze(1) @ rotation + shift * (1 / POINT_SCALE_M)  # (B, 6, M, 3)
        depth = camera[..., 2:]
        position = (camera[..., :2] * depth.clamp(min=NEAREST_DEPTH).reciprocal()).clamp(-2.0, 2.0)
        hidden = ((NEAREST_DEPTH - depth) * POINT_SCALE_M * OUTSIDE).clamp(0.0, OUTSIDE)
        return (position + hidden).clamp(-2.0, 2.0)


class FeatureSampler(nn.Module):
    """Features at points: summed over the cameras that see a point, and of the BEV cell it stands in."""

    bev_scale: Tensor
    bev_shift: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.projection = Projection(config.image_size)
        low = torch.tensor([config.view.x_range_m[0], config.view.y_range_m[0]])
        high = torch.tensor([config.view.x_range_m[1], config.view.y_range_m[1]])
        self.register_buffer("bev_scale", 2 / (high - low), persistent=False)
        self.register_buffer("bev_shift", -(high + low) / (high - low), persistent=False)

    def cameras(self, points_m: Tensor, feature: Tensor, ego2img: Tensor) -> Tensor:
        """(B, N, P, 3) points -> (B, C, N, P) from the image features (B * 6, C, Hf, Wf)."""
        batch, instances, points, _ = points_m.shape
        position = self.projection(points_m.reshape(batch, instances * points, 3), ego2img)
        grid = position.reshape(batch * len(CAMERAS), instances, points, 2)
        sampled = functional.grid_sample(feature, grid, align_corners=False)
        return sampled.reshape(batch, len(CAMERAS), -1, points).sum(dim=1).reshape(batch, -1, instances, points)

    def bird_eye(self, points_m: Tensor, bev: Tensor) -> Tensor:
        """(B, N, P, 3) points -> (B, C, N, P) from the BEV feature (B, C, Y, X)."""
        grid = (points_m[..., :2] * self.bev_scale + self.bev_shift).clamp(-2.0, 2.0)
        return functional.grid_sample(bev, grid, align_corners=False)


class PointMixer(nn.Module):
    """The sampled features of an instance's points to one feature.

    The instance weighs its points, for each channel group by itself, as in Sparse4D; then a linear layer reads them side by side. A sum over the
    points would forget at which of them
    something was found, and with it the direction in which the instance has to move.
    """

    def __init__(self, channels: int, points: int, groups: int, sampled_channels: int | None = None) -> None:
        super().__init__()
        self.points, self.groups = points, groups
        self.weights = nn.Linear(channels, groups * points)
        nn.init.zeros_(self.weights.weight)
        nn.init.zeros_(self.weights.bias)
        self.mix = nn.Linear((sampled_channels or channels) * points, channels)

    def forward(self, sampled: Tensor, query: Tensor) -> Tensor:
        """(B, Cs, N, P) features and (B, N, C) instances -> (B, N, C)."""
        batch, channels, instances, points = sampled.shape
        weights = self.weights(query).reshape(batch, instances, self.groups, points).softmax(dim=-1) * points
        weights = weights.permute(0, 2, 1, 3).reshape(batch * self.groups, 1, instances, points)
        weighted = sampled.reshape(batch * self.groups, channels // self.groups, instances, points) * weights
        return self.mix(weighted.reshape(batch, channels, instances, points).permute(0, 2, 1, 3).reshape(batch, instances, channels * points))


class InstanceAttention(nn.Module):
    """Multi-head self-attention between the instances of a sample, written out so that it exports as MatMul and Softmax."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.scale = heads, (channels // heads) ** -0.5
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, instance: Tensor, embedding: Tensor) -> Tensor:
        """(B, N, C) features and anchor embeddings -> (B, N, C)."""
        position_aware = instance + embedding
        query, key, value = self._split(self.query(position_aware)), self._split(self.key(position_aware)), self._split(self.value(instance))
        attention = (query @ key.transpose(2, 3) * self.scale).softmax(dim=-1)  # (B, heads, N, N)
        mixed = (attention @ value).transpose(1, 2)
        return self.out(mixed.reshape(instance.shape))

    def _split(self, x: Tensor) -> Tensor:
        batch, instances, channels = x.shape
        return x.reshape(batch, instances, self.heads, channels // self.heads).transpose(1, 2)


class FeedForward(nn.Sequential):
    """Two linear layers with a ReLU between; inside twice as wide as `outputs` unless told otherwise."""

    def __init__(self, inputs: int, outputs: int, hidden: int | None = None) -> None:
        hidden = hidden or 2 * outputs
        super().__init__(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class LinearNorm(nn.Module):
    """Linear layer and BatchNorm, one linear layer once trained.

    What instances have in common is most of their features (measured: 97 % of their length) and grows while a model trains. Read by a plain linear
    layer it drives all units of a ReLU to one side; here it is taken off, unit by unit, and the units keep telling instances apart.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        if self.training:
            return self.norm(self.linear(x).flatten(0, -2)).reshape(*x.shape[:-1], -1)
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        return functional.linear(x, self.linear.weight * scale.unsqueeze(1), norm.bias - norm.running_mean * scale)
