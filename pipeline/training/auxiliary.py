"""Dense branches that exist in training only: they give every pixel and every BEV cell a signal from the first step, and are neither saved nor exported.

The depth loss (DenseDepthNet of the reference) needs no branch of its own here: it supervises the depth distribution of the view transform.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.config import AuxiliaryConfig, ModelConfig
from pipeline.models.heads.decoder import prior_bias
from pipeline.models.multitask import Outputs
from pipeline.taxonomy import DETECTION_CLASSES, MAP_CLASSES
from pipeline.training.losses import depth_loss, heat_loss, line_map_loss
from pipeline.training.targets import Targets


def heat_branch(channels: int, classes: int) -> nn.Conv2d:
    """Pointwise scores that start at a probability of 2 %: one layer, so that the shared feature itself must carry the answer."""
    branch = nn.Conv2d(channels, classes, 1)
    nn.init.constant_(branch.bias, prior_bias(0.02))
    return branch


class AuxiliaryLosses(nn.Module):
    """Branches and their losses."""

    def __init__(self, model: ModelConfig, weights: AuxiliaryConfig) -> None:
        super().__init__()
        self.weights, self.stride = weights, model.detection.feature_stride
        self.image_boxes = heat_branch(model.neck.channels, len(DETECTION_CLASSES))
        self.bev_boxes = heat_branch(model.view.channels, len(DETECTION_CLASSES))
        self.bev_map = heat_branch(model.view.channels, len(MAP_CLASSES))

    def forward(self, outputs: Outputs, targets: list[Targets]) -> dict[str, Tensor]:
        """Weighted losses by name; only those with a weight above zero."""
        losses: dict[str, Tensor] = {}
        weights = self.weights
        if weights.depth:
            losses["depth"] = weights.depth * depth_loss(outputs.depth_logits, targets)
        if weights.image_boxes:
            losses["image_boxes"] = weights.image_boxes * self._image_heat(outputs.image_features[self.stride], targets)
        if weights.bev_boxes:
            logits = self.bev_boxes(outputs.bev)
            losses["bev_boxes"] = weights.bev_boxes * heat_loss(logits, torch.stack([target.bev_heat for target in targets]))
        if weights.bev_map:
            losses["bev_map"] = weights.bev_map * line_map_loss(self.bev_map(outputs.bev), targets)
        return losses

    def _image_heat(self, feature: Tensor, targets: list[Targets]) -> Tensor:
        heat = torch.stack([target.image_heat for target in targets])  # (B, 6, 10, Hf, Wf)
        return heat_loss(self.image_boxes(feature), heat.flatten(0, 1))
