"""MMFPN: the neck. Every backbone level is projected to the same channels; levels are fused from coarse to fine and back by scaled addition.

Addition with a learned factor per channel costs the chip one element-wise pass; concatenation followed by a convolution would cost a copy and a
convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config import NeckConfig
from pipeline.models.henet import ConvNormAct

STRIDES = (4, 8, 16, 32)


class ScaledAdd(nn.Module):
    """x + scale * y with one factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Two (B, C, H, W) -> (B, C, H, W)."""
        return x + self.scale * y


class MMFPN(nn.Module):
    """Features at strides 4, 8, 16, 32 to fused features at `config.out_strides`."""

    def __init__(self, widths: tuple[int, ...], config: NeckConfig) -> None:
        super().__init__()
        self.out_strides = config.out_strides
        self.finest = min(STRIDES.index(stride) for stride in config.out_strides)
        channels = config.channels
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths[self.finest :])
        levels = len(self.lateral)
        self.top_down = nn.ModuleList(ScaledAdd(channels) for _ in range(levels - 1))
        self.down = nn.ModuleList(ConvNormAct(channels, channels, stride=2, groups=channels) for _ in range(self._coarsest() - self.finest))
        self.bottom_up = nn.ModuleList(ScaledAdd(channels) for _ in self.down)
        self.smooth = nn.ModuleList(ConvNormAct(channels, channels, kernel=1) for _ in config.out_strides)

    def _coarsest(self) -> int:
        return max(STRIDES.index(stride) for stride in self.out_strides)

    def forward(self, features: list[Tensor]) -> dict[int, Tensor]:
        """Four features of the backbone -> {stride: (B, C, H / stride, W / stride)}."""
        levels = [lateral(feature) for lateral, feature in zip(self.lateral, features[self.finest :], strict=True)]
        for index in range(len(levels) - 2, -1, -1):
            coarse = nn.functional.interpolate(levels[index + 1], scale_factor=2.0, mode="nearest")
            levels[index] = self.top_down[index](levels[index], coarse)
        for index, (down, add) in enumerate(zip(self.down, self.bottom_up, strict=True)):
            levels[index + 1] = add(levels[index + 1], down(levels[index]))
        return {stride: smooth(levels[STRIDES.index(stride) - self.finest]) for stride, smooth in zip(self.out_strides, self.smooth, strict=True)}
