"""Weights of the tasks' losses: fixed, or moved until the tasks pull equally hard at the shared feature.

Let g_i = w_i |dL_i / d feature| be the weighted gradient norm of task i at the last shared layer. The aim is g_i = mean g for all i, hence

    w_i <- w_i exp(-rate (g_i / mean g - 1))

with a minus sign: a task that pulls harder than the average gets less weight. (With a plus sign, as a field note has it, the largest task grows
without bound.) Where a task's
norm exceeds another's by more than `cap_ratio`, its weight shrinks by a further 5 %. Weights are normalised to a mean of one; absent tasks and
norms that are not finite are
left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.config import BalanceConfig

CAP_SHRINK = 0.95
# The exponent is bounded: one step changes a weight by at most this factor each way.
LARGEST_STEP = 2.0


def update_weights(weights: Mapping[str, float], norms: Mapping[str, float], config: BalanceConfig) -> dict[str, float]:
    """New weights from unweighted gradient norms |dL_i / d feature|; tasks whose norm is zero, NaN or infinite keep their weight."""
    pulls = {task: weights[task] * norm for task, norm in norms.items() if task in weights and math.isfinite(norm) and norm > 0}
    if len(pulls) < 2:
        return dict(weights)
    mean = sum(pulls.values()) / len(pulls)
    updated = dict(weights)
    for task, pull in pulls.items():
        factor = math.exp(-config.rate * (pull / mean - 1))
        updated[task] *= min(max(factor, 1 / LARGEST_STEP), LARGEST_STEP)
        if pull > config.cap_ratio * min(pulls.values()):
            updated[task] *= CAP_SHRINK
    scale = len(updated) / sum(updated.values())
    return {task: weight * scale for task, weight in updated.items()}


def gradient_norms(losses: Mapping[str, Tensor], features: list[Tensor]) -> dict[str, float]:
    """Norm of each loss's gradient at the shared features; only the part of the graph above them is walked."""
    norms = {}
    for task, loss in losses.items():
        gradients = torch.autograd.grad(loss, features, retain_graph=True, allow_unused=True)
        squares = [gradient.square().sum() for gradient in gradients if gradient is not None]
        norms[task] = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    return norms
