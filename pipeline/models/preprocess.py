"""Normalisation of the images: the same at training, calibration and on the chip, and written into models/contract.json."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

# Mean and standard deviation of ImageNet RGB images in 0..255, the convention of the reference model.
MEAN_RGB = (123.675, 116.28, 103.53)
STD_RGB = (58.395, 57.12, 57.375)


def normalise(images_rgb: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(..., H, W, 3) RGB, 0 to 255 -> (..., 3, H, W) float32 with mean 0 and deviation 1 over ImageNet."""
    mean, std = np.array(MEAN_RGB, dtype=np.float32), np.array(STD_RGB, dtype=np.float32)
    return np.ascontiguousarray(np.moveaxis((images_rgb.astype(np.float32) - mean) / std, -1, -3))


def normalise_batch(images_rgb: torch.Tensor) -> torch.Tensor:
    """The same for a batch (B, H, W, 3) uint8 in torch; the result (B, 3, H, W) lies channels-last in memory, the faster layout on CPU."""
    scaled = images_rgb.float().sub_(torch.tensor(MEAN_RGB)).div_(torch.tensor(STD_RGB))
    return scaled.permute(0, 3, 1, 2)
