"""Detection metrics against the devkit and against worked cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from nuscenes.eval.common.data_classes import EvalBoxes
from nuscenes.eval.common.loaders import load_prediction
from nuscenes.eval.detection.data_classes import DetectionBox
from pyquaternion import Quaternion

from pipeline.dataset.index import Index
from pipeline.errors import ModelError
from pipeline.evaluation.detection import evaluate_detection, predict_attribute, submission, to_devkit_boxes
from pipeline.evaluation.ground_truth import DetectionTruth, detection_truth, ego_origins_m
from pipeline.models.prediction import BoxPrediction
from pipeline.taxonomy import DETECTION_CLASSES

# DetectionEval of nuscenes-devkit 1.2.0 on all samples of v1.0-minival with this file (its README gives the same, rounded).
DEVKIT_RESULT = {
    "mAP": 0.21900294044212032,
    "NDS": 0.2691458250371378,
    "mATE": 0.8140410613730259,
    "mASE": 0.45849304288563414,
    "mAOE": 0.6061612143850871,
    "mAVE": 1.2160798670611186,
    "mAAE": 0.5248611331954769,
}


@pytest.fixture(scope="session")
def minival_truth(minival_index: Index) -> DetectionTruth:
    return detection_truth(minival_index, minival_index.tokens("val"))


def boxes_in_bev(rows: list[dict], ego2global: np.ndarray) -> BoxPrediction:
    """Rows of a results file in the BEV frame of their sample."""
    rotation, origin = ego2global[:3, :3], ego2global[:3, 3]
    heading = np.array([Quaternion(row["rotation"]).rotation_matrix[:, 0] for row in rows]) @ rotation
    velocity = np.array([[*row["velocity"][:2], 0.0] for row in rows]) @ rotation
    return BoxPrediction(
        center_m=((np.array([row["translation"] for row in rows]) - origin) @ rotation).astype(np.float32),
        size_wlh_m=np.array([row["size"] for row in rows], dtype=np.float32),
        yaw_rad=np.arctan2(heading[:, 1], heading[:, 0]).astype(np.float32),
        velocity_mps=velocity[:, :2].astype(np.float32),
        class_id=np.array([DETECTION_CLASSES.index(row["detection_name"]) for row in rows]),
        score=np.array([row["detection_score"] for row in rows], dtype=np.float32),
    )


def one_box(**changes: np.ndarray) -> BoxPrediction:
    fields = {
        "center_m": np.array([[10.0, 2.0, 1.0]], np.float32),
        "size_wlh_m": np.array([[2.0, 4.5, 1.6]], np.float32),
        "yaw_rad": np.array([0.3], np.float32),
        "velocity_mps": np.array([[3.0, 0.0]], np.float32),
        "class_id": np.array([0]),
        "score": np.array([0.9], np.float32),
    }
    return BoxPrediction(**{**fields, **changes})


def with_points(boxes: list[DetectionBox], points: int) -> list[DetectionBox]:
    for box in boxes:
        box.num_pts = points
    return boxes


def eval_boxes(token: str, boxes: list[DetectionBox]) -> EvalBoxes:
    result = EvalBoxes()
    result.add_boxes(token, boxes)
    return result


def test_real_detector_output_scores_as_in_the_devkit(minival_index: Index, minival_truth: DetectionTruth, real_detections: Path) -> None:
    predictions, _ = load_prediction(str(real_detections), 500, DetectionBox)
    origins = ego_origins_m(minival_index, minival_index.tokens("val"))
    for box in predictions.all:
        box.ego_translation = tuple(np.array(box.translation) - origins[box.sample_token])
    result = evaluate_detection(minival_truth.boxes, predictions, minival_truth.bike_racks)
    assert {name: result[name] for name in DEVKIT_RESULT} == pytest.approx(DEVKIT_RESULT, rel=1e-12)
    json.dumps(result, allow_nan=False)


def test_going_through_the_bev_frame_changes_nothing_but_rounding(
    minival_index: Index, minival_truth: DetectionTruth, real_results: dict[str, list[dict]]
) -> None:
    predictions = EvalBoxes()
    for token in minival_index.tokens("val"):
        ego2global = minival_index.sample(token).ego2global
        boxes = to_devkit_boxes(token, boxes_in_bev(real_results[token], ego2global), ego2global)
        predictions.add_boxes(token, boxes)
    result = evaluate_detection(minival_truth.boxes, predictions, minival_truth.bike_racks)
    # AAE differs: attributes come from the speed rule instead of the file.
    for name in ("mAP", "mATE", "mASE", "mAOE", "mAVE"):
        assert result[name] == pytest.approx(DEVKIT_RESULT[name], abs=1e-3)


def test_identity_scores_one(minival_truth: DetectionTruth) -> None:
    predictions = EvalBoxes()
    for token in minival_truth.boxes.sample_tokens:
        boxes = [DetectionBox.deserialize({**box.serialize(), "detection_score": 0.5}) for box in minival_truth.boxes[token]]
        predictions.add_boxes(token, boxes)
    result = evaluate_detection(minival_truth.boxes, predictions, minival_truth.bike_racks)
    assert result["mAP_occurring"] == pytest.approx(1.0)
    assert all(row["mAP"] == pytest.approx(1.0) for row in result["per_range"].values())


def test_the_results_file_loads_in_the_devkit(tmp_path: Path) -> None:
    boxes = eval_boxes("sample", to_devkit_boxes("sample", one_box(), np.eye(4)))
    (tmp_path / "results.json").write_text(json.dumps(submission(boxes)))
    loaded, meta = load_prediction(str(tmp_path / "results.json"), 500, DetectionBox)
    box = loaded["sample"][0]
    assert meta["use_camera"] and not meta["use_lidar"]
    assert box.translation == pytest.approx((10.0, 2.0, 1.0))
    assert (box.detection_name, box.attribute_name) == ("car", "vehicle.moving")
    assert Quaternion(box.rotation).yaw_pitch_roll[0] == pytest.approx(0.3, abs=1e-6)


def test_a_turned_ego_turns_position_heading_and_velocity() -> None:
    ego2global = np.array([[0.0, -1, 0, 100], [1, 0, 0, 50], [0, 0, 1, 0], [0, 0, 0, 1]])  # facing global +y
    (box,) = to_devkit_boxes("sample", one_box(), ego2global)
    assert box.translation == pytest.approx((98.0, 60.0, 1.0))
    assert box.velocity == pytest.approx((0.0, 3.0))
    assert Quaternion(box.rotation).yaw_pitch_roll[0] == pytest.approx(np.pi / 2 + 0.3, abs=1e-6)
    assert box.ego_dist == pytest.approx(np.hypot(10, 2))


def test_boxes_without_points_and_beyond_the_class_range_are_not_ground_truth() -> None:
    near = to_devkit_boxes("s", one_box(), np.eye(4))
    far = to_devkit_boxes("s", one_box(center_m=np.array([[51.0, 0, 1]], np.float32)), np.eye(4))
    result = evaluate_detection(
        eval_boxes("s", with_points(near, 5) + with_points(far, 5)), eval_boxes("s", to_devkit_boxes("s", one_box(), np.eye(4))), {}
    )
    assert result["per_class"]["car"]["ground_truth"] == 1
    empty = evaluate_detection(eval_boxes("s", with_points(to_devkit_boxes("s", one_box(), np.eye(4)), 0)), eval_boxes("s", []), {})
    assert empty["per_class"]["car"]["ground_truth"] == 0
    assert empty["mAP"] == 0.0
    assert empty["mAP_occurring"] is None


def test_undefined_errors_are_null() -> None:
    cone = DETECTION_CLASSES.index("traffic_cone")
    box = one_box(class_id=np.array([cone]))
    truth = with_points(to_devkit_boxes("s", box, np.eye(4)), 3)
    result = evaluate_detection(eval_boxes("s", truth), eval_boxes("s", to_devkit_boxes("s", box, np.eye(4))), {})
    row = result["per_class"]["traffic_cone"]
    assert row["AP"] == pytest.approx(1.0)
    assert row["AOE"] is None and row["AVE"] is None and row["AAE"] is None


def test_at_most_500_boxes_best_first() -> None:
    many = BoxPrediction(
        np.zeros((600, 3), np.float32), np.ones((600, 3), np.float32), np.zeros(600, np.float32), np.zeros((600, 2), np.float32),
        np.zeros(600, np.int64), np.linspace(0, 1, 600).astype(np.float32),
    )  # fmt: skip
    boxes = to_devkit_boxes("s", many, np.eye(4))
    assert len(boxes) == 500
    assert boxes[0].detection_score == 1.0


@pytest.mark.parametrize(
    ("name", "speed", "attribute"),
    [("car", 3.0, "vehicle.moving"), ("car", 0.1, "vehicle.parked"), ("pedestrian", 0.0, "pedestrian.standing"), ("barrier", 5.0, "")],
)
def test_attribute_rule(name: str, speed: float, attribute: str) -> None:
    assert predict_attribute(name, speed) == attribute


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"center_m": np.array([[np.nan, 0, 0]], np.float32)}, "boxes.center_m"),
        ({"size_wlh_m": np.array([[0.0, 1, 1]], np.float32)}, "sizes must be positive"),
    ],
)
def test_impossible_boxes_name_the_sample_and_field(changes: dict, words: str) -> None:
    with pytest.raises(ModelError, match=f"sample abc.*{words}"):
        to_devkit_boxes("abc", one_box(**changes), np.eye(4))
