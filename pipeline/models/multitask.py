"""The multi-task network: six cameras to boxes, map elements and occupancy.

images -> HENet -> MMFPN -> view transform -> BEV feature
                      |            |-> own blocks -> detection head (+ temporal state in and out)
                      '------------|-> own blocks -> map head
                                   '-> own blocks -> occupancy head
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.models.anchors import Anchors
from pipeline.models.heads.detection import DetectionHead
from pipeline.models.heads.map import MapHead
from pipeline.models.heads.occupancy import OccupancyHead
from pipeline.models.henet import ConvBlock, HENet
from pipeline.models.mmfpn import MMFPN
from pipeline.models.view_transform import DepthHead, ViewTransform


@dataclass(frozen=True)
class Inputs:
    """Inputs of B samples; shapes and units in docs/architecture.md, with a leading B (images: B * 6)."""

    images: Tensor  # (B * 6, 3, H, W) normalised
    ego2img: Tensor  # (B, 6, 4, 4)
    point_map_feature: Tensor  # (B, K, Y, X, 2)
    point_map_depth: Tensor  # (B, K, Y, X, 2)
    det_anchors: Tensor  # (B, N, 11)
    det_features: Tensor  # (B, N, C)


@dataclass
class Outputs:
    """Outputs of B samples. Lists hold one entry a decoder layer; the last one counts. A head that is not built leaves its fields empty."""

    image_features: dict[int, Tensor]
    bev: dict[str, Tensor]  # by task: (B, Cb, Y, X)
    depth_logits: Tensor
    det_logits: list[Tensor] = field(default_factory=list)  # (B, N, 10)
    det_boxes: list[Tensor] = field(default_factory=list)  # (B, N, 11)
    det_features: Tensor | None = None  # (B, N, C)
    det_field: Tensor | None = None  # (B, FIELD, Y, X)
    map_logits: list[Tensor] = field(default_factory=list)  # (B, Q, 3)
    map_states: list[Tensor] = field(default_factory=list)  # (B, Q, 20)
    map_field: Tensor | None = None  # (B, 9, Y, X)
    occupancy_logits: Tensor | None = None  # (B, V, 18)


class MultitaskModel(nn.Module):
    """Shared features and the heads of `config.tasks`."""

    box_anchors: Tensor

    def __init__(self, config: ModelConfig, anchors: Anchors) -> None:
        super().__init__()
        self.config = config
        self.backbone = HENet(config.backbone)
        self.neck = MMFPN(config.backbone.widths, config.neck)
        self.depth_head = DepthHead(config.neck.channels, config.image_size[0] // config.view.depth_stride, config.view.depth_bins)
        self.view_transform = ViewTransform(config.neck.channels, config.view)
        self.detection = DetectionHead(config) if "detection" in config.tasks else None
        self.map = MapHead(config, torch.from_numpy(anchors.polylines)) if "map" in config.tasks else None
        self.occupancy = OccupancyHead(config) if "occupancy" in config.tasks else None
        self.task_bev = nn.ModuleDict({task: task_blocks(config) for task in config.tasks})
        self.register_buffer("box_anchors", torch.from_numpy(anchors.boxes))  # (N, 11); saved with the model, used by the instance bank on the host

    def image_part(self, images: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """What needs no geometry: image features by stride and the depth logits (B * 6, D, Hf, Wf)."""
        features = self.neck(self.backbone(images))
        return features, self.depth_head(features[self.config.view.depth_stride])

    def lift(self, features: dict[int, Tensor], depth_logits: Tensor, inputs: Inputs) -> Outputs:
        """What the heads build on: the results of `image_part` and the BEV feature, seen through each head's own blocks."""
        lifted = features[self.config.view.feature_stride]
        bev = self.view_transform(lifted, depth_logits, inputs.point_map_feature, inputs.point_map_depth)
        return Outputs(features, {task: blocks(bev) for task, blocks in self.task_bev.items()}, depth_logits)

    def forward(self, inputs: Inputs) -> Outputs:
        """Run all heads."""
        features, depth_logits = self.image_part(inputs.images)
        return self.heads(self.lift(features, depth_logits, inputs), inputs)

    def heads(self, outputs: Outputs, inputs: Inputs) -> Outputs:
        """Fill in the heads' fields of `outputs`."""
        config, bev = self.config, outputs.bev
        if self.detection is not None:
            feature = outputs.image_features[config.detection.feature_stride]
            outputs.det_logits, outputs.det_boxes, outputs.det_features, outputs.det_field = self.detection(
                inputs.det_anchors, inputs.det_features, feature, bev["detection"], inputs.ego2img
            )
        if self.map is not None:
            feature = outputs.image_features[config.map.feature_stride]
            outputs.map_logits, outputs.map_states, outputs.map_field = self.map(feature, bev["map"], inputs.ego2img)
        if self.occupancy is not None:
            outputs.occupancy_logits = self.occupancy(bev["occupancy"])
        return outputs


def task_blocks(config: ModelConfig) -> nn.Sequential:
    """A head's own blocks on the BEV feature.

    Heads that read one feature pull it three ways. Two cheap blocks each, and all three are better (docs/model.md).
    """
    return nn.Sequential(*(ConvBlock(config.view.channels, 1) for _ in range(config.view.task_depth)))
