"""BEV augmentation: a sample seen from a turned or mirrored ego frame. Boxes, velocities, lines, occupancy, lidar and cameras change together.

`Augmentation.matrix` maps points of the ego frame to the augmented BEV frame. Mirroring reflects the world at the plane y = 0 and every image at
its middle column, so what was left
is right in both. It is drawn once for a pass over a scene, so that the temporal state stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import cv2
import numpy as np
from numpy.typing import NDArray

from pipeline.config import AugmentationConfig
from pipeline.training.labels import UNSEEN, BoxLabels, Labels, MapLines

Floats = NDArray[np.float32]
Range = tuple[float, float]


@dataclass(frozen=True)
class Augmentation:
    """Rotation about z, counter-clockwise, then an optional mirror left to right."""

    rotation_rad: float = 0.0
    flip: bool = False

    @property
    def matrix(self) -> NDArray[np.float64]:
        """(4, 4) ego frame to augmented frame."""
        sin, cos = np.sin(self.rotation_rad), np.cos(self.rotation_rad)
        side = -1.0 if self.flip else 1.0
        return np.array([[cos, -sin, 0, 0], [side * sin, side * cos, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])


def draw(config: AugmentationConfig, random: np.random.Generator) -> Augmentation:
    """A random augmentation within the limits of `config`."""
    limit = np.radians(config.rotation_deg)
    return Augmentation(float(random.uniform(-limit, limit)), bool(random.random() < config.flip_probability))


def augment_ego2img(ego2img: NDArray[np.float64], augmentation: Augmentation, width: int) -> NDArray[np.float64]:
    """Projections (6, 4, 4) of the augmented frame into the (mirrored) network inputs of `width` pixels."""
    out = ego2img @ np.linalg.inv(augmentation.matrix)
    if augmentation.flip:
        out[:, 0] = (width - 1) * out[:, 2] - out[:, 0]
    return out


def augment_images(images: NDArray[np.uint8], augmentation: Augmentation) -> NDArray[np.uint8]:
    """(6, H, W, 3) images, mirrored if the augmentation is."""
    return images[:, :, ::-1] if augmentation.flip else images


def augment_labels(labels: Labels, augmentation: Augmentation, x_range_m: Range, y_range_m: Range) -> Labels:
    """Labels in the augmented frame; occupancy is left as it is, because it is resampled to the head's grid anyway (`occupancy_on_grid`)."""
    rotation = augmentation.matrix[:3, :3].astype(np.float32)
    lidar_m = None if labels.lidar_m is None else labels.lidar_m @ rotation.T
    lines = None if labels.map is None else _augment_lines(labels.map, rotation, x_range_m, y_range_m)
    return Labels(_augment_boxes(labels.boxes, augmentation), lines, labels.occupancy, lidar_m, labels.lidar_class)


def _augment_boxes(boxes: BoxLabels, augmentation: Augmentation) -> BoxLabels:
    rotation = augmentation.matrix[:3, :3].astype(np.float32)
    yaw = boxes.yaw_rad + augmentation.rotation_rad
    yaw = -yaw if augmentation.flip else yaw
    yaw = (yaw + np.pi) % (2 * np.pi) - np.pi
    velocity = boxes.velocity_mps @ rotation[:2, :2].T
    return BoxLabels(boxes.centers_m @ rotation.T, boxes.size_wlh_m, yaw.astype(np.float32), velocity, boxes.class_id)


def _augment_lines(lines: MapLines, rotation: Floats, x_range_m: Range, y_range_m: Range) -> MapLines:
    points, classes, closed = [], [], []
    for line, class_id, is_closed in zip(lines.points_m, lines.class_id, lines.closed, strict=True):
        pieces = clip_polyline(line @ rotation[:2, :2].T, x_range_m, y_range_m)
        whole = len(pieces) == 1 and np.allclose(pieces[0][0], pieces[0][-1], atol=1e-3)
        points += pieces
        classes += [class_id] * len(pieces)
        closed += [bool(is_closed) and whole] * len(pieces)
    return MapLines(points, np.array(classes, dtype=np.int64), np.array(closed, dtype=bool), lines.labelled)


