from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import DetectionConfig
from pipeline.models.instance_bank import InstanceBank, move_boxes

CONFIG = DetectionConfig(anchors=10, temporal_instances=4, updated_instances=2, max_misses=3)
FIRST_SLOT = 6


def pose(x_m: float = 0.0, yaw: float = 0.0) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:2, :2] = [[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]]
    matrix[0, 3] = x_m
    return matrix


def box(x_m: float, y_m: float = 0.0, vx: float = 0.0) -> np.ndarray:
    return np.array([x_m, y_m, 1, 0, 0, 0, 0, 1, vx, 0, 0], dtype=np.float32)


def new_bank() -> InstanceBank:
    anchors = np.stack([box(100.0 + number) for number in range(10)])
    return InstanceBank(CONFIG, anchors, channels=2)


def show(bank: InstanceBank, instances: list[tuple[int, float, float]], time_us: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """One frame in which the instances (index, x, score) are found and all others have no confidence."""
    anchors, features = bank.inputs(pose(), time_us)
    boxes, scores = anchors.copy(), np.zeros(10, dtype=np.float32)
    for index, x_m, score in instances:
        boxes[index], scores[index] = box(x_m), score
    bank.update(boxes, scores, np.full((10, 2), 5.0, dtype=np.float32))
    return anchors, features


def test_an_empty_bank_shows_the_anchors_and_no_features() -> None:
    anchors, features = new_bank().inputs(pose(), 0)
    np.testing.assert_array_equal(anchors[:, 0], 100.0 + np.arange(10))
    assert (features == 0).all()


def test_only_the_most_confident_are_remembered() -> None:
    bank = new_bank()
    show(bank, [(0, 10.0, 0.9), (1, 20.0, 0.8), (2, 30.0, 0.7)])
    anchors, features = bank.inputs(pose(), 0)
    assert sorted(anchors[FIRST_SLOT:][bank.occupied, 0]) == [10.0, 20.0]
    assert (features[FIRST_SLOT:][bank.occupied] == 5.0).all()


def test_two_instances_on_one_object_are_remembered_once() -> None:
    bank = new_bank()
    show(bank, [(0, 10.0, 0.9), (1, 10.3, 0.8), (2, 30.0, 0.7)])
    anchors, _ = bank.inputs(pose(), 0)
    assert sorted(anchors[FIRST_SLOT:][bank.occupied, 0]) == [10.0, 30.0]


def test_others_are_cached_and_dropped_after_three_misses() -> None:
    bank = new_bank()
    show(bank, [(0, 10.0, 0.9)])
    for _ in range(CONFIG.max_misses):
        show(bank, [(1, 40.0, 0.9)])
        assert 10.0 in bank.inputs(pose(), 0)[0][:, 0]
    show(bank, [(1, 40.0, 0.9)])
    assert 10.0 not in bank.inputs(pose(), 0)[0][:, 0]


def test_an_object_keeps_its_slot() -> None:
    bank = new_bank()
    show(bank, [(0, 10.0, 0.9)])
    slot = FIRST_SLOT + int(np.flatnonzero(bank.occupied)[0])
    show(bank, [(slot, 10.5, 0.9)])
    show(bank, [(3, 11.0, 0.9)])  # now a fixed anchor found it
    assert bank.occupied.sum() == 1
    assert bank.inputs(pose(), 0)[0][slot, 0] == 11.0


def test_ego_motion_and_velocity_are_compensated() -> None:
    bank = new_bank()
    anchors, _ = bank.inputs(pose(0.0), 0)
    boxes, scores = anchors.copy(), np.zeros(10, dtype=np.float32)
    boxes[0], scores[0] = box(20.0, vx=4.0), 0.9
    bank.update(boxes, scores, np.zeros((10, 2), dtype=np.float32))
    anchors, _ = bank.inputs(pose(3.0), 500_000)
    # Half a second: the object went 2 m ahead, the ego 3 m.
    assert anchors[FIRST_SLOT:][bank.occupied, 0] == pytest.approx([19.0])


def test_turning_ego_turns_position_heading_and_velocity() -> None:
    moved = move_boxes(box(10.0, vx=2.0)[None], np.linalg.inv(pose(yaw=np.pi / 2)), 0.0)[0]
    np.testing.assert_allclose(moved[:2], [0.0, -10.0], atol=1e-5)
    np.testing.assert_allclose(moved[6:8], [-1.0, 0.0], atol=1e-6)  # sin, cos: it now heads to the right
    np.testing.assert_allclose(moved[8:10], [0.0, -2.0], atol=1e-6)


def test_state_is_restored() -> None:
    bank, other = new_bank(), new_bank()
    show(bank, [(0, 10.0, 0.9)])
    other.restore(bank.state())
    for mine, theirs in zip(bank.inputs(pose(1.0), 100_000), other.inputs(pose(1.0), 100_000), strict=True):
        np.testing.assert_array_equal(mine, theirs)
