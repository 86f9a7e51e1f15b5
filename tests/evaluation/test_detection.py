"""Detection metrics against the devkit and against worked cases."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nuscenes.eval.common.data_classes import EvalBoxes
from nuscenes.eval.common.loaders import load_prediction
from nuscenes.eval.common.utils import center_distance
from nuscenes.eval.detection.algo import accumulate
from nuscenes.eval.detection.data_classes import DetectionBox
from pyquaternion import Quaternion

from pipeline.dataset.index import Index
from pipeline.errors import DataError, ModelError
from pipeline.evaluation.boxes import BoxTable, predict_attribute, read_submission, submission, to_global
from pipeline.evaluation.detection import curve, evaluate_detection, match
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


def one_sample(boxes: BoxPrediction, points: int = -1) -> BoxTable:
    """Boxes of a sample whose ego stands at the global origin."""
    table = to_global(boxes, np.eye(4), 0, "s")
    return BoxTable(**{**table.__dict__, "num_points": np.full(len(table), points)})


def nothing() -> BoxTable:
    return one_sample(one_box()).select(np.zeros(1, dtype=bool))


def to_devkit(table: BoxTable) -> EvalBoxes:
    boxes = EvalBoxes()
    for row in range(len(table)):
        token = str(table.sample[row])
        box = DetectionBox(
            token, tuple(table.center_m[row]), tuple(table.size_wlh_m[row]), tuple(table.quaternion_wxyz[row]), tuple(table.velocity_mps[row]),
            detection_name=DETECTION_CLASSES[table.class_id[row]], detection_score=float(table.score[row]), attribute_name=str(table.attribute[row]),
        )  # fmt: skip
        boxes.add_boxes(token, [box])
    return boxes


def test_real_detector_output_scores_as_in_the_devkit(minival_index: Index, minival_truth: DetectionTruth, real_detections: Path) -> None:
    tokens = minival_index.tokens("val")
    predictions = read_submission(real_detections, tokens, ego_origins_m(minival_index, tokens))
    result = evaluate_detection(minival_truth.boxes, predictions, minival_truth.bike_racks, len(tokens))
    assert {name: result[name] for name in DEVKIT_RESULT} == pytest.approx(DEVKIT_RESULT, rel=1e-12)
    json.dumps(result, allow_nan=False)


def test_going_through_the_bev_frame_changes_nothing_but_rounding(
    minival_index: Index, minival_truth: DetectionTruth, real_results: dict[str, list[dict]]
) -> None:
    tokens, tables = minival_index.tokens("val"), []
    for sample, token in enumerate(tokens):
        ego2global = minival_index.sample(token).ego2global
        tables.append(to_global(boxes_in_bev(real_results[token], ego2global), ego2global, sample, token))
    result = evaluate_detection(minival_truth.boxes, BoxTable.concatenate(tables), minival_truth.bike_racks, len(tokens))
    # AAE differs: attributes come from the speed rule instead of the file.
    for name in ("mAP", "mATE", "mASE", "mAOE", "mAVE"):
        assert result[name] == pytest.approx(DEVKIT_RESULT[name], abs=1e-3)


def random_boxes(seed: int, count: int) -> BoxTable:
    """Boxes of three samples that are close enough to each other to compete for matches; equal scores and unknown values occur."""
    random = np.random.default_rng(seed)
    yaw = random.uniform(-np.pi, np.pi, count)
    velocity = random.normal(size=(count, 2))
    velocity[random.random(count) < 0.2] = np.nan
    attributes = np.array(["", "vehicle.moving", "vehicle.parked"])
    return BoxTable(
        np.sort(random.integers(0, 3, count)), random.choice([0, 9], count), random.uniform(0, 6, (count, 3)), random.uniform(0.5, 5, (count, 3)),
        np.stack([np.cos(yaw / 2), np.zeros(count), np.zeros(count), np.sin(yaw / 2)], axis=1), velocity, random.choice(attributes, count),
        random.integers(1, 6, count) / 6.0, np.zeros(count), np.full(count, -1),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 20), st.integers(0, 30), st.sampled_from([0, 9]))
def test_matching_is_that_of_the_devkit(seed: int, truths: int, predictions: int, class_id: int) -> None:
    truth, found = random_boxes(seed, truths), random_boxes(seed + 1, predictions)
    thresholds = (0.5, 1.0, 2.0, 4.0)
    matching = match(truth, found, class_id, thresholds)
    for t, threshold in enumerate(thresholds):
        expected = accumulate(to_devkit(truth), to_devkit(found), DETECTION_CLASSES[class_id], center_distance, threshold)
        ours = curve(matching, t).serialize()
        for name, values in expected.serialize().items():
            assert ours[name] == pytest.approx(values, abs=1e-9, nan_ok=True), name


def test_identity_scores_one(minival_truth: DetectionTruth) -> None:
    copies = BoxTable(**{**minival_truth.boxes.__dict__, "score": np.full(len(minival_truth.boxes), 0.5)})
    result = evaluate_detection(minival_truth.boxes, copies, minival_truth.bike_racks, 81)
    assert result["mAP_occurring"] == pytest.approx(1.0)
    assert all(row["mAP"] == pytest.approx(1.0) for row in result["per_range"].values())


def test_the_results_file_loads_in_the_devkit(tmp_path: Path) -> None:
    table = one_sample(one_box())
    (tmp_path / "results.json").write_text(json.dumps(submission(table, ["first", "second"])))
    loaded, meta = load_prediction(str(tmp_path / "results.json"), 500, DetectionBox)
    box = loaded["first"][0]
    assert meta["use_camera"] and not meta["use_lidar"]
    assert loaded.sample_tokens == ["first", "second"]
    assert box.translation == pytest.approx((10.0, 2.0, 1.0))
    assert (box.detection_name, box.attribute_name) == ("car", "vehicle.moving")
    assert Quaternion(box.rotation).yaw_pitch_roll[0] == pytest.approx(0.3, abs=1e-6)


def test_a_turned_ego_turns_position_heading_and_velocity() -> None:
    ego2global = np.array([[0.0, -1, 0, 100], [1, 0, 0, 50], [0, 0, 1, 0], [0, 0, 0, 1]])  # facing global +y
    table = to_global(one_box(), ego2global, 0, "s")
    assert table.center_m[0] == pytest.approx([98.0, 60.0, 1.0])
    assert table.velocity_mps[0] == pytest.approx([0.0, 3.0])
    assert table.yaw_rad()[0] == pytest.approx(np.pi / 2 + 0.3, abs=1e-6)
    assert table.ego_distance_m[0] == pytest.approx(np.hypot(10, 2))


def test_boxes_without_points_and_beyond_the_class_range_are_not_ground_truth() -> None:
    far = one_sample(one_box(center_m=np.array([[51.0, 0, 1]], np.float32)), points=5)
    truth = BoxTable.concatenate([one_sample(one_box(), points=5), far])
    assert evaluate_detection(truth, one_sample(one_box()), {}, 1)["per_class"]["car"]["ground_truth"] == 1
    empty = evaluate_detection(one_sample(one_box(), points=0), nothing(), {}, 1)
    assert empty["per_class"]["car"]["ground_truth"] == 0
    assert empty["mAP"] == 0.0
    assert empty["mAP_occurring"] is None


def test_a_bicycle_in_a_rack_is_not_judged(minival_truth: DetectionTruth) -> None:
    (sample, racks), *_ = minival_truth.bike_racks.items()
    bicycle = DETECTION_CLASSES.index("bicycle")
    inside = one_box(center_m=np.array([racks[0].center], np.float32), class_id=np.array([bicycle]))
    table = BoxTable(**{**one_sample(inside, points=5).__dict__, "sample": np.array([sample]), "ego_distance_m": np.zeros(1)})
    assert evaluate_detection(table, nothing(), minival_truth.bike_racks, 1)["per_class"]["bicycle"]["ground_truth"] == 0
    assert evaluate_detection(table, nothing(), {}, 1)["per_class"]["bicycle"]["ground_truth"] == 1


def test_undefined_errors_are_null() -> None:
    cone = one_box(class_id=np.array([DETECTION_CLASSES.index("traffic_cone")]))
    row = evaluate_detection(one_sample(cone, points=3), one_sample(cone), {}, 1)["per_class"]["traffic_cone"]
    assert row["AP"] == pytest.approx(1.0)
    assert row["AOE"] is None and row["AVE"] is None and row["AAE"] is None


def test_at_most_500_boxes_best_first() -> None:
    many = BoxPrediction(
        np.zeros((600, 3), np.float32), np.ones((600, 3), np.float32), np.zeros(600, np.float32), np.zeros((600, 2), np.float32),
        np.zeros(600, np.int64), np.linspace(0, 1, 600).astype(np.float32),
    )  # fmt: skip
    table = one_sample(many)
    assert len(table) == 500
    assert table.score[0] == 1.0


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
        to_global(one_box(**changes), np.eye(4), 0, "abc")


@pytest.mark.parametrize("content", ["{", '{"results": {}}', '{"results": {"s": [{"translation": [1, 2, 3], "detection_name": "tram"}]}}'])
def test_a_damaged_results_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"results\.json"):
        read_submission(path, ["s"], np.zeros((1, 3)))


def test_a_results_file_reads_back(tmp_path: Path) -> None:
    table = one_sample(one_box())
    (tmp_path / "results.json").write_text(json.dumps(submission(table, ["s"])))
    again = read_submission(tmp_path / "results.json", ["s"], np.zeros((1, 3)))
    for name, values in table.__dict__.items():
        assert np.array_equal(getattr(again, name), values), name
