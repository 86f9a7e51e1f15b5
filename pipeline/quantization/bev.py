"""What quantization does to the picture from above: how well the edges of the road survive.

Edge fidelity: the probability that a BEV column holds drivable surface, float against INT8, over the cells along the road's edges in the float
model's own answer (one cell to each side). PSNR = 10 log10(1 / mean squared difference), in dB; the peak is 1, because it is a probability. A
release wants 32 dB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config import OccupancyLevel
from pipeline.quantization.compare import EXACT_DB
from pipeline.taxonomy import OCCUPANCY_CLASSES

DRIVEABLE = OCCUPANCY_CLASSES.index("driveable_surface")
EVERY = 4  # a float pass on every sample would double the time of the evaluation
Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]
Session = Callable[[Arrays], Arrays]


class EdgeFidelity:
    """Sums over samples; one level of the occupancy head, whose logits come as (cells, classes) in the order y, x, z."""

    def __init__(self, level: OccupancyLevel) -> None:
        self._cells = level.cells
        self.squared_error = 0.0
        self.edge_cells = 0
        self.samples = 0

    def add(self, exact: Floats, rounded: Floats) -> None:
        """Take in the logits (V, 18) of one sample, float and INT8; cells of other levels may follow."""
        expected, is_road = self._road(exact)
        value, _ = self._road(rounded)
        edges = edge_cells(is_road)
        self.squared_error += float(np.square(expected[edges] - value[edges], dtype=np.float64).sum())
        self.edge_cells += int(np.count_nonzero(edges))
        self.samples += 1

    def _road(self, logits: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """(largest probability of drivable surface in each column, whether some voxel of the column is one), both (Y, X)."""
        x, y, z = self._cells
        grid = logits[: x * y * z].reshape(y, x, z, -1).astype(np.float32)
        shifted = np.exp(grid - grid.max(axis=-1, keepdims=True))
        probability = shifted[..., DRIVEABLE] / shifted.sum(axis=-1)
        return probability.max(axis=-1), (grid.argmax(axis=-1) == DRIVEABLE).any(axis=-1)

    @property
    def psnr_db(self) -> float | None:
        """PSNR over all samples; None when no sample shows an edge."""
        if not self.edge_cells:
            return None
        mean = self.squared_error / self.edge_cells
        return min(-10.0 * float(np.log10(mean)), EXACT_DB) if mean > 0.0 else EXACT_DB


class EdgeProbe:
    """A session that answers with the INT8 model and, on every `EVERY`-th sample, asks the float model the same and compares road edges."""

    def __init__(self, session: Session, exact: Session, level: OccupancyLevel) -> None:
        self._session, self._exact = session, exact
        self._calls = 0
        self.fidelity = EdgeFidelity(level)

    def __call__(self, arrays: Arrays) -> Arrays:
        """Outputs of the INT8 model."""
        outputs = self._session(arrays)
        if self._calls % EVERY == 0:
            self.fidelity.add(self._exact(arrays)["occupancy_logits"][0], outputs["occupancy_logits"][0])
        self._calls += 1
        return outputs

    def report(self) -> dict[str, float | int | None]:
        """The field `bev` of eval_int8.json."""
        return {"road_edge_psnr_db": self.fidelity.psnr_db, "edge_cells": self.fidelity.edge_cells, "samples": self.fidelity.samples}


def edge_cells(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Cells with a neighbour (4 of them) on the other side of the mask's outline."""
    edges = np.zeros_like(mask)
    down, right = mask[1:] != mask[:-1], mask[:, 1:] != mask[:, :-1]
    edges[1:] |= down
    edges[:-1] |= down
    edges[:, 1:] |= right
    edges[:, :-1] |= right
    return edges
