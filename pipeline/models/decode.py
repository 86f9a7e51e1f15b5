"""Network outputs to predictions, on the host, in numpy: the same for torch, onnxruntime and a chip."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.config import DetectionConfig, MapConfig, ModelConfig
from pipeline.errors import ModelError
from pipeline.maps.rings import to_corners
from pipeline.maps.topology import to_segments, topology_matrix
from pipeline.models import bspline
from pipeline.models.prediction import BoxPrediction, MapPrediction, OccupancyGrid, OccupancyPrediction
from pipeline.taxonomy import MAP_CLASSES

Floats = NDArray[np.float32]
PED_CROSSING = MAP_CLASSES.index("ped_crossing")
# Labels touch within 0.1 m. Predicted lines are right to half a metre at best (the finest threshold of the Chamfer AP).
INCIDENCE_TOLERANCE_M = 0.5


def sigmoid(logits: Floats) -> Floats:
    """Logistic function without overflow."""
    return (0.5 * (1.0 + np.tanh(0.5 * logits))).astype(np.float32)


def decode_boxes(logits: Floats, boxes: Floats, config: DetectionConfig) -> BoxPrediction:
    """Class logits (N, 10) and box states (N, 11) to boxes, best first.

    Every class of an instance above the score threshold is a candidate; of candidates of one class that are closer than its `nms_radius_m` the best
    is kept.
    """
    scores = sigmoid(logits)
    instance, class_id = np.nonzero(scores >= config.score_threshold)
    score = scores[instance, class_id]
    order = np.argsort(-score, kind="stable")
    instance, class_id, score = instance[order], class_id[order], score[order]
    kept = suppress_near(boxes[instance, :2], class_id, np.array(config.nms_radius_m, dtype=np.float32))[: config.max_boxes]
    state = boxes[instance[kept]]
    return BoxPrediction(
        center_m=state[:, :3],
        size_wlh_m=np.exp(state[:, 3:6].clip(-4.0, 4.0)),
        yaw_rad=np.arctan2(state[:, 6], state[:, 7]),
        velocity_mps=state[:, 8:10],
        class_id=class_id[kept].astype(np.int64),
        score=score[kept],
    )


def suppress_near(centers_m: Floats, class_id: NDArray[np.int64], radius_m: Floats) -> NDArray[np.int64]:
    """Indices of boxes (best first) without a better box of the same class within the class's radius."""
    kept = np.ones(len(centers_m), dtype=bool)
    for number in np.unique(class_id):
        of_class = np.flatnonzero(class_id == number)
        x, y = centers_m[of_class, 0], centers_m[of_class, 1]
        near = (x[:, None] - x) ** 2 + (y[:, None] - y) ** 2 < radius_m[number] ** 2
        alone = np.ones(len(of_class), dtype=bool)
        for better in range(len(of_class)):
            if alone[better]:
                alone[better + 1 :] &= ~near[better, better + 1 :]
        kept[of_class] = alone
    return np.flatnonzero(kept)


def decode_map(logits: Floats, states: Floats, config: MapConfig, polygon_corners: int) -> MapPrediction:
    """Class logits (Q, 3) and element states (Q, 20) to map elements, best first."""
    probability = sigmoid(logits)
    class_id = probability.argmax(axis=1)
    # The quality attribute says how near the line is; its root keeps the class in charge.
    score = probability.max(axis=1) * np.sqrt(sigmoid(states[:, -1]))
    order = np.argsort(-score, kind="stable")
    order = order[score[order] >= config.score_threshold]
    control = states[order, :-2].reshape(-1, bspline.CONTROL_POINTS, 3)[..., :2]
    lines = np.matmul(bspline.basis(bspline.LINE_POINTS, config.spline_degree), control).astype(np.float32)
    closed = (class_id[order] == PED_CROSSING) | (states[order, -2] > 0)
    lines[closed, -1] = lines[closed, 0]
    kept = suppress_similar(lines, class_id[order], config.nms_distance_m)
    return build_map(lines[kept], class_id[order][kept], score[order][kept], closed[kept], polygon_corners)


def suppress_similar(lines_m: Floats, class_id: NDArray[np.int64], distance_m: float) -> NDArray[np.int64]:
    """Indices of lines (L, P, 2), best first, without a better one of the same class within the Chamfer distance."""
    kept: list[int] = []
    for number, line in enumerate(lines_m):
        rivals = [other for other in kept if class_id[other] == class_id[number]]
        if not rivals or _chamfer(line, lines_m[rivals]).min() >= distance_m:
            kept.append(number)
    return np.array(kept, dtype=np.int64)


def _chamfer(line: Floats, others: Floats) -> Floats:
    """(P, 2) against (R, P, 2) -> (R,)."""
    distance = np.linalg.norm(line[None, :, None] - others[:, None], axis=-1)
    return 0.5 * (distance.min(axis=1).mean(axis=1) + distance.min(axis=2).mean(axis=1))


def build_map(lines_m: Floats, class_id: NDArray[np.int64], score: Floats, closed: NDArray[np.bool_], polygon_corners: int) -> MapPrediction:
    """The segments, polygons and topology matrix that belong to polylines (L, P, 2), of which the closed ones end where they start.

    Raises:
        ModelError: a point is not finite.
    """
    if not np.isfinite(lines_m).all():
        raise ModelError("map prediction: a point of a polyline is not finite")
    lines = list(lines_m.astype(np.float64))
    segments, rings = to_segments(lines), np.flatnonzero(closed)
    polygons = np.array([to_corners(lines_m[ring], polygon_corners) for ring in rings], dtype=np.float32).reshape(-1, polygon_corners, 2)
    return MapPrediction(
        polylines=lines_m,
        class_id=class_id.astype(np.int64),
        score=score.astype(np.float32),
        line_segments=segments.astype(np.float32),
        polygons=polygons,
        topology_matrix=topology_matrix(segments, [lines[ring] for ring in rings], INCIDENCE_TOLERANCE_M),
        segment_line=np.repeat(np.arange(len(lines_m)), lines_m.shape[1] - 1),
        polygon_line=rings,
    )


def decode_occupancy(logits: Floats, config: ModelConfig) -> OccupancyPrediction:
    """Logits (V, 18) to label grids."""
    labels = logits.argmax(axis=-1).astype(np.uint8)
    grids, start = [], 0
    for level in config.occupancy.levels:
        x, y, z = level.cells
        grid = labels[start : start + x * y * z].reshape(y, x, z).transpose(1, 0, 2)
        grids.append(OccupancyGrid(np.ascontiguousarray(grid), level.x_range_m, level.y_range_m, level.z_range_m))
        start += x * y * z
    return OccupancyPrediction(grids)
