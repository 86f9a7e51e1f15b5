"""Muon: momentum whose matrix updates are made orthogonal (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024).

A gradient of a weight matrix is dominated by few directions; replacing it by the nearest orthogonal matrix lets all directions learn at the same
pace. On the short trainings here it needs
about half of AdamW's steps (docs/model.md). torch.optim.Muon takes two-dimensional parameters only, and most of ours are kernels of convolutions,
which this one reads as matrices (outputs, the rest).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.training.ranks import ALONE, Ranks

# Newton-Schulz iteration x <- a x + (b x x^T + c (x x^T)^2) x, with Jordan's coefficients: singular values end between 0.7 and 1.2 after five rounds.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
SMALLEST_SIDE = 8


class Muon(torch.optim.Optimizer):
    """Parameters of at least two dimensions; the first one counts as rows, the others together as columns.

    The ranks share the work: each makes the updates of its own matrices orthogonal, then they exchange them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.9, weight_decay: float = 0.0, ranks: Ranks = ALONE) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._ranks = ranks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient; `closure` is not used."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = [self._direction(parameter, group["momentum"]) for parameter in parameters]
            for parameter, update in zip(parameters, self._orthogonal(updates), strict=True):
                self._apply(parameter, update, group["lr"], group["weight_decay"])

    def _orthogonal(self, updates: list[Tensor]) -> list[Tensor]:
        """The updates (rows, columns), made orthogonal."""
        wide = [update if update.shape[0] <= update.shape[1] else update.T for update in updates]
        exchanged = torch.zeros(sum(update.numel() for update in wide))
        places = [flat.view(update.shape) for flat, update in zip(exchanged.split([update.numel() for update in wide]), wide, strict=True)]
        # Matrices of one shape go through the iteration together: a hundred small products one by one would cost more than the arithmetic.
        stacks: dict[tuple[int, int], list[int]] = {}
        for number in share_of_work([(update.shape[0], update.shape[1]) for update in wide], self._ranks):
            rows, columns = wide[number].shape
            stacks.setdefault((rows, columns), []).append(number)
        for numbers in stacks.values():
            for number, result in zip(numbers, orthogonal(torch.stack([wide[number] for number in numbers])), strict=True):
                places[number].copy_(result)
        self._ranks.sum_(exchanged)
        return [place if place.shape == update.shape else place.T for place, update in zip(places, updates, strict=True)]

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum as a matrix (rows, columns)."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None  # the caller skips parameters without one
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        average = state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).reshape(len(parameter), -1)

    @staticmethod
    def _apply(parameter: Tensor, update: Tensor, lr: float, weight_decay: float) -> None:
        rows, columns = len(parameter), parameter[0].numel()
        # Taller than wide: scaled up, so that outputs change alike for all shapes.
        step = lr * max(1.0, rows / columns) ** 0.5
        parameter.mul_(1 - lr * weight_decay).add_(update.reshape(parameter.shape), alpha=-step)


def share_of_work(shapes: Sequence[tuple[int, int]], ranks: Ranks) -> list[int]:
    """Which of the matrices this rank works on: the most expensive first, each to the rank with the least to do so far."""
    cost = [rows * rows * (2 * columns + rows) for rows, columns in shapes]
    load, own = [0] * ranks.size, []
    for number in sorted(range(len(shapes)), key=lambda number: -cost[number]):
        rank = load.index(min(load))
        load[rank] += cost[number]
        if rank == ranks.rank:
            own.append(number)
    return own


def orthogonal(matrices: Tensor) -> Tensor:
    """(..., rows, columns) with rows <= columns -> the same with all singular values near one."""
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def is_matrix(parameter: Tensor) -> bool:
    """Kernels and linear weights that mix channels; not biases, scales, depthwise kernels, or layers of very few outputs or inputs."""
    return (
        parameter.ndim in (2, 4)
        and min(len(parameter), parameter[0].numel()) >= SMALLEST_SIDE
        and not (parameter.ndim == 4 and parameter.shape[1] == 1)
    )
