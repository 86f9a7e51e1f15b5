"""Turning or mirroring the world must move labels and cameras together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models.export import example_rig
from pipeline.training.augmentation import Augmentation, augment_ego2img, augment_labels, clip_polyline, occupancy_on_grid, photometric
from pipeline.training.labels import UNSEEN, BoxLabels, Labels, MapLines
from tests.models.tiny import tiny_config

RANGE_M = (-30.0, 30.0)
augmentations = st.builds(Augmentation, st.floats(-0.5, 0.5), st.booleans())
points = st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20), st.floats(0, 3)), min_size=1, max_size=5)


def labels_at(centers_m: np.ndarray, yaw: float = 0.3) -> Labels:
    count = len(centers_m)
    velocity = np.tile(np.float32([np.cos(yaw), np.sin(yaw)]), (count, 1))
    boxes = BoxLabels(centers_m, np.ones((count, 3), np.float32), np.full(count, yaw, np.float32), velocity, np.zeros(count, np.int64))
    lines = MapLines([np.float32([[-5, 1], [5, 2]])], np.array([0]), np.array([False]))
    return Labels(boxes, lines, None, centers_m, np.zeros(len(centers_m), np.uint8))


def pixels(projection: np.ndarray, points_m: np.ndarray) -> np.ndarray:
    image = points_m @ projection[:3, :3].T + projection[:3, 3]
    return image


@settings(deadline=None, max_examples=50)
@given(augmentations, points)
def test_projection_of_augmented_labels_is_the_augmented_projection(augmentation: Augmentation, centers: list) -> None:
    config = tiny_config()
    centers_m, width = np.float32(centers), config.image_size[1]
    rig = example_rig(config).astype(np.float64)
    moved = augment_labels(labels_at(centers_m), augmentation, RANGE_M, RANGE_M).boxes.centers_m
    for projection, augmented in zip(rig, augment_ego2img(rig, augmentation, width), strict=True):
        before, after = pixels(projection, centers_m), pixels(augmented, moved)
        np.testing.assert_allclose(after[:, 2], before[:, 2], atol=1e-3)
        expected = (width - 1) * before[:, 2] - before[:, 0] if augmentation.flip else before[:, 0]
        np.testing.assert_allclose(after[:, 0], expected, atol=0.1)
        np.testing.assert_allclose(after[:, 1], before[:, 1], atol=0.1)


@settings(deadline=None, max_examples=50)
@given(augmentations)
def test_heading_and_velocity_turn_together(augmentation: Augmentation) -> None:
    boxes = augment_labels(labels_at(np.zeros((1, 3), np.float32)), augmentation, RANGE_M, RANGE_M).boxes
    np.testing.assert_allclose(boxes.velocity_mps[0], [np.cos(boxes.yaw_rad[0]), np.sin(boxes.yaw_rad[0])], atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(augmentations)
def test_turning_back_restores_boxes_and_lines(augmentation: Augmentation) -> None:
    labels = labels_at(np.float32([[3, 4, 1]]))
    there = augment_labels(labels, augmentation, RANGE_M, RANGE_M)
    # A mirrored frame turns the other way round: the inverse of (turn, mirror) is (turn the same way, mirror).
    back = augment_labels(
        there, Augmentation(augmentation.rotation_rad if augmentation.flip else -augmentation.rotation_rad, augmentation.flip), RANGE_M, RANGE_M
    )
    np.testing.assert_allclose(back.boxes.centers_m, labels.boxes.centers_m, atol=1e-4)
    np.testing.assert_allclose(back.boxes.yaw_rad, labels.boxes.yaw_rad, atol=1e-4)
    assert labels.map is not None
    assert back.map is not None
    np.testing.assert_allclose(back.map.points_m[0], labels.map.points_m[0], atol=1e-4)


def test_a_line_that_leaves_the_range_is_clipped_not_dropped() -> None:
    pieces = clip_polyline(np.float32([[0, 0], [40, 0], [40, 10], [0, 10]]), RANGE_M, RANGE_M)
    assert [piece.tolist() for piece in pieces] == [[[0, 0], [30, 0]], [[30, 10], [0, 10]]]
    assert clip_polyline(np.float32([[40, 0], [50, 0]]), RANGE_M, RANGE_M) == []


def test_a_clipped_ring_is_no_longer_closed() -> None:
    ring = np.float32([[28, 0], [29, 0], [29, 3], [28, 3], [28, 0]])
    labels = Labels(labels_at(np.zeros((0, 3), np.float32)).boxes, MapLines([ring], np.array([1]), np.array([True])), None, None, None)
    whole = augment_labels(labels, Augmentation(), RANGE_M, RANGE_M).map
    turned = augment_labels(labels, Augmentation(), (-30.0, 28.5), RANGE_M).map
    assert whole is not None
    assert turned is not None
    assert whole.closed.tolist() == [True]
    assert not turned.closed.any()


@pytest.mark.parametrize("flip", [False, True])
def test_occupancy_moves_like_a_box(flip: bool) -> None:
    semantics = np.full((200, 200, 16), 17, dtype=np.uint8)
    voxel = np.float32([12.2, 5.4, 0.0])
    index = np.floor((voxel - [-40, -40, -1]) / 0.4).astype(int)
    semantics[index[0] - 1 : index[0] + 2, index[1] - 1 : index[1] + 2, index[2]] = 4
    augmentation = Augmentation(0.2, flip)
    centers = np.float32((np.arange(100) + 0.5) * 0.8 - 40)
    ranges = ((-40.0, 40.0), (-40.0, 40.0), (-1.0, 5.4))
    grid = occupancy_on_grid(semantics, augmentation, (centers, centers, np.float32(np.arange(16) * 0.4 - 0.8)), ranges)
    found = np.argwhere(grid == 4).mean(axis=0)
    expected = augmentation.matrix[:2, :2] @ voxel[:2]
    np.testing.assert_allclose([centers[0] + 0.8 * found[1], centers[0] + 0.8 * found[0]], expected, atol=0.5)
    assert (grid[0, 0] == UNSEEN).all()  # the turned corner lies outside the labels


def test_photometric_changes_brightness_not_shape() -> None:
    images = np.full((6, 4, 5, 3), 100, dtype=np.uint8)
    changed = photometric(images, 0.2, np.random.default_rng(0))
    assert changed.shape == images.shape
    assert changed.dtype == np.uint8
    assert len(np.unique(changed[..., 0])) == 1
    assert (photometric(images, 0.0, np.random.default_rng(0)) == images).all()
