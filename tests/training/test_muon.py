from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.training.muon import Muon, is_matrix, orthogonal


def test_updates_have_even_singular_values() -> None:
    torch.manual_seed(0)
    matrices = torch.randn(3, 8, 64) * torch.logspace(0, -1, 64)
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert 0.4 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(16, 32), (32, 16)])
def test_matrices_of_one_shape_are_updated_as_if_alone(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start, gradients = [torch.randn(shape) for _ in range(3)], [torch.randn(shape) for _ in range(3)]

    def updated(numbers: list[int]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(start[number].clone()) for number in numbers]
        for parameter, number in zip(parameters, numbers, strict=True):
            parameter.grad = gradients[number]
        Muon(parameters, lr=0.1).step()
        return [parameter.detach() for parameter in parameters]

    together, alone = updated([0, 1, 2]), [updated([number])[0] for number in range(3)]
    for first, second in zip(together, alone, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)


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
