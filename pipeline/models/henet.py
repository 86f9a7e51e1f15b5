"""HENet: the backbone of the reference model, pure convolutions in four stages at strides 4, 8, 16 and 32.

A block mixes space with one cheap convolution and channels with two pointwise ones, and adds the result, scaled per channel, to its input. The
three kinds of
block differ in the spatial convolution alone: `DWCB` 3x3 depthwise, `GroupDWCB` 3x3 with groups of 16 channels (wide shallow stages, where the
tensor unit
has spare throughput), `AltDWCB` alternates 3x3 depthwise with 1x5 and 5x1 for reach. Stages are joined by `S2DDown`, a 2x2 convolution with stride
2, which
equals space-to-depth followed by a pointwise convolution.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.config import BackboneConfig

GROUP_CHANNELS = 16


class ConvBlock(nn.Module):
    """Spatial convolution + BatchNorm, pointwise expansion, GELU, pointwise projection, layer scale, residual."""

    def __init__(self, channels: int, mlp_ratio: int, kernel: tuple[int, int] = (3, 3), groups: int | None = None) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2)
        self.spatial = nn.Conv2d(channels, channels, kernel, padding=padding, groups=groups or channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.expand = nn.Conv2d(channels, channels * mlp_ratio, 1)
        self.act = nn.GELU()
        self.project = nn.Conv2d(channels * mlp_ratio, channels, 1)
        # Starts at 0.5, not near zero: a network of a dozen blocks trained for a thousand steps has no time to grow its branches.
        self.scale = nn.Parameter(torch.full((channels, 1, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        hidden = self.act(self.expand(self.norm(self.spatial(x))))
        # The layer scale multiplies the kernel instead of the feature: the same function, one pass over the feature less, and folded away at export.
        return x + functional.conv2d(hidden, self.project.weight * self.scale, self.project.bias)


def make_block(kind: str, index: int, channels: int, mlp_ratio: int) -> ConvBlock:
    """The `index`-th block of a stage."""
    if kind == "GroupDWCB":
        return ConvBlock(channels, mlp_ratio, groups=max(1, channels // GROUP_CHANNELS))
    if kind == "AltDWCB":
        return ConvBlock(channels, mlp_ratio, kernel=((3, 3), (1, 5), (5, 1))[index % 3])
    return ConvBlock(channels, mlp_ratio)


def start_at(layer: nn.Conv2d | nn.Linear, weight: float | None = None, bias: float = 0.0) -> None:
    """Set the bias of a layer, and its weights too unless `weight` is None."""
    if weight is not None:
        nn.init.constant_(layer.weight, weight)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)


class ConvNormAct(nn.Sequential):
    """Convolution, BatchNorm (folded at export), ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )


class S2DDown(nn.Sequential):
    """Halve height and width: space-to-depth and pointwise convolution in one 2x2 convolution, then BatchNorm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, 2, stride=2, bias=False), nn.BatchNorm2d(outputs))


class HENet(nn.Module):
    """Images to features at strides 4, 8, 16, 32."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        widths = config.widths
        self.stem = nn.Sequential(ConvNormAct(3, widths[0] // 2, stride=2), ConvNormAct(widths[0] // 2, widths[0], stride=2))
        self.stages = nn.ModuleList(
            nn.Sequential(*(make_block(kind, index, width, ratio) for index in range(depth)))
            for kind, depth, width, ratio in zip(config.blocks, config.depths, widths, config.mlp_ratios, strict=True)
        )
        self.downs = nn.ModuleList(S2DDown(first, second) for first, second in pairwise(widths))

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) -> four features (B, C_i, H / s, W / s) for the strides s = 4, 8, 16, 32."""
        x = self.stem(images)
        features = []
        for index, stage in enumerate(self.stages):
            x = stage(x)
            features.append(x)
            if index < len(self.downs):
                x = self.downs[index](x)
        return features


class HENetClassifier(nn.Module):
    """HENet with a pooled linear classifier, as in the vendor's public latency figures for 224x224 images."""

    def __init__(self, config: BackboneConfig, classes: int = 1000, mix_channels: int = 1024) -> None:
        super().__init__()
        self.backbone = HENet(config)
        self.mix = ConvNormAct(config.widths[-1], mix_channels, kernel=1)
        self.classifier = nn.Conv2d(mix_channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> class scores (B, classes, 1, 1)."""
        return self.classifier(self.mix(self.backbone(images)[-1]).mean(dim=(2, 3), keepdim=True))
