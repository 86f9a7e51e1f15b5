from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.training.muon import Muon, is_matrix, orthogonal


@pytest.mark.parametrize("shape", [(16, 32), (32, 8), (8, 64)])
def test_updates_have_even_singular_values(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape) @ torch.diag(torch.logspace(0, -1, shape[1]))
    values = torch.linalg.svdvals(orthogonal(matrix)) / max(1.0, shape[0] / shape[1]) ** 0.5
    assert 0.4 < float(values.min()) <= float(values.max()) < 1.3


def test_a_step_goes_downhill_and_keeps_the_shape_of_a_kernel() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 16, 3)
    optimizer = Muon([layer.weight], lr=0.01)
    image = torch.randn(2, 8, 6, 6)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = layer(image).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert layer.weight.shape == (16, 8, 3, 3)


def test_which_parameters_are_matrices() -> None:
    assert is_matrix(nn.Conv2d(16, 32, 1).weight)
    assert is_matrix(nn.Linear(16, 8).weight)
    assert not is_matrix(nn.Conv2d(16, 16, 3, groups=16).weight)  # depthwise: each row is its own filter
    assert not is_matrix(nn.Linear(16, 3).weight)
    assert not is_matrix(nn.Linear(16, 16).bias)
