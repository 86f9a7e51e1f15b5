"""Small networks that hold what the product's model holds: convolutions, attention, normalisation, projection and sampling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

OPSET = 20


class ConvNet(nn.Module):
    """Convolutions with ReLU, SiLU and GELU, a residual addition, pooling, a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.fc = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.stem(images))
        x = x + functional.gelu(self.point(functional.silu(self.depthwise(x))))
        x = functional.max_pool2d(self.up(x), 2)
        return self.fc(x.mean((2, 3)))


class DeformableBlock(nn.Module):
    """Sparse4D-like aggregation: anchors -> key points -> projection into two cameras -> GridSample -> attention over cameras -> refined anchors.

    Inputs: images [2,3,32,64], ego2img [2,4,4] (pixels), anchors [1,16,3] (m), features [1,16,16].
    """

    def __init__(self, height: int = 32, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("size", torch.tensor([width, height], dtype=torch.float32))
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.offset, self.refine = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, images: Tensor, ego2img: Tensor, anchors: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.backbone(images)  # (2, 16, 16, 32)
        points = anchors + 0.5 * self.offset(features)  # (1, 16, 3)
        homogeneous = torch.cat([points, torch.ones_like(points[..., :1])], -1)
        projected = torch.matmul(homogeneous, ego2img.transpose(1, 2))  # (2, 16, 4)
        depth = projected[..., 2:3].clamp(min=1.0)
        pixels = projected[..., :2] / depth
        grid = pixels / self.size * 2 - 1
        sampled = functional.grid_sample(maps, grid[:, :, None], align_corners=False)[..., 0].permute(0, 2, 1)  # (2, 16, 16)
        scores = torch.matmul(self.query(features).expand(2, -1, -1), self.key(sampled).transpose(1, 2)) / 4.0
        mixed = torch.matmul(scores.softmax(-1), self.value(sampled)).mean(0, keepdim=True)
        features = self.norm(features + mixed)
        return points + 0.1 * self.refine(features), features


def export(network: nn.Module, inputs: dict[str, Tensor], outputs: list[str], path: Path, opset: int = OPSET) -> Path:
    """Export with fixed shapes; the same network gives the same file."""
    torch.onnx.export(
        network.eval(), tuple(inputs.values()), str(path), input_names=list(inputs), output_names=outputs, opset_version=opset, dynamo=False
    )
    return path


def image_batches(count: int, shape: tuple[int, ...] = (2, 3, 32, 64), seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [{"images": smooth_images(rng, shape)} for _ in range(count)]


def smooth_images(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normalised images with structure at several scales, as photographs have."""
    image = torch.zeros(shape)
    for step in (1, 4, 16):
        coarse = torch.tensor(rng.normal(size=(*shape[:2], max(shape[2] // step, 1), max(shape[3] // step, 1))), dtype=torch.float32)
        image += functional.interpolate(coarse, shape[2:], mode="bilinear") * 0.5
    return image.numpy()


def deformable_batches(count: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Two pinhole cameras that look forward (x) from 1.5 m above ground, anchors 4 to 50 m ahead."""
    rng = np.random.default_rng(seed)
    focal, batches = 40.0, []
    camera = np.array([[32, -focal, 0, 0], [16, 0, -focal, focal * 1.5], [1, 0, 0, 0], [0, 0, 0, 1]], np.float32)
    for _ in range(count):
        anchors = np.stack([rng.uniform(4, 50, 16), rng.uniform(-10, 10, 16), rng.uniform(0, 2, 16)], -1).astype(np.float32)[None]
        turned = camera.copy()
        turned[:2, 3] += rng.normal(size=2).astype(np.float32)
        features = rng.normal(size=(1, 16, 16)).astype(np.float32)
        ego2img = np.stack([camera, turned])
        batches.append({"images": smooth_images(rng, (2, 3, 32, 64)), "ego2img": ego2img, "anchors": anchors, "features": features})
    return batches
