"""Which instance answers for which label.

Early layers let the nearest anchors of every label learn from it (one label, several anchors): it depends on positions alone, so it does not change
from step to step and the
first signal is strong. The last layer gives every label one instance (Hungarian matching on class and position, Carion et al., DETR, ECCV 2020).
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def nearest_anchors(distance: Tensor, count: int, radius: float) -> tuple[Tensor, Tensor]:
    """The `count` nearest anchors of each label within `radius`, at least one; an anchor serves its nearest label only.

    Args:
        distance: (N, M) between anchors and labels.

    Returns:
        Anchor and label indices of the pairs, (K,) each.
    """
    anchors, labels = distance.shape
    if labels == 0:
        empty = torch.zeros(0, dtype=torch.long)
        return empty, empty
    nearest, order = distance.topk(min(count, anchors), dim=0, largest=False)  # (count, M)
    wanted = torch.full_like(distance, float("inf"))
    allowed = nearest <= radius
    allowed[0] = True
    wanted.scatter_(0, order, torch.where(allowed, nearest, torch.inf))
    best, label = wanted.min(dim=1)
    chosen = best.isfinite().nonzero().squeeze(1)
    return chosen, label[chosen]


def one_to_one(cost: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of least total cost from a matrix (N, M); entries that are not finite are never worth it."""
    matrix = np.nan_to_num(cost.detach().numpy(), nan=1e6, posinf=1e6, neginf=-1e6)
    rows, columns = linear_sum_assignment(matrix)
    return torch.from_numpy(rows), torch.from_numpy(columns)