def clip_polyline(line_m: Floats, x_range_m: Range, y_range_m: Range) -> list[Floats]:
    """Pieces (P, 2) of a polyline inside a rectangle, in order; pieces shorter than 0.1 m are not kept."""
    low, high = np.array([x_range_m, y_range_m], dtype=np.float32).T
    if ((line_m >= low - 1e-4) & (line_m <= high + 1e-4)).all():
        return [line_m]
    pieces: list[list[Floats]] = []
    for start, end in pairwise(line_m):
        inside = _clip_segment(start, end, x_range_m, y_range_m)
        if inside is None:
            continue
        if pieces and np.allclose(pieces[-1][-1], inside[0], atol=1e-6):
            pieces[-1].append(inside[1])
        else:
            pieces.append(list(inside))
    arrays = [np.array(piece, dtype=np.float32) for piece in pieces]
    return [piece for piece in arrays if np.linalg.norm(np.diff(piece, axis=0), axis=1).sum() >= 0.1]


def _clip_segment(start: Floats, end: Floats, x_range_m: Range, y_range_m: Range) -> tuple[Floats, Floats] | None:
    """Liang and Barsky's clipping of one segment to a rectangle."""
    delta = end - start
    enter, leave = 0.0, 1.0
    for axis, (low, high) in enumerate((x_range_m, y_range_m)):
        for change, room in ((-delta[axis], start[axis] - low), (delta[axis], high - start[axis])):
            if abs(change) < 1e-12:
                if room < 0:
                    return None
            elif change < 0:
                enter = max(enter, room / change)
            else:
                leave = min(leave, room / change)
    return None if enter > leave else (start + enter * delta, start + leave * delta)


def occupancy_on_grid(
    semantics: NDArray[np.uint8], augmentation: Augmentation, centers_m: tuple[Floats, Floats, Floats], source_range_m: tuple[Range, Range, Range]
) -> NDArray[np.uint8]:
    """Labels at the cells of a grid in the augmented frame, by nearest voxel.

    Args:
        semantics: (X, Y, Z) classes in the ego frame.
        centers_m: cell centres x (X',), y (Y',), z (Z',) in the augmented frame.
        source_range_m: ranges of `semantics` along x, y, z.

    Returns:
        (Y', X', Z'), the order of the head's voxels; UNSEEN outside the source.
    """
    x, y = np.meshgrid(centers_m[0], centers_m[1])
    inverse = augmentation.matrix[:2, :2].T  # orthogonal
    ego = (inverse[0, 0] * x + inverse[0, 1] * y, inverse[1, 0] * x + inverse[1, 1] * y, centers_m[2])
    indices = []
    valid = []
    for position, (low, high), count in zip(ego, source_range_m, semantics.shape, strict=True):
        index = np.floor((position - low) * (count / (high - low)) + 1e-6).astype(np.int64)
        valid.append((index >= 0) & (index < count))
        indices.append(index.clip(0, count - 1))
    columns = semantics[indices[0], indices[1]][:, :, indices[2]]
    known = (valid[0] & valid[1])[:, :, None] & valid[2]
    return np.where(known, columns, np.uint8(UNSEEN))


def photometric(images: NDArray[np.uint8], strength: float, random: np.random.Generator) -> NDArray[np.uint8]:
    """(6, H, W, 3) images with a random gain for each colour, contrast and offset, the same for all cameras as for one weather."""
    if strength == 0:
        return images
    contrast = 1.0 + strength * random.uniform(-1, 1)
    gain = contrast * (1.0 + 0.25 * strength * random.uniform(-1, 1, 3))
    offset = 128.0 * (1.0 - contrast) + 128.0 * strength * random.uniform(-1, 1)
    values = np.arange(256)[:, None] * gain + offset  # (256, 3)
    table = values.clip(0, 255).astype(np.uint8)
    flat = np.ascontiguousarray(images).reshape(1, -1, 3)
    return cv2.LUT(flat, table[None]).reshape(images.shape).astype(np.uint8, copy=False)
