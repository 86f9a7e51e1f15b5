from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import DetectionConfig, MapConfig, ModelConfig
from pipeline.errors import ModelError
from pipeline.models import bspline
from pipeline.models.anchors import box_anchors, polyline_anchors, resample
from pipeline.models.decode import build_map, decode_boxes, decode_map, decode_occupancy, sigmoid
from pipeline.taxonomy import DETECTION_CLASSES, OCCUPANCY_FREE

CAR, PEDESTRIAN = DETECTION_CLASSES.index("car"), DETECTION_CLASSES.index("pedestrian")


def state(x_m: float, y_m: float = 0.0) -> list[float]:
    return [x_m, y_m, 1.0, np.log(2.0), np.log(4.5), np.log(1.5), 1.0, 0.0, 3.0, -1.0, 0.0]


def test_box_state_is_read_in_nuscenes_order() -> None:
    logits = np.full((1, 10), -9.0, dtype=np.float32)
    logits[0, CAR] = 2.0
    boxes = decode_boxes(logits, np.float32([state(7.0, -2.0)]), DetectionConfig())
    np.testing.assert_allclose(boxes.center_m, [[7.0, -2.0, 1.0]])
    np.testing.assert_allclose(boxes.size_wlh_m, [[2.0, 4.5, 1.5]], rtol=1e-6)
    assert boxes.yaw_rad[0] == pytest.approx(np.pi / 2)
    np.testing.assert_allclose(boxes.velocity_mps, [[3.0, -1.0]])
    assert (boxes.class_id[0], boxes.score[0]) == (CAR, pytest.approx(1 / (1 + np.exp(-2.0))))


def test_near_boxes_of_one_class_are_suppressed_and_of_another_are_not() -> None:
    logits = np.full((3, 10), -9.0, dtype=np.float32)
    logits[0, CAR], logits[1, CAR], logits[2, PEDESTRIAN] = 2.0, 1.0, 0.5
    boxes = decode_boxes(logits, np.float32([state(7.0), state(7.5), state(7.2)]), DetectionConfig())
    assert boxes.class_id.tolist() == [CAR, PEDESTRIAN]


def test_map_element_follows_its_control_points() -> None:
    control = np.stack([np.linspace(-10, 10, 6), np.full(6, 3.0), np.zeros(6)], axis=-1).reshape(1, 18)
    states = np.concatenate([control, [[-5.0, 5.0]]], axis=1).astype(np.float32)
    logits = np.float32([[3.0, -3.0, -3.0]])
    found = decode_map(logits, states, MapConfig(), polygon_corners=4)
    np.testing.assert_allclose(found.polylines[0][[0, -1]], [[-10, 3], [10, 3]], atol=1e-5)
    assert np.abs(found.polylines[0][:, 1] - 3.0).max() < 1e-5
    assert found.polygons.shape == (0, 4, 2)
    assert found.topology_matrix.shape == (len(found.line_segments), 0)


def test_topology_matrix_says_which_segments_belong_to_which_polygon() -> None:
    square = np.float32([[0, 0], [2, 0], [2, 2], [0, 2], [0, 0]])
    line = np.float32([[5, 0], [6, 0], [7, 0], [8, 0], [9, 0]])
    found = build_map(np.stack([line, square]), np.array([0, 1]), np.float32([0.9, 0.8]), np.array([False, True]), polygon_corners=4)
    np.testing.assert_array_equal(found.polygons[0], square[:4])
    assert found.topology_matrix[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.segment_line.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.polygon_line.tolist() == [1]


def test_a_line_that_ends_on_a_polygon_belongs_to_it() -> None:
    square = np.float32([[0, 0], [2, 0], [2, 2], [0, 2], [0, 0]])
    line = np.float32([[2.3, 1], [4, 1], [6, 1], [8, 1], [9, 1]])
    found = build_map(np.stack([line, square]), np.array([0, 1]), np.float32([0.9, 0.8]), np.array([False, True]), polygon_corners=4)
    assert found.topology_matrix[:4, 0].tolist() == [1, 0, 0, 0]


def test_a_map_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ModelError, match="not finite"):
        build_map(np.full((1, 5, 2), np.nan, np.float32), np.array([1]), np.float32([0.9]), np.array([True]), polygon_corners=4)


def test_occupancy_axes_are_x_y_z(config: ModelConfig) -> None:
    (nx, ny, nz), (mx, my, mz) = (level.cells for level in config.occupancy.levels)
    logits = np.zeros((nx * ny * nz + mx * my * mz, 18), dtype=np.float32)
    logits[:, OCCUPANCY_FREE] = 1.0
    x, y, z = 5, 2, 3
    logits[(y * nx + x) * nz + z, 4] = 2.0
    levels = decode_occupancy(logits, config).levels
    assert levels[0].labels.shape == (nx, ny, nz)
    assert levels[1].labels.shape == (mx, my, mz)
    assert np.argwhere(levels[0].labels == 4).tolist() == [[x, y, z]]


def test_sigmoid_does_not_overflow() -> None:
    np.testing.assert_allclose(sigmoid(np.float32([-1e4, 0.0, 1e4])), [0.0, 0.5, 1.0])


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_spline_basis_sums_to_one_and_fit_undoes_it(degree: int) -> None:
    basis, fit = bspline.basis(16, degree), bspline.fit_matrix(16, degree)
    np.testing.assert_allclose(basis.sum(axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(fit @ basis, np.eye(6), atol=1e-4)
    assert basis[0, 0] == basis[-1, -1] == 1.0


def test_anchors_are_deterministic_and_cover_the_labels(config: ModelConfig) -> None:
    random = np.random.default_rng(0)
    centers = np.concatenate([random.normal(size=(200, 3)) + offset for offset in ([10, 0, 0], [-10, 5, 0])]).astype(np.float32)
    anchors = box_anchors(config, centers, seed=1)
    np.testing.assert_array_equal(anchors, box_anchors(config, centers, seed=1))
    distance = np.linalg.norm(centers[:, None, :2] - anchors[None, :16, :2], axis=-1).min(axis=1)
    assert np.median(distance) < 1.0


def test_few_labels_still_give_all_anchors(config: ModelConfig) -> None:
    line = np.float32([[0, 0], [10, 0]])
    assert box_anchors(config, np.zeros((1, 3), dtype=np.float32), 0).shape == (24, 11)
    anchors = polyline_anchors(config, [line], 0)
    assert anchors.shape == (12, 6, 3)
    np.testing.assert_allclose(bspline.basis(5, config.map.spline_degree) @ anchors[0, :, :2], resample(line, 5), atol=1e-4)
