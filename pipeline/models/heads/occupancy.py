"""Occupancy head: channel to height, after FlashOcc (Yu et al., arXiv 2311.12058). The third dimension is a dimension of channels, so that all
convolutions stay two-dimensional.

Each level is the BEV feature resampled to the level's cells by a constant GridSample (unless they are the BEV cells), and two pointwise
convolutions to height x class channels.
Channels last is the
layout of the chip and of the training, so reading the channels as (height, class) moves nothing. All levels are written one after the other into
one tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.config import ModelConfig, OccupancyLevel, ViewConfig
from pipeline.models.henet import ConvNormAct
from pipeline.taxonomy import OCCUPANCY_CLASSES


def level_grid(level: OccupancyLevel, view: ViewConfig) -> Tensor:
    """(1, y cells, x cells, 2) positions of a level's cells in the BEV feature, for GridSample."""
    axes = []
    for (low, high), cells, (bev_low, bev_high) in (
        (level.x_range_m, level.cells[0], view.x_range_m),
        (level.y_range_m, level.cells[1], view.y_range_m),
    ):
        centers_m = low + (torch.arange(cells) + 0.5) * (high - low) / cells
        axes.append((2 * centers_m - (bev_low + bev_high)) / (bev_high - bev_low))
    y, x = torch.meshgrid(axes[1], axes[0], indexing="ij")
    return torch.stack([x, y], dim=-1).unsqueeze(0)


class OccupancyLevelHead(nn.Module):
    """One grid."""

    grid: Tensor

    def __init__(self, config: ModelConfig, level: OccupancyLevel) -> None:
        super().__init__()
        channels = config.occupancy.channels
        self.register_buffer("grid", level_grid(level, config.view), persistent=False)
        same_range = (level.x_range_m, level.y_range_m) == (config.view.x_range_m, config.view.y_range_m)
        self.is_bev_grid = same_range and level.cells[1::-1] == config.view.cells
        self.hidden = ConvNormAct(config.view.channels, channels, kernel=1)
        self.logits = nn.Conv2d(channels, len(OCCUPANCY_CLASSES) * level.cells[2], 1)

    def forward(self, bev: Tensor) -> Tensor:
        """(B, C, Y, X) -> logits (B, y * x * z, 18)."""
        batch = len(bev)
        grid = self.grid if batch == 1 else self.grid.expand(batch, -1, -1, -1)
        resampled = bev if self.is_bev_grid else functional.grid_sample(bev, grid, align_corners=False)
        return self.logits(self.hidden(resampled)).permute(0, 2, 3, 1).reshape(batch, -1, len(OCCUPANCY_CLASSES))


class OccupancyHead(nn.Module):
    """All levels in one tensor. Training starts the bias of each level at the class frequencies of its heights (`training.priors`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.levels = nn.ModuleList(OccupancyLevelHead(config, level) for level in config.occupancy.levels)

    def logits_layers(self) -> list[nn.Conv2d]:
        """The last convolution of each level; its channels are (height, class)."""
        return [level.logits for level in self.levels if isinstance(level, OccupancyLevelHead)]

    def forward(self, bev: Tensor) -> Tensor:
        """(B, C, Y, X) -> logits (B, V, 18); V runs over levels, then y, x, z."""
        logits = [level(bev) for level in self.levels]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)
