"""Predictions as a picture for people: six cameras with the predicted boxes, and the scene from above as labelled and as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from pipeline.dataset.geometry import FloatArray, transform
from pipeline.dataset.images import load_image
from pipeline.dataset.index import Index
from pipeline.dataset.occupancy import load_labels
from pipeline.dataset.records import SampleRecord
from pipeline.evaluation.chamfer import Points
from pipeline.evaluation.occupancy import CLASSES, OCC3D, on_label_grid
from pipeline.figures import new_figure, save_figure
from pipeline.maps.store import MapStore
from pipeline.models.prediction import Prediction
from pipeline.taxonomy import DETECTION_CLASSES, MAP_CLASSES, OCCUPANCY_CLASSES, OCCUPANCY_FREE

# Rows of the camera mosaic as a driver would see them.
MOSAIC = (("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT"), ("CAM_BACK_LEFT", "CAM_BACK", "CAM_BACK_RIGHT"))
TILE_PX = (400, 225)  # width, height
SHOWN_SCORE = 0.3
BEV_RANGE_M = 40.0
NEAR_M = 0.2  # edges are cut where they come closer to the camera than this

BOX_COLORS = dict(
    zip(
        DETECTION_CLASSES,
        ("#e4572e", "#f3a712", "#d6a2e8", "#8d6a9f", "#a4632f", "#2e86ab", "#1b998b", "#3ddc97", "#ff8c42", "#7f8c8d"),
        strict=True,
    )
)
MAP_COLORS = dict(zip(MAP_CLASSES, ("#d1495b", "#b5179e", "#2b9348"), strict=True))
_OCCUPANCY_COLORS = {
    "driveable_surface": "#d9dbe0", "other_flat": "#cfc6d8", "sidewalk": "#e7d3c0", "terrain": "#d5e3c0", "manmade": "#c9b9a6",
    "vegetation": "#b5cfa3", "free": "#ffffff",
}  # fmt: skip


def write_pictures(path: Path, examples: Sequence[tuple[SampleRecord, Prediction]], index: Index, maps: MapStore) -> None:
    """Write one PNG with a row for each example. Equal inputs give equal bytes: no time stamp and no version is stored in it."""
    figure = new_figure(15.5, 0.4 + 3.5 * max(1, len(examples)))
    if not examples:
        figure.text(0.5, 0.5, "no example was asked for (evaluate.pictures: 0)", ha="center")
    grid = figure.add_gridspec(max(1, len(examples)), 3, width_ratios=(2.67, 1, 1))
    for row, (record, prediction) in enumerate(examples):
        cameras, labels, predicted = (figure.add_subplot(grid[row, column]) for column in range(3))
        cameras.imshow(camera_mosaic(record, prediction))
        cameras.set_title(f"{record.scene_name}, key frame {record.index_in_scene}: predicted boxes, score from {SHOWN_SCORE}", fontsize=9)
        cameras.axis("off")
        _draw_bev(labels, label_scene(record, index, maps), "labels")
        _draw_bev(predicted, predicted_scene(prediction), f"prediction, score from {SHOWN_SCORE}")
    _legend(figure)
    save_figure(figure, path)


@dataclass(frozen=True)
class BevScene:
    """What is drawn from above, BEV frame: outlines (N,4,2) and heading tips (N,2) of boxes with classes, map lines with classes, labels."""

    footprints_m: FloatArray
    tips_m: FloatArray
    box_class: NDArray[np.int64]
    lines_m: list[FloatArray]
    line_class: NDArray[np.int64]
    occupancy: NDArray[np.uint8] | None  # (200,200) topmost class of each column


def label_scene(record: SampleRecord, index: Index, maps: MapStore) -> BevScene:
    """The labels of a sample."""
    boxes = record.boxes
    known = boxes.class_id >= 0
    corners = box_corners(boxes.center_m[known], boxes.size_wlh_m[known], boxes.yaw_rad[known])
    label, grid = maps.get(record.token), load_labels(index.dataroot, record)
    lines = [] if label is None else [line.astype(np.float64) for line in label.polylines]
    line_class = np.zeros(0, np.int64) if label is None else label.polyline_class
    top = None if grid is None else topmost(grid.semantics)
    return BevScene(corners[:, :4, :2], _tips(corners), boxes.class_id[known], lines, line_class, top)


def predicted_scene(prediction: Prediction) -> BevScene:
    """The predictions of a sample that are sure enough to be shown."""
    corners, box_class = np.zeros((0, 8, 3)), np.zeros(0, np.int64)
    if prediction.boxes is not None:
        shown = prediction.boxes.score >= SHOWN_SCORE
        corners = box_corners(prediction.boxes.center_m[shown], prediction.boxes.size_wlh_m[shown], prediction.boxes.yaw_rad[shown])
        box_class = prediction.boxes.class_id[shown]
    lines: list[FloatArray] = []
    line_class = np.zeros(0, np.int64)
    if prediction.map is not None:
        kept = prediction.map.score >= SHOWN_SCORE
        lines, line_class = [line.astype(np.float64) for line in prediction.map.polylines[kept]], prediction.map.class_id[kept]
    top = None if prediction.occupancy is None else topmost(on_label_grid(prediction.occupancy))
    return BevScene(corners[:, :4, :2], _tips(corners), box_class, lines, line_class, top)


def box_corners(center_m: Points, size_wlh_m: Points, yaw_rad: Points) -> FloatArray:
    """Corners (N,8,3) of boxes in their frame: the four of the bottom counter-clockwise from front left, then the four above them."""
    x = np.array([1, -1, -1, 1, 1, -1, -1, 1]) / 2.0
    y = np.array([1, 1, -1, -1, 1, 1, -1, -1]) / 2.0
    z = np.array([-1, -1, -1, -1, 1, 1, 1, 1]) / 2.0
    width, length, height = (np.asarray(size_wlh_m, dtype=np.float64)[:, [axis]] for axis in range(3))
    cos, sin = np.cos(yaw_rad)[:, None], np.sin(yaw_rad)[:, None]
    along, across = length * x, width * y
    corners = np.stack([cos * along - sin * across, sin * along + cos * across, height * z], axis=2)
    return corners + np.asarray(center_m, dtype=np.float64)[:, None]


_EDGES = ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7))


def _tips(corners_m: FloatArray) -> FloatArray:
    """Middle of the front edge of each box (N,2)."""
    return (corners_m[:, 0, :2] + corners_m[:, 3, :2]) / 2.0


def camera_mosaic(record: SampleRecord, prediction: Prediction) -> NDArray[np.uint8]:
    """The six camera images (450,1200,3) RGB with the predicted boxes; grey where a camera is missing."""
    width, height = TILE_PX
    rows = []
    for channels in MOSAIC:
        tiles = [_camera_tile(record, prediction, channel) for channel in channels]
        rows.append(np.concatenate(tiles, axis=1))
    return np.concatenate(rows, axis=0).reshape(2 * height, 3 * width, 3)


def _camera_tile(record: SampleRecord, prediction: Prediction, channel: str) -> NDArray[np.uint8]:
    width, height = TILE_PX
    camera = record.cameras.get(channel)
    if camera is None:
        return np.full((height, width, 3), 128, np.uint8)
    tile = np.ascontiguousarray(cv2.resize(load_image(camera.path), TILE_PX, interpolation=cv2.INTER_AREA).astype(np.uint8))
    if prediction.boxes is None:
        return tile
    boxes = prediction.boxes
    scale = np.diag([width / camera.width, height / camera.height, 1.0, 1.0])
    shown = np.flatnonzero(boxes.score >= SHOWN_SCORE)[::-1]  # best score last, so that it is on top
    corners = box_corners(boxes.center_m[shown], boxes.size_wlh_m[shown], boxes.yaw_rad[shown])
    for box, class_id in zip(corners, boxes.class_id[shown], strict=True):
        for start, end in box_edges_px(scale @ record.ego2img(channel), box):
            cv2.line(tile, _pixel(start), _pixel(end), _rgb(BOX_COLORS[DETECTION_CLASSES[class_id]]), 1, cv2.LINE_AA)
    return tile


def box_edges_px(ego2img: FloatArray, corners_m: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
    """End points in pixels of the edges of one box (8,3), cut at the near plane; edges behind the camera are left out."""
    projected = transform(ego2img, corners_m)  # pixel times depth, depth
    edges = []
    for a, b in _EDGES:
        start, end = projected[a], projected[b]
        if start[2] < NEAR_M and end[2] < NEAR_M:
            continue
        if start[2] < NEAR_M:
            start = end + (start - end) * (end[2] - NEAR_M) / (end[2] - start[2])
        elif end[2] < NEAR_M:
            end = start + (end - start) * (start[2] - NEAR_M) / (start[2] - end[2])
        edges.append((start[:2] / start[2], end[:2] / end[2]))
    return edges


def _pixel(point: FloatArray) -> tuple[int, int]:
    """Rounded, and limited to what OpenCV can draw."""
    x, y = np.clip(np.round(point), -10_000, 10_000).astype(int)
    return int(x), int(y)


def _rgb(color: str) -> tuple[int, int, int]:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def topmost(labels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Highest class of each column (200,200) that is not free, free where there is none; voxels without a prediction count as free."""
    occupied = (labels != OCCUPANCY_FREE) & (labels < CLASSES)
    from_top = occupied[:, :, ::-1].argmax(axis=2)
    highest = labels.shape[2] - 1 - from_top
    top = np.take_along_axis(labels, highest[:, :, None], axis=2)[:, :, 0]
    return np.where(occupied.any(axis=2), top, OCCUPANCY_FREE).astype(np.uint8)


