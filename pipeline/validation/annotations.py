"""Annotations: sizes by class, motion, numbers, and the chains of instances."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.dataset.build import timestamps_us
from pipeline.dataset.geometry import FloatArray
from pipeline.dataset.tables import TABLE_NAMES, Tables, positions
from pipeline.taxonomy import DETECTION_CLASSES
from pipeline.validation.context import Context, IntArray, chain_problems, problems

# Usual width, length and height of the detection classes in metres (rounded means of nuScenes boxes).
NOMINAL_SIZE_M: dict[str, tuple[float, float, float]] = {
    "car": (1.95, 4.6, 1.7),
    "truck": (2.5, 6.9, 2.8),
    "bus": (2.9, 11.0, 3.5),
    "trailer": (2.9, 12.3, 3.9),
    "construction_vehicle": (2.8, 6.4, 3.2),
    "pedestrian": (0.67, 0.73, 1.8),
    "motorcycle": (0.77, 2.1, 1.5),
    "bicycle": (0.6, 1.7, 1.3),
    "traffic_cone": (0.41, 0.41, 1.07),
    "barrier": (2.5, 0.5, 1.0),
}


def measure_boxes(context: Context) -> pa.Table:
    """One row an annotation.

    Number_problem, size_ratio (largest factor to the class's usual volume), speed_mps, jump_mps2, chain_problem.
    """
    boxes = context.index.boxes
    center, size, quaternion = (_list(boxes, name) for name in ("global_center", "size_wlh", "global_quaternion"))
    finite = np.isfinite(center).all(axis=1) & np.isfinite(size).all(axis=1) & np.isfinite(quaternion).all(axis=1)
    velocity = _list(boxes, "global_velocity")
    speed = np.linalg.norm(velocity, axis=1)
    return pa.table(
        {
            "token": boxes["token"],
            "sample_token": boxes["sample_token"],
            "category": boxes["category"],
            "number_problem": problems(
                boxes.num_rows,
                [
                    ("translation, size or rotation is not finite", ~finite),
                    ("size is not positive", (size <= 0).any(axis=1)),
                    ("rotation has not length 1", np.abs(np.linalg.norm(quaternion, axis=1) - 1) > 1e-3),
                ],
            ),
            "size_ratio": _size_ratio(boxes["class_id"].to_numpy(), size),
            "speed_mps": pa.array(speed, mask=~np.isfinite(speed)),
            "jump_mps2": _velocity_jumps(context, velocity),
            "num_lidar_pts": boxes["num_lidar_pts"],
            "chain_problem": _annotation_chain(context),
        }
    )


def _list(boxes: pa.Table, name: str) -> FloatArray:
    column = boxes[name].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).reshape(boxes.num_rows, -1)


def _size_ratio(class_id: IntArray, size: FloatArray) -> pa.Array:
    """Factor (>= 1) between the cube root of the box's volume and that of its class, null without a class."""
    usual = np.cbrt([np.prod(NOMINAL_SIZE_M[name]) for name in DETECTION_CLASSES])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.cbrt(np.prod(size, axis=1)) / usual[np.maximum(class_id, 0)]
        ratio = np.maximum(ratio, 1 / ratio)
    return pa.array(ratio, mask=(class_id < 0) | ~np.isfinite(ratio))


def _velocity_jumps(context: Context, velocity: FloatArray) -> pa.Array:
    """Change of velocity since the instance's annotation before, m/s^2; null for its first and where a velocity is unknown."""
    boxes, samples = context.index.boxes, context.index.samples
    instance = positions(boxes["instance_token"], context.tables.instance)
    sample = positions(boxes["sample_token"], samples)
    seconds = 1e-6 * samples["timestamp_us"].to_numpy()[sample]
    order = np.lexsort((seconds, instance))
    before, here = order[:-1], order[1:]
    jump = np.full(boxes.num_rows, np.nan)
    same = instance[before] == instance[here]
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.linalg.norm(velocity[here] - velocity[before], axis=1) / (seconds[here] - seconds[before])
    jump[here[same]] = change[same]
    return pa.array(jump, mask=~np.isfinite(jump))


def _annotation_chain(context: Context) -> pa.Array:
    """Chain problems in the order of the index's boxes."""
    annotation = context.tables.sample_annotation
    owner = positions(annotation["instance_token"], context.tables.instance)
    stamps = timestamps_us(context.tables.sample["timestamp"])[positions(annotation["sample_token"], context.tables.sample)]
    found = chain_problems(annotation, owner, stamps)
    return found.take(pa.array(positions(context.index.boxes["token"], annotation)))


def measure_instances(context: Context) -> pa.Table:
    """One row an instance: annotations found against nbr_annotations, and problems of its first and last annotation token."""
    instance, annotation = context.tables.instance, context.tables.sample_annotation
    owner = positions(annotation["instance_token"], instance)
    count = np.bincount(owner, minlength=instance.num_rows)
    rows = np.arange(instance.num_rows)
    wrong = {}
    for end, link in (("first", "prev"), ("last", "next")):
        position = positions(instance[f"{end}_annotation_token"], annotation)
        known = np.maximum(position, 0)
        is_end = pc.equal(annotation[link], "").to_numpy()
        wrong[end] = (position < 0) | (len(owner) > 0) & ((owner[known] != rows) | ~is_end[known]) if len(owner) else position < 0
    return pa.table(
        {
            "token": instance["token"],
            "annotation_difference": count - instance["nbr_annotations"].to_numpy(),
            "end_problem": problems(
                instance.num_rows,
                [
                    ("no annotations", count == 0),
                    ("first_annotation_token is not the first of its chain", wrong["first"]),
                    ("last_annotation_token is not the last of its chain", wrong["last"]),
                ],
            ),
        }
    )


def measure_tokens(tables: Tables) -> pa.Table:
    """One row a repeated token of any table, plus one row a table without: the columns are table, token and duplicate_problem."""
    names, tokens, problem = [], [], []
    for name in TABLE_NAMES:
        counts = pc.value_counts(getattr(tables, name)["token"].combine_chunks())
        repeated = [entry["values"] for entry in counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist()]
        names += [name] * max(1, len(repeated))
        tokens += repeated or [""]
        problem += [f"token occurs more than once in {name}.json"] * len(repeated) or [""]
    return pa.table({"token": tokens, "table": names, "duplicate_problem": problem})


def statistics(context: Context) -> dict[str, Any]:
    """Counts that are normal but worth knowing: boxes without lidar points, attribute, velocity or detection class."""
    boxes = context.index.boxes
    velocity = _list(boxes, "global_velocity")
    return {
        "boxes": boxes.num_rows,
        "without_lidar_points": int((boxes["num_lidar_pts"].to_numpy() == 0).sum()),
        "without_attribute": int(pc.sum(pc.equal(boxes["attribute"], "")).as_py() or 0),
        "without_velocity": int(np.isnan(velocity).any(axis=1).sum()),
        "without_visibility": int((boxes["visibility"].to_numpy() == 0).sum()),
        "without_detection_class": int((boxes["class_id"].to_numpy() < 0).sum()),
        "by_class": {name: int((boxes["class_id"].to_numpy() == i).sum()) for i, name in enumerate(DETECTION_CLASSES)},
    }
