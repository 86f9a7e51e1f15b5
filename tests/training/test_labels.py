from __future__ import annotations

import numpy as np
import pytest

from pipeline.dataset.records import Boxes
from pipeline.errors import DataError
from pipeline.taxonomy import OCCUPANCY_FREE
from pipeline.training.labels import UNSEEN, LabelStore, available_tasks, box_labels, point_classes
from pipeline.training.priors import log_frequency


def boxes(class_id: list[int], lidar_points: list[int]) -> Boxes:
    count = len(class_id)
    names = tuple(str(number) for number in range(count))
    return Boxes(
        names, names, np.zeros((count, 3)), np.ones((count, 3)), np.zeros(count), np.zeros((count, 2)),
        np.array(class_id), np.array(lidar_points), np.zeros(count, dtype=np.int64), names,
    )  # fmt: skip


def test_only_boxes_a_detector_can_be_asked_for_are_kept() -> None:
    kept = box_labels(boxes([0, -1, 3, 5], [4, 9, 0, -1]))
    assert kept.class_id.tolist() == [0, 5]  # no class; no lidar point; -1 points means unknown


def test_lidar_points_get_the_class_of_their_voxel() -> None:
    occupancy = np.full((200, 200, 16), OCCUPANCY_FREE, dtype=np.uint8)
    occupancy[125, 100, 2] = 4  # x 10.0 to 10.4, y 0 to 0.4, z -0.2 to 0.2
    points_m = np.float32([[10.1, 0.1, 0.0], [10.1, 0.5, 0.0], [70.0, 0.0, 0.0]])
    assert point_classes(points_m, occupancy).tolist() == [4, UNSEEN, UNSEEN]
    assert point_classes(points_m, None).tolist() == [UNSEEN] * 3


def test_no_training_sample_is_an_error_that_says_where() -> None:
    with pytest.raises(DataError, match="data/index"):
        available_tasks(LabelStore(None, None), [], ("detection",))  # type: ignore[arg-type]


def test_frequencies_are_smoothed_and_sum_to_one() -> None:
    logs = log_frequency(np.array([[8.0, 0.0], [0.0, 0.0]]), axis=1)
    np.testing.assert_allclose(logs.exp().sum(dim=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(logs[1].exp(), 0.5, rtol=1e-6)  # nothing seen: even
    assert logs[0, 0] > logs[0, 1] > -10
