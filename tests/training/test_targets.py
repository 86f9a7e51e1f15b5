"""Targets must lie where the labels are: in the image, in the BEV grid and in the depth bins."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.models.export import example_rig
from pipeline.models.heads.detection import POSITION_STEP_M
from pipeline.models.point_maps import bev_cell_centers, depth_to_bin
from pipeline.taxonomy import DETECTION_CLASSES, OCCUPANCY_FREE
from pipeline.training.augmentation import Augmentation
from pipeline.training.image_targets import make_image_targets
from pipeline.training.labels import UNSEEN, BoxLabels, Labels, MapLines
from pipeline.training.targets import FREE_THINNING, Targets, make_targets, thin_free
from tests.models.tiny import tiny_config

CAR = DETECTION_CLASSES.index("car")
CENTER_M = np.float32([9.0, 1.0, 0.8])
FRONT = 1


@pytest.fixture(scope="module")
def targets() -> Targets:
    config = tiny_config()
    boxes = BoxLabels(CENTER_M[None], np.float32([[2.0, 4.0, 1.6]]), np.float32([0.5]), np.float32([[np.nan, np.nan]]), np.array([CAR]))
    lines = MapLines([np.float32([[-14, 3.0], [14, 3.0]])], np.array([2]), np.array([False]))
    semantics = np.full((200, 200, 16), OCCUPANCY_FREE, dtype=np.uint8)
    labels = Labels(boxes, lines, semantics, np.float32([[9.0, 1.0, 0.8], [12.0, -6.0, 0.8]]), np.uint8([4, 11]))
    return make_targets(labels, Augmentation(), make_image_targets(labels, example_rig(config), config), config, np.random.default_rng(0))


def test_box_peak_is_at_its_bev_cell(targets: Targets) -> None:
    x, y = bev_cell_centers(tiny_config().view)
    row, column = np.unravel_index(int(targets.bev.heat[CAR].argmax()), targets.bev.heat[CAR].shape)
    assert (abs(x[column] - CENTER_M[0]), abs(y[row] - CENTER_M[1])) <= (1.01, 1.01)
    assert targets.bev.heat[:CAR].sum() + targets.bev.heat[CAR + 1 :].sum() == 0


def test_box_peak_is_at_its_pixel(targets: Targets) -> None:
    config = tiny_config()
    u, v, depth_m, _ = example_rig(config)[FRONT] @ np.append(CENTER_M, 1.0)
    row, column = np.unravel_index(int(targets.image.heat[FRONT, CAR].argmax()), targets.image.heat[FRONT, CAR].shape)
    stride = config.view.depth_stride
    assert (column, row) == (int((u / depth_m + 0.5) // stride), int((v / depth_m + 0.5) // stride))


def test_depth_is_that_of_a_point_in_the_cell(targets: Targets) -> None:
    config = tiny_config()
    assert targets.image.depth_bin is not None
    u, v, depth_m, _ = example_rig(config)[FRONT] @ np.append(CENTER_M, 1.0)
    stride = config.view.depth_stride
    found = targets.image.depth_bin[FRONT, int((v / depth_m + 0.5) // stride), int((u / depth_m + 0.5) // stride)]
    assert float(found) == pytest.approx(float(depth_to_bin(np.float32([depth_m]), config.view)[0]), abs=1e-4)


def test_line_is_drawn_along_its_row(targets: Targets) -> None:
    _, y = bev_cell_centers(tiny_config().view)
    assert targets.bev.lines is not None
    rows = np.flatnonzero(targets.bev.lines[2].sum(dim=1).numpy() > 10)
    assert len(rows) == 1
    assert abs(y[rows[0]] - 3.0) <= 1.01
    assert targets.bev.lines[:2].sum() == 0


def test_box_state_holds_logarithms_and_heading(targets: Targets) -> None:
    state = targets.boxes[0].numpy()
    np.testing.assert_allclose(state[3:8], [np.log(2.0), np.log(4.0), np.log(1.6), np.sin(0.5), np.cos(0.5)], rtol=1e-5)
    assert np.isnan(state[8:10]).all()


def test_thinning_drops_only_free_voxels() -> None:
    labels = np.array([OCCUPANCY_FREE] * 4000 + [4] * 100, dtype=np.uint8)
    thinned = thin_free(labels, np.random.default_rng(0))
    assert (thinned[4000:] == 4).all()
    assert np.mean(thinned[:4000] == OCCUPANCY_FREE) == pytest.approx(1 / FREE_THINNING, abs=0.05)
    assert set(np.unique(thinned)) == {4, OCCUPANCY_FREE, UNSEEN}


def test_fields_point_to_the_nearest_box_and_line(targets: Targets) -> None:
    x, y = bev_cell_centers(tiny_config().view)
    row, column = int(np.abs(y - 3.0).argmin()), int(np.abs(x - 9.0).argmin())
    way = targets.bev.boxes[:2, row, column].numpy() * POSITION_STEP_M
    np.testing.assert_allclose([x[column] + way[0], y[row] + way[1]], CENTER_M[:2], atol=1e-4)
    assert bool(targets.bev.boxes[:, 0, 0].isnan().all())  # far from the box
    assert targets.bev.pull is not None
    pull = targets.bev.pull[2, :, row, column].numpy()
    assert y[row] + pull[1] == pytest.approx(3.0, abs=1e-4)
    assert abs(pull[0]) < 0.5
    assert bool(targets.bev.pull[0].isnan().all())  # no divider in this sample
