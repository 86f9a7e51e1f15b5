"""The picture of predictions: geometry, and equal bytes for equal input."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from pipeline.dataset.index import Index
from pipeline.dataset.records import Boxes, CameraFrame, SampleRecord
from pipeline.evaluation.pictures import TILE_PX, box_corners, box_edges_px, camera_mosaic, topmost, write_pictures
from pipeline.maps.store import MapStore, write_index
from pipeline.models.prediction import BoxPrediction, Prediction
from pipeline.taxonomy import OCCUPANCY_FREE

# Camera axes (x right, y down, z forward) in the ego frame, for a camera that looks ahead from 1.5 m.
FRONT = np.array([[0.0, 0, 1, 0], [-1, 0, 0, 0], [0, -1, 0, 1.5], [0, 0, 0, 1]])
INTRINSICS = np.array([[300.0, 0, 200], [0, 300, 112], [0, 0, 1]])


def boxes_at(x_m: float, y_m: float) -> BoxPrediction:
    return BoxPrediction(
        np.array([[x_m, y_m, 1.5]], np.float32), np.array([[2.0, 4.0, 1.6]], np.float32), np.zeros(1, np.float32), np.zeros((1, 2), np.float32),
        np.array([0]), np.array([0.9], np.float32),
    )  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> SampleRecord:
    path = tmp_path / "front.jpg"
    cv2.imwrite(str(path), np.zeros((225, 400, 3), np.uint8))
    nothing = Boxes(
        (), (), np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0), np.zeros((0, 2)), np.zeros(0, int), np.zeros(0, int), np.zeros(0, int), ()
    )
    camera = CameraFrame(path, 0, 400, 225, INTRINSICS, FRONT, np.eye(4))
    return SampleRecord("t", "s", "scene-1", 0, 0, "", "", "val", "here", np.eye(4), {"CAM_FRONT": camera}, None, nothing)


def test_corners_turn_with_the_heading() -> None:
    corners = box_corners(np.array([[1.0, 2.0, 0.0]]), np.array([[2.0, 4.0, 1.0]]), np.array([np.pi / 2]))[0]
    assert corners[0] == pytest.approx([1.0 - 1.0, 2.0 + 2.0, -0.5])  # front left of a box that faces +y
    assert corners[:, 0].min() == pytest.approx(0.0) and corners[:, 1].max() == pytest.approx(4.0)


def test_a_box_on_the_left_is_drawn_on_the_left_of_the_front_camera(record: SampleRecord) -> None:
    width, height = TILE_PX
    for y_m, side in ((3.0, slice(0, 200)), (-3.0, slice(200, 400))):
        mosaic = camera_mosaic(record, Prediction("t", boxes_at(15.0, y_m), None, None))
        front = mosaic[:height, width : 2 * width]
        assert front[:, side].any() and front.any(axis=(0, 2)).sum() == front[:, side].any(axis=(0, 2)).sum()
    assert (mosaic[:height, :width] == 128).all()  # a camera that is missing


def test_edges_are_cut_at_the_camera_and_dropped_behind_it(record: SampleRecord) -> None:
    projection = record.ego2img("CAM_FRONT")
    around = box_edges_px(projection, box_corners(np.array([[0.0, 3.0, 1.5]]), np.array([[2.0, 4.0, 1.6]]), np.zeros(1))[0])
    assert len(around) == 8  # the four edges of the rear face are behind
    assert np.isfinite(np.array(around)).all()
    assert box_edges_px(projection, box_corners(np.array([[-9.0, 0, 0]]), np.ones((1, 3)), np.zeros(1))[0]) == []


def test_topmost_class_of_a_column() -> None:
    grid = np.full((2, 2, 4), OCCUPANCY_FREE, np.uint8)
    grid[0, 0, :2] = (11, 4)
    grid[1, 1, 3] = 255
    assert topmost(grid).tolist() == [[4, OCCUPANCY_FREE], [OCCUPANCY_FREE, OCCUPANCY_FREE]]


def test_equal_input_gives_equal_bytes_without_a_software_tag(record: SampleRecord, minival_index: Index, tmp_path: Path) -> None:
    write_index(tmp_path / "maps", {"t": None})
    maps = MapStore.open(tmp_path / "maps")
    example = (record, Prediction("t", boxes_at(10.0, 0.0), None, None))
    for name in ("first.png", "second.png"):
        write_pictures(tmp_path / name, [example], minival_index, maps)
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()
    with Image.open(tmp_path / "first.png") as image:
        assert "Software" not in image.info
        assert image.width > 1200
