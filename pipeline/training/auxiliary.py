"""Dense branches that exist in training only: they give every pixel and every BEV cell a signal from the first step.

They are neither saved nor exported.

The depth loss needs no branch of its own: it supervises the depth distribution of the view transform (DenseDepthNet of the reference).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.config import AuxiliaryConfig, ModelConfig
from pipeline.models.heads.decoder import prior_bias
from pipeline.models.henet import start_at
from pipeline.models.multitask import Outputs
from pipeline.taxonomy import DETECTION_CLASSES, MAP_CLASSES, OCCUPANCY_CLASSES
from pipeline.training.labels import UNSEEN
from pipeline.training.losses import cell_loss, depth_loss, drawn_loss, field_loss, heat_loss
from pipeline.training.targets import BevTargets, Targets

# Way (2), shape (z, log size, sine and cosine of the heading) and velocity (2) against class scores in the loss of the box field. With the heading
# weighted as the rest of the shape, it was not learned (mAOE 1.25 rad).
BOX_FIELD_WEIGHTS = (4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 12.0, 12.0, 2.0, 2.0)


def rare_branch(channels: int, classes: int) -> nn.Conv2d:
    """Pointwise scores that start at a probability of 2 %: one layer, so that the shared feature itself must carry the answer."""
    branch = nn.Conv2d(channels, classes, 1)
    start_at(branch, bias=prior_bias(0.02))
    return branch


class AuxiliaryLosses(nn.Module):
    """Branches and their losses."""

    def __init__(self, model: ModelConfig, weights: AuxiliaryConfig) -> None:
        super().__init__()
        self.weights, self.view = weights, model.view
        self.image_boxes = rare_branch(model.neck.channels, len(DETECTION_CLASSES))
        self.image_lines = rare_branch(model.neck.channels, len(MAP_CLASSES))
        self.image_surface = nn.Conv2d(model.neck.channels, len(OCCUPANCY_CLASSES), 1)

    def image_losses(self, image_features: dict[int, Tensor], depth_logits: Tensor, targets: Sequence[Targets]) -> dict[str, Tensor]:
        """Weighted losses on the image features, by name; none where the targets hold no image part."""
        images = [target.image for target in targets if target.image is not None]
        if not images:
            return {}
        feature, weights = image_features[self.view.depth_stride], self.weights
        losses = {"image_boxes": weights.image_boxes * heat_loss(self.image_boxes(feature), torch.cat([image.heat for image in images]).float())}
        bins = [image.depth_bin for image in images if image.depth_bin is not None]
        surfaces = [image.surface for image in images if image.surface is not None]
        if len(bins) == len(surfaces) == len(targets):
            losses["depth"] = weights.depth * depth_loss(depth_logits, torch.cat(bins))
            losses["image_surface"] = weights.image_surface * cell_loss(self.image_surface(feature), torch.cat(surfaces), unknown=UNSEEN)
        lines = [image.lines for image in images if image.lines is not None]
        if len(lines) == len(targets):
            drawn = self.image_lines(image_features[self.view.feature_stride])
            losses["image_lines"] = weights.image_lines * drawn_loss(drawn, torch.cat(lines).float())
        return losses

    def forward(self, outputs: Outputs, targets: Sequence[Targets]) -> dict[str, Tensor]:
        """All weighted losses by name. A loss whose labels some sample of the batch lacks is left out for this batch."""
        losses = self.image_losses(outputs.image_features, outputs.depth_logits, targets)
        grids = [target.bev for target in targets if target.bev is not None]
        if outputs.det_field is not None:
            losses["bev_boxes"] = self.weights.bev_boxes * box_field_loss(outputs.det_field, grids)
        lines = [grid.lines for grid in grids if grid.lines is not None]
        pulls = [grid.pull for grid in grids if grid.pull is not None]
        if outputs.map_field is not None and len(lines) == len(pulls) == len(targets):
            passes, ways = outputs.map_field.split((len(MAP_CLASSES), 2 * len(MAP_CLASSES)), dim=1)
            way_loss = field_loss(ways, torch.stack(pulls).flatten(1, 2))
            losses["bev_lines"] = self.weights.bev_lines * (drawn_loss(passes, torch.stack(lines)) + way_loss)
        return losses


def box_field_loss(field: Tensor, grids: Sequence[BevTargets]) -> Tensor:
    """Loss of the detection head's dense field (B, FIELD, Y, X): class scores, then ways, shapes and velocities."""
    heat, boxes = torch.stack([grid.heat for grid in grids]), torch.stack([grid.boxes for grid in grids])
    classes = heat.shape[1]
    weights = field.new_tensor(BOX_FIELD_WEIGHTS).reshape(-1, 1, 1)
    return heat_loss(field[:, :classes], heat) + field_loss(field[:, classes:] * weights, boxes * weights)