def _draw_bev(axes: Axes, scene: BevScene, title: str) -> None:
    """Seen from above, x (forward) up and y (left) to the left."""
    if scene.occupancy is not None:
        palette = np.array([_rgb(_OCCUPANCY_COLORS.get(name, BOX_COLORS.get(name, "#9aa0a6"))) for name in OCCUPANCY_CLASSES], np.uint8)
        (x_low, x_high), (y_low, y_high), _ = OCC3D.ranges_m
        image = palette[scene.occupancy][::-1, ::-1]  # rows: x falling, columns: y falling
        axes.imshow(image, extent=(-y_high, -y_low, x_low, x_high), interpolation="nearest", alpha=0.75)
    for line, class_id in zip(scene.lines_m, scene.line_class, strict=True):
        axes.plot(-line[:, 1], line[:, 0], color=MAP_COLORS[MAP_CLASSES[class_id]], linewidth=1.1)
    for footprint, tip, class_id in zip(scene.footprints_m, scene.tips_m, scene.box_class, strict=True):
        outline = np.concatenate([footprint, footprint[:1]])
        color = BOX_COLORS[DETECTION_CLASSES[class_id]]
        axes.plot(-outline[:, 1], outline[:, 0], color=color, linewidth=1.3)
        middle = footprint.mean(axis=0)
        axes.plot([-middle[1], -tip[1]], [middle[0], tip[0]], color=color, linewidth=1.3)
    axes.plot([0], [0], marker="^", color="black", markersize=4)
    axes.set(xlim=(-BEV_RANGE_M, BEV_RANGE_M), ylim=(-BEV_RANGE_M, BEV_RANGE_M), aspect="equal")
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=6)


def _legend(figure: Figure) -> None:
    entries = {**BOX_COLORS, **MAP_COLORS}
    handles = [Line2D([], [], color=color, linewidth=2, label=name.replace("_", " ")) for name, color in entries.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(entries), fontsize=7, frameon=False)
