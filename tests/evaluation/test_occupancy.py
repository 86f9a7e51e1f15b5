"""Occupancy IoU on worked cases and on the real Occ3D label."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset.occupancy import read_labels
from pipeline.errors import ModelError
from pipeline.evaluation.occupancy import NOT_COVERED, OCC3D, GridSpec, OccupancyEvaluator, lookup, on_label_grid, resample_labels
from pipeline.models.prediction import OccupancyGrid, OccupancyPrediction
from pipeline.taxonomy import OCCUPANCY_CLASSES, OCCUPANCY_FREE

CAR, ROAD = OCCUPANCY_CLASSES.index("car"), OCCUPANCY_CLASSES.index("driveable_surface")
EVERYWHERE = np.ones(OCC3D.shape, dtype=bool)
# The three levels of the default head (system description A1): widest first.
LEVELS = (
    ((128, 128, 8), 40.0, (-1.0, 2.2)),
    ((64, 64, 16), 20.0, (-1.0, 3.0)),
    ((32, 32, 32), 10.0, (-1.0, 3.8)),
)


def free_grid() -> np.ndarray:
    return np.full(OCC3D.shape, OCCUPANCY_FREE, dtype=np.uint8)


def as_prediction(labels: np.ndarray) -> OccupancyPrediction:
    return OccupancyPrediction([OccupancyGrid(labels, *OCC3D.ranges_m)])


def constant_levels(values: tuple[int, int, int]) -> OccupancyPrediction:
    return OccupancyPrediction(
        [
            OccupancyGrid(np.full(shape, value, np.uint8), (-half, half), (-half, half), z_range)
            for value, (shape, half, z_range) in zip(values, LEVELS, strict=True)
        ]
    )


def evaluate(truth: np.ndarray, prediction: OccupancyPrediction, mask: np.ndarray = EVERYWHERE) -> dict:
    evaluator = OccupancyEvaluator()
    evaluator.add(truth, mask, prediction)
    return evaluator.result()


def test_iou_of_overlapping_blocks() -> None:
    truth, found = free_grid(), free_grid()
    truth[:10, 0, 0] = CAR
    found[5:20, 0, 0] = CAR  # 5 in common, 20 in the union
    truth[:, 5, 0] = found[:, 5, 0] = ROAD
    result = evaluate(truth, as_prediction(found))
    assert result["per_class"]["car"] == {"IoU": 0.25, "ground_truth": 10, "predictions": 15}
    assert result["mIoU"] == pytest.approx((0.25 + 1.0) / 2)
    assert result["geometric_IoU"] == pytest.approx(205 / 220)
    assert result["per_class"]["bus"]["IoU"] is None


def test_only_voxels_that_a_camera_sees_count_in_the_headline() -> None:
    truth, found, seen = free_grid(), free_grid(), EVERYWHERE.copy()
    truth[:10, 0, 0] = CAR
    found[:5, 0, 0] = CAR
    seen[5:10, 0, 0] = False
    result = evaluate(truth, as_prediction(found), seen)
    assert result["mIoU"] == 1.0
    assert result["mIoU_all_voxels"] == 0.5


def test_a_class_that_never_occurs_does_not_enter_the_mean() -> None:
    truth, found = free_grid(), free_grid()
    truth[:4, 0, 0] = found[:4, 0, 0] = CAR
    found[10:, 0, 0] = ROAD
    assert evaluate(truth, as_prediction(found))["mIoU"] == 1.0
    assert evaluate(free_grid(), as_prediction(found))["mIoU"] is None


def test_the_finest_level_that_covers_a_voxel_wins() -> None:
    merged = on_label_grid(constant_levels((1, 2, 3)))
    x, y = 100, 100  # the voxel whose corner is the ego origin
    assert merged[x, y, 0] == 3
    assert merged[x + 24, y, 0] == 3 and merged[x + 25, y, 0] == 2  # 10 m
    assert merged[x + 49, y, 0] == 2 and merged[x + 50, y, 0] == 1  # 20 m
    # Above the widest level (2.2 m), which is eight voxels high, only the finer ones cover.
    assert merged[x, y, 8] == 3 and merged[x + 60, y, 8] == NOT_COVERED and merged[x + 30, y, 8] == 2


def test_voxels_outside_every_level_are_ignored() -> None:
    truth = free_grid()
    truth[100, 100, :] = CAR
    one_voxel = OccupancyGrid(np.full((10, 10, 1), CAR, np.uint8), (0.0, 0.4), (0.0, 0.4), (-1.0, -0.6))
    result = evaluate(truth, OccupancyPrediction([one_voxel]))
    assert result["per_class"]["car"] == {"IoU": 1.0, "ground_truth": 1, "predictions": 1}


def test_levels_are_scored_on_their_own_grids() -> None:
    truth = np.full(OCC3D.shape, CAR, np.uint8)
    result = evaluate(truth, constant_levels((CAR, OCCUPANCY_FREE, CAR)))
    assert [level["mIoU"] for level in result["per_level"]] == [1.0, 0.0, 1.0]
    assert result["per_level"][0]["grid"]["shape"] == [128, 128, 8]
    assert result["per_level"][2]["grid"]["voxel_m"] == pytest.approx([0.625, 0.625, 0.15])


def test_a_real_label_against_itself(shared: Path) -> None:
    path = next((shared / "data" / "occ3d").rglob("labels.npz"))
    labels = read_labels(path)
    semantics, mask = labels.semantics, labels.mask_camera
    result = evaluate(semantics, as_prediction(semantics), mask)
    assert result["mIoU"] == 1.0
    assert 0 < sum(row["ground_truth"] for row in result["per_class"].values()) == int(mask.sum())


def test_a_label_that_is_no_class_is_refused() -> None:
    with pytest.raises(ModelError, match="label 18 is no class"):
        evaluate(free_grid(), constant_levels((0, 18, 0)))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8), st.floats(1.0, 40.0))
def test_lookup_is_the_voxel_around_the_centre(nx: int, ny: int, nz: int, half_m: float) -> None:
    spec = GridSpec((nx, ny, nz), ((-half_m, half_m), (-half_m / 2, half_m / 2), (-1.0, 3.0)))
    index = lookup(spec, OCC3D)
    centers = [low + (np.arange(n) + 0.5) * (high - low) / n for n, (low, high) in zip(spec.shape, spec.ranges_m, strict=True)]
    for axis, (low, width) in enumerate(((-40.0, 0.4), (-40.0, 0.4), (-1.0, 0.4))):
        found = np.moveaxis(np.stack(np.unravel_index(index, OCC3D.shape))[axis], axis, 0).reshape(spec.shape[axis], -1)[:, 0]
        assert (np.abs(low + (found + 0.5) * width - centers[axis]) <= width / 2 + 1e-6).all()
    labels = np.arange(np.prod(OCC3D.shape), dtype=np.uint64).reshape(OCC3D.shape).astype(np.uint8)
    assert np.array_equal(resample_labels(labels, OCC3D, spec), labels.reshape(-1)[index])
