"""From the labels of one sample to the tensors the losses compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

from pipeline.config import ModelConfig
from pipeline.dataset.occupancy import ORIGIN_M, SHAPE, VOXEL_M
from pipeline.models.anchors import ANCHOR_SHAPE, resample, ring_corners
from pipeline.models.bspline import CONTROL_POINTS, LINE_POINTS, basis
from pipeline.models.heads.detection import BOX_STATE, POSITION_STEP_M, SHAPE_NUMBERS, SPEED_STEP_MPS
from pipeline.models.point_maps import bev_cell_centers
from pipeline.taxonomy import DETECTION_CLASSES, MAP_CLASSES, OCCUPANCY_FREE
from pipeline.training.augmentation import Augmentation, occupancy_on_grid
from pipeline.training.image_targets import ImageTargets, add_bell
from pipeline.training.labels import UNSEEN, BoxLabels, Labels, MapLines

Floats = NDArray[np.float32]
# How far from a box or a line a BEV cell is taught the way to it, m: as far as the next anchor may be.
FIELD_REACH_M = 4.0
SIDE_POINTS = basis(LINE_POINTS, degree=1)


def _axis_range_m(axis: int) -> tuple[float, float]:
    return ORIGIN_M[axis], ORIGIN_M[axis] + VOXEL_M * SHAPE[axis]


# Most voxels are free. The loss looks at one of so many of them, chosen anew each time.
FREE_THINNING = 4
OCC3D_RANGE_M = (_axis_range_m(0), _axis_range_m(1), _axis_range_m(2))


@dataclass(frozen=True)
class BevTargets:
    """What is supervised in the BEV grid; None where there is no label.

    occupancy: (V,) classes in the order of the head, UNSEEN where no camera looks.
    heat: (10, Y, X) bells at the box centres, in [0, 1].
    boxes: (10, Y, X) way to the nearest box in POSITION_STEP_M, its shape relative to an anchor's and its velocity in SPEED_STEP_MPS (NaN where
    unknown), all NaN farther than FIELD_REACH_M from any box.
    lines: (3, Y, X) map elements drawn one cell wide, 0 or 1, UNSEEN for a class that the map does not know.
    pull: (3, 2, Y, X) way to the nearest point of an element of each class, m, NaN farther than FIELD_REACH_M.
    """

    occupancy: Tensor | None
    heat: Tensor
    boxes: Tensor
    lines: Tensor | None
    pull: Tensor | None


@dataclass(frozen=True)
class Targets:
    """Targets of one sample; None where there is no label, or where the step does not train the part.

    boxes: (M, 11) box states with NaN velocities where unknown, and box_class (M,).
    lines: (L, V, LINE_POINTS, 2) the same element in its V equivalent point orders, metres (the order does not matter, so the loss takes the
    nearest); line_class (L,), line_closed (L,), line_labelled (3,) the classes that the map knows.
    """

    boxes: Tensor
    box_class: Tensor
    lines: Tensor | None
    line_class: Tensor | None
    line_closed: Tensor | None
    line_labelled: Tensor | None
    bev: BevTargets | None
    image: ImageTargets | None


def make_targets(
    labels: Labels, augmentation: Augmentation, image: ImageTargets | None, config: ModelConfig, random: np.random.Generator, image_only: bool = False
) -> Targets:
    """Targets for labels that are already in the augmented frame (occupancy alone is still in the ego frame).

    `image` are the targets in the (mirrored) images; `random` chooses the free voxels that count. `image_only` leaves out what lies in the
    BEV grid.
    """
    labels = replace(labels, boxes=boxes_in_range(labels.boxes, config))
    lines = labels.map
    return Targets(
        boxes=torch.from_numpy(box_states(labels.boxes)),
        box_class=torch.from_numpy(labels.boxes.class_id),
        lines=None if lines is None or image_only else torch.from_numpy(line_orders(lines)),
        line_class=None if lines is None else torch.from_numpy(lines.class_id),
        line_closed=None if lines is None else torch.from_numpy(lines.closed),
        line_labelled=None if lines is None else torch.from_numpy(lines.labelled),
        bev=None if image_only else make_bev_targets(labels, augmentation, config, random),
        image=image,
    )


def make_bev_targets(labels: Labels, augmentation: Augmentation, config: ModelConfig, random: np.random.Generator) -> BevTargets:
    """The dense targets of `make_targets`."""
    occupancy = None if labels.occupancy is None else thin_free(occupancy_target(labels.occupancy, augmentation, config), random)
    return BevTargets(
        occupancy=None if occupancy is None else torch.from_numpy(occupancy),
        heat=torch.from_numpy(bev_heat(labels.boxes, config)),
        boxes=torch.from_numpy(bev_boxes(labels.boxes, config)),
        lines=None if labels.map is None else torch.from_numpy(bev_lines(labels.map, config)),
        pull=None if labels.map is None else torch.from_numpy(line_pull(labels.map, config)),
    )


def boxes_in_range(boxes: BoxLabels, config: ModelConfig) -> BoxLabels:
    """Boxes whose centre is less than 5 m outside the BEV grid: beyond that nothing of them can be seen in it."""
    margin = 5.0
    keep = np.ones(len(boxes.class_id), dtype=bool)
    for axis, (low, high) in enumerate((config.view.x_range_m, config.view.y_range_m)):
        keep &= (boxes.centers_m[:, axis] > low - margin) & (boxes.centers_m[:, axis] < high + margin)
    return BoxLabels(boxes.centers_m[keep], boxes.size_wlh_m[keep], boxes.yaw_rad[keep], boxes.velocity_mps[keep], boxes.class_id[keep])


def box_states(boxes: BoxLabels) -> Floats:
    """(M, 11) box states."""
    states = np.zeros((len(boxes.class_id), BOX_STATE), dtype=np.float32)
    states[:, :3] = boxes.centers_m
    states[:, 3:6] = np.log(np.maximum(boxes.size_wlh_m, 0.05))
    states[:, 6], states[:, 7] = np.sin(boxes.yaw_rad), np.cos(boxes.yaw_rad)
    states[:, 8:10] = boxes.velocity_mps
    return states


def line_orders(lines: MapLines) -> Floats:
    """(L, V, LINE_POINTS, 2): forwards and backwards; a closed element also from each of its corners on. Open elements repeat their two orders to
    fill V.

    The points of an open element lie at equal length along it, those of a closed one at equal shares of each of its sides (`ring_corners`).
    """
    sides = CONTROL_POINTS - 1
    count = 2 * sides if lines.closed.any() else 2
    orders = np.zeros((len(lines.class_id), count, LINE_POINTS, 2), dtype=np.float32)
    for number, (line, closed) in enumerate(zip(lines.points_m, lines.closed, strict=True)):
        if not closed:
            points = resample(line, LINE_POINTS)
            orders[number, 0::2], orders[number, 1::2] = points, points[::-1]
            continue
        ring = SIDE_POINTS @ ring_corners(line)
        for shift in range(sides):
            turned = np.roll(ring[:-1], -shift * (LINE_POINTS - 1) // sides, axis=0)
            turned = np.concatenate([turned, turned[:1]])
            orders[number, 2 * shift], orders[number, 2 * shift + 1] = turned, turned[::-1]
    return orders


def occupancy_target(semantics: NDArray[np.uint8], augmentation: Augmentation, config: ModelConfig) -> NDArray[np.uint8]:
    """(V,) labels of all levels, each in the order y, x, z."""
    flat = []
    for level in config.occupancy.levels:
        ranges = (level.x_range_m, level.y_range_m, level.z_range_m)
        centers = tuple(
            (low + (np.arange(n) + 0.5) * (high - low) / n).astype(np.float32) for (low, high), n in zip(ranges, level.cells, strict=True)
        )
        flat.append(occupancy_on_grid(semantics, augmentation, (centers[0], centers[1], centers[2]), OCC3D_RANGE_M).reshape(-1))
    return np.concatenate(flat)


def thin_free(occupancy: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """(V,) labels with all but one of FREE_THINNING free voxels marked UNSEEN."""
    dropped = (occupancy == OCCUPANCY_FREE) & (random.integers(0, FREE_THINNING, occupancy.shape, dtype=np.uint8) > 0)
    return np.where(dropped, np.uint8(UNSEEN), occupancy)


def bev_heat(boxes: BoxLabels, config: ModelConfig) -> Floats:
    """(10, Y, X): a bell around each box centre, at least one cell wide."""
    rows, columns = config.view.cells
    heat = np.zeros((len(DETECTION_CLASSES), rows, columns), dtype=np.float32)
    cells = _bev_pixels(boxes.centers_m[:, :2], config)
    cell_m = (config.view.x_range_m[1] - config.view.x_range_m[0]) / columns
    for number, class_id in enumerate(boxes.class_id):
        sigma = max(0.8, 0.2 * float(boxes.size_wlh_m[number, :2].mean()) / cell_m)
        add_bell(heat[class_id], cells[number], np.array([sigma, sigma]))
    return heat


def cell_centers(config: ModelConfig) -> Floats:
    """(Y * X, 2) centres of the BEV cells, m."""
    x, y = bev_cell_centers(config.view)
    return np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)


def bev_boxes(boxes: BoxLabels, config: ModelConfig) -> Floats:
    """(10, Y, X): at each cell the way to the nearest box centre, the shape of that box, less the shape of an anchor, and its velocity."""
    cells = cell_centers(config)
    field = np.full((len(cells), 2 + SHAPE_NUMBERS + 2), np.nan, dtype=np.float32)
    if len(boxes.class_id):
        states = box_states(boxes)
        distance, nearest = cKDTree(states[:, :2]).query(cells, distance_upper_bound=FIELD_REACH_M)
        near = np.isfinite(distance)
        chosen = states[nearest[near]]
        field[near, :2] = (chosen[:, :2] - cells[near]) / POSITION_STEP_M
        field[near, 2 : 2 + SHAPE_NUMBERS] = chosen[:, 2:8] - ANCHOR_SHAPE
        field[near, 2 + SHAPE_NUMBERS :] = chosen[:, 8:10] / SPEED_STEP_MPS
    return np.ascontiguousarray(field.T).reshape(-1, *config.view.cells)


def line_pull(lines: MapLines, config: ModelConfig) -> Floats:
    """(3, 2, Y, X): at each cell the way to the nearest point of an element of each class."""
    cells = cell_centers(config)
    field = np.full((len(MAP_CLASSES), len(cells), 2), np.nan, dtype=np.float32)
    for class_id in np.unique(lines.class_id):
        of_class = [line for line, number in zip(lines.points_m, lines.class_id, strict=True) if number == class_id]
        points = np.concatenate([resample(line, max(2, int(2 * np.linalg.norm(np.diff(line, axis=0), axis=1).sum()))) for line in of_class])
        # Most cells are far from all lines: only those in reach of their bounding box are asked.
        asked = np.flatnonzero(((cells > points.min(axis=0) - FIELD_REACH_M) & (cells < points.max(axis=0) + FIELD_REACH_M)).all(axis=1))
        distance, nearest = cKDTree(points).query(cells[asked], distance_upper_bound=FIELD_REACH_M)
        near = np.isfinite(distance)
        field[class_id, asked[near]] = points[nearest[near]] - cells[asked[near]]
    return np.ascontiguousarray(field.transpose(0, 2, 1)).reshape(len(MAP_CLASSES), 2, *config.view.cells)


def bev_lines(lines: MapLines, config: ModelConfig) -> Floats:
    """(3, Y, X): map elements drawn one cell wide."""
    rows, columns = config.view.cells
    canvas = np.zeros((len(MAP_CLASSES), rows, columns), dtype=np.uint8)
    canvas[~lines.labelled] = UNSEEN
    for line, class_id in zip(lines.points_m, lines.class_id, strict=True):
        # Fixed-point coordinates with 4 fractional bits.
        pixels = np.round(_bev_pixels(line, config) * 16).astype(np.int32)
        cv2.polylines(canvas[class_id], [pixels[:, None]], isClosed=False, color=(1,), thickness=1, shift=4)
    return canvas.astype(np.float32)


def _bev_pixels(points_m: Floats, config: ModelConfig) -> Floats:
    """(P, 2) metres -> (column, row) of the BEV grid, cell centres at whole numbers."""
    low = np.array([config.view.x_range_m[0], config.view.y_range_m[0]], dtype=np.float32)
    high = np.array([config.view.x_range_m[1], config.view.y_range_m[1]], dtype=np.float32)
    return (points_m - low) / (high - low) * np.array(config.view.cells[::-1], dtype=np.float32) - 0.5


__all__ = ["LINE_POINTS", "UNSEEN", "Targets", "make_targets"]
