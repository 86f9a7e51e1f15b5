"""Fidelity of road edges."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import OccupancyLevel
from pipeline.quantization.bev import DRIVEABLE, EVERY, EdgeFidelity, EdgeProbe, edge_cells

LEVEL = OccupancyLevel(x_range_m=(-4.0, 4.0), y_range_m=(-4.0, 4.0), z_range_m=(-1.0, 1.0), cells=(8, 8, 2))


def logits(road: np.ndarray, confidence: float = 4.0) -> np.ndarray:
    """(V, 18) logits in the order y, x, z for a road mask (y, x): the lower voxel is road or terrain."""
    grid = np.zeros((8, 8, 2, 18), np.float32)
    grid[..., 17] = confidence
    grid[:, :, 0, 17] = 0.0
    grid[:, :, 0, DRIVEABLE] = np.where(road, confidence, -confidence)
    return grid.reshape(-1, 18)


ROAD = np.zeros((8, 8), bool)
ROAD[:, 2:5] = True


def test_edges_are_the_cells_on_both_sides_of_the_outline() -> None:
    assert np.array_equal(np.flatnonzero(edge_cells(ROAD)[0]), [1, 2, 4, 5])


def test_equal_answers_are_exact_and_a_known_difference_has_its_psnr() -> None:
    same = EdgeFidelity(LEVEL)
    same.add(logits(ROAD), logits(ROAD))
    assert same.psnr_db == 200.0 and same.edge_cells == 32
    other = EdgeFidelity(LEVEL)
    exact, rounded = logits(ROAD), logits(ROAD, 3.0)

    def probability(confidence: float, on_road: bool) -> float:
        value = np.exp(confidence if on_road else -confidence)
        return float(max(value / (value + 17), 1 / (np.exp(confidence) + 17)))

    errors = [probability(4.0, on) - probability(3.0, on) for on in (True, False)]
    other.add(exact, rounded)
    assert other.psnr_db == pytest.approx(-10 * np.log10(np.mean(np.square(errors))), abs=1e-3)


def test_difference_far_from_edges_does_not_count() -> None:
    changed = logits(ROAD).reshape(8, 8, 2, 18)
    changed[:, 7] += np.arange(18)
    fidelity = EdgeFidelity(LEVEL)
    fidelity.add(logits(ROAD), changed.reshape(-1, 18))
    assert fidelity.psnr_db == 200.0


def test_no_road_no_number() -> None:
    fidelity = EdgeFidelity(LEVEL)
    fidelity.add(logits(np.zeros((8, 8), bool)), logits(ROAD))
    assert fidelity.psnr_db is None


def test_probe_answers_with_the_int8_model_and_compares_some() -> None:
    probe = EdgeProbe(lambda _: {"occupancy_logits": logits(ROAD, 3.0)[None]}, lambda _: {"occupancy_logits": logits(ROAD)[None]}, LEVEL)
    for _ in range(EVERY + 1):
        np.testing.assert_array_equal(probe({})["occupancy_logits"][0], logits(ROAD, 3.0))
    assert probe.report()["samples"] == 2
