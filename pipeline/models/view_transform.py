"""Lift, splat turned around: each BEV cell gathers from the cameras instead of each pixel scattering into the grid.

Philion and Fidler's lift-splat (ECCV 2020) weighs a pixel's feature by its depth distribution. Here both are images, and a BEV cell samples them at
positions that the host
computed from the calibration (`point_maps`): two GridSample, one product, one sum, no scatter. The points of one height are summed over cameras;
the heights stay apart until a
pointwise convolution merges them, so that the BEV feature knows how high something is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.config import ViewConfig
from pipeline.models.henet import ConvBlock, ConvNormAct, S2DDown, start_at
from pipeline.taxonomy import CAMERAS


class DepthHead(nn.Module):
    """Image feature to a categorical depth distribution.

    `prior` holds the logits of each camera and image row before the image is looked at: the ground is at nearly the same depth along a row, and at
    another one in a camera of
    another focal length. Training starts it at what the lidar says (`training.priors`).
    """

    def __init__(self, channels: int, rows: int, bins: int) -> None:
        super().__init__()
        self.prior = nn.Parameter(torch.zeros(len(CAMERAS), bins, rows, 1))
        self.block = ConvBlock(channels, 2)
        self.logits = nn.Conv2d(channels, bins, 1)
        start_at(self.logits, weight=0.0)

    def forward(self, feature: Tensor) -> Tensor:
        """(B * 6, C, Hd, Wd) -> logits (B * 6, D, Hd, Wd); the prior at the start."""
        batch = len(feature) // len(CAMERAS)
        prior = self.prior if batch == 1 else self.prior.repeat(batch, 1, 1, 1)
        return self.logits(self.block(feature)) + prior


class ViewTransform(nn.Module):
    """Image features to the BEV feature."""

    def __init__(self, in_channels: int, config: ViewConfig) -> None:
        super().__init__()
        self.config = config
        heights = len(config.heights_m)
        self.reduce = nn.Conv2d(in_channels, config.lift_channels, 1)
        self.merge_heights = ConvNormAct(config.lift_channels * heights, config.channels, kernel=1)
        self.encoder = BevEncoder(config.channels, config.encoder_depth)

    def forward(self, feature: Tensor, depth_logits: Tensor, point_map_feature: Tensor, point_map_depth: Tensor) -> Tensor:
        """Gather the image features into the grid.

        Args:
            feature: (B * 6, C, Hf, Wf).
            depth_logits: (B * 6, D, Hd, Wd), from `DepthHead`.
            point_map_feature, point_map_depth: (B, K, Y, X, 2).

        Returns:
            BEV feature (B, C, Y, X) with x ascending along columns and y along rows.
        """
        lifted = self.gather(self.reduce(feature), depth_logits.softmax(dim=1), point_map_feature, point_map_depth)
        return self.encoder(self.merge_heights(lifted))

    def gather(self, feature: Tensor, depth: Tensor, point_map_feature: Tensor, point_map_depth: Tensor) -> Tensor:
        """Sum over cameras of feature times depth for every height: (B, C * heights, Y, X)."""
        cameras, heights = len(CAMERAS), len(self.config.heights_m)
        batch, points, rows, columns, _ = point_map_feature.shape
        _, channels, feature_rows, feature_columns = feature.shape
        image = feature.reshape(batch, cameras, channels, feature_rows, feature_columns).transpose(1, 2)
        image = image.reshape(batch, channels, cameras * feature_rows, feature_columns)
        depth_image = depth.permute(0, 2, 3, 1).reshape(batch, 1, cameras * depth.shape[2], -1)  # (B, 1, 6 * Hd, Wd * D)
        grid_shape = (batch, points * rows, columns, 2)
        sampled = functional.grid_sample(image, point_map_feature.reshape(grid_shape), align_corners=False)
        weight = functional.grid_sample(depth_image, point_map_depth.reshape(grid_shape), align_corners=False)
        lifted = sampled * weight
        if points > heights:
            lifted = lifted.reshape(batch * channels * heights, points // heights, rows * columns).sum(dim=1)
        return lifted.reshape(batch, channels * heights, rows, columns)


class BevEncoder(nn.Module):
    """Few blocks at the grid's resolution, more at half of it, joined by addition."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.fine = nn.Sequential(*(ConvBlock(channels, 1) for _ in range(depth // 2)))
        self.down = S2DDown(channels, channels * 2)
        self.coarse = nn.Sequential(*(ConvBlock(channels * 2, 2) for _ in range(depth)))
        self.up = nn.Conv2d(channels * 2, channels, 1)
        self.out = ConvNormAct(channels, channels, kernel=1)

    def forward(self, bev: Tensor) -> Tensor:
        """(B, C, Y, X) -> (B, C, Y, X)."""
        fine = self.fine(bev)
        coarse = self.up(self.coarse(self.down(fine)))
        return self.out(fine + functional.interpolate(coarse, scale_factor=2.0, mode="nearest"))
