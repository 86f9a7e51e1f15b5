"""The runner on real tables with a predictor that copies the labels, and the constant prior."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import EvaluateConfig
from pipeline.dataset.index import Index
from pipeline.dataset.occupancy import SHAPE, labels_path
from pipeline.dataset.records import SampleRecord
from pipeline.errors import DataError
from pipeline.evaluation.baseline import ConstantPredictor, box_prior, constant_prior, map_prior
from pipeline.evaluation.occupancy import OCC3D
from pipeline.evaluation.retention import retention
from pipeline.evaluation.runner import evaluate, headlines, held_out_scenes
from pipeline.maps.store import MapStore, write_index, write_labels
from pipeline.models.prediction import BoxPrediction, MapPrediction, OccupancyGrid, OccupancyPrediction, Prediction
from pipeline.taxonomy import OCCUPANCY_FREE
from tests.evaluation.map_cases import BOUNDARY, DIVIDER, label, line_at

SAMPLES = 6
CONFIG = EvaluateConfig(max_samples=SAMPLES, prior_samples=20)
TRUTH_LINES = label([(line_at(0.0), DIVIDER), (line_at(6.0), BOUNDARY)])


def semantics() -> np.ndarray:
    grid = np.full(SHAPE, OCCUPANCY_FREE, np.uint8)
    grid[:, :, 0] = 11
    return grid


class CopyPredictor:
    """Predicts the annotated boxes with lidar points, the map `TRUTH_LINES` and the occupancy of `semantics`."""

    def __init__(self, maps: bool = True) -> None:
        self.calls: list[str] = []
        self.maps = maps

    def reset(self) -> None:
        self.calls.append("reset")

    def step(self, record: SampleRecord) -> Prediction:
        self.calls.append(record.token)
        known = (record.boxes.class_id >= 0) & (record.boxes.num_lidar_pts > 0)
        boxes = BoxPrediction(
            record.boxes.center_m[known], record.boxes.size_wlh_m[known], record.boxes.yaw_rad[known],
            np.nan_to_num(record.boxes.velocity_mps[known]), record.boxes.class_id[known], np.ones(known.sum(), np.float32),
        )  # fmt: skip
        lines = MapPrediction(
            np.stack([line_at(0.0), line_at(6.0)]), np.array([DIVIDER, BOUNDARY]), np.ones(2, np.float32),
            np.zeros((0, 2, 2)), np.zeros((0, 4, 2)), np.zeros((0, 0), np.uint8), np.zeros(0, np.int64), np.zeros(0, np.int64),
        )  # fmt: skip
        occupancy = OccupancyPrediction([OccupancyGrid(semantics(), *OCC3D.ranges_m)])
        return Prediction(record.token, boxes, lines if self.maps else None, occupancy)


@pytest.fixture(scope="module")
def labelled(minival_index: Index, tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, MapStore]:
    """The real index with a map label for every sample and occupancy labels for the first three."""
    root = tmp_path_factory.mktemp("labelled")
    tokens = minival_index.tokens("val")
    write_labels(root / "maps" / "scenes" / "all.npz", [TRUTH_LINES])
    write_index(root / "maps", dict.fromkeys(tokens, ("scenes/all.npz", 0)))
    for token in tokens[:3]:
        path = labels_path(root, minival_index.sample(token).scene_name, token)
        path.parent.mkdir(parents=True)
        np.savez_compressed(path, semantics=semantics(), mask_lidar=np.ones(SHAPE, np.uint8), mask_camera=np.ones(SHAPE, np.uint8))
    return Index.open(minival_index.directory, dataroot=root), MapStore.open(root / "maps")


@pytest.fixture(scope="module")
def bare_maps(minival_index: Index, tmp_path_factory: pytest.TempPathFactory) -> MapStore:
    directory = tmp_path_factory.mktemp("bare") / "maps"
    write_index(directory, dict.fromkeys(minival_index.tokens("val")))
    return MapStore.open(directory)


def test_copied_labels_score_full_marks(labelled: tuple[Index, MapStore]) -> None:
    index, maps = labelled
    predictor = CopyPredictor()
    result = evaluate(predictor, index, maps, CONFIG, examples=2)
    report = result.report
    assert report["samples"] == SAMPLES and report["skipped"] == {}
    # Not 1: a few annotated boxes have radar points only, which the copy leaves out.
    assert report["detection"]["mAP_occurring"] == pytest.approx(0.970, abs=1e-3)
    assert report["map"]["AP"] == pytest.approx(1.0)
    assert report["occupancy"]["mIoU"] == 1.0
    assert report["occupancy"]["samples"] == 3
    assert [record.token for record, _ in result.examples] == [index.tokens("val")[0], index.tokens("val")[3]]
    again = evaluate(CopyPredictor(), index, maps, CONFIG).report
    assert json.dumps(again, allow_nan=False) == json.dumps(report)


def test_scenes_are_stepped_in_time_order_with_a_reset_between(minival_index: Index, bare_maps: MapStore) -> None:
    predictor = CopyPredictor()
    first, second = list(minival_index.scenes("val").values())[:2]
    config = EvaluateConfig(max_samples=len(first) + 2)
    evaluate(predictor, minival_index, bare_maps, config)
    assert predictor.calls == ["reset", *first, "reset", *second[:2]]


def test_a_head_without_labels_is_skipped_with_the_reason(minival_index: Index, bare_maps: MapStore) -> None:
    report = evaluate(CopyPredictor(), minival_index, bare_maps, CONFIG).report
    assert headlines(report).keys() == {"detection"}
    assert report["skipped"]["map"] == {"has_labels": False, "reason": "no held-out sample has a label"}
    assert report["skipped"]["occupancy"]["has_labels"] is False


def test_a_head_that_the_model_lacks_is_told_apart_from_missing_labels(labelled: tuple[Index, MapStore]) -> None:
    report = evaluate(CopyPredictor(maps=False), *labelled, CONFIG).report
    assert "map" not in report
    assert report["skipped"]["map"] == {"has_labels": True, "reason": "the model does not predict it"}


def test_no_held_out_sample_is_an_error(minival_index: Index, bare_maps: MapStore) -> None:
    empty = Index(minival_index.directory, minival_index.dataroot, {"version": "", "fingerprint": ""}, minival_index.samples.slice(0, 0))
    with pytest.raises(DataError, match=r"dataset\.val_scenes"):
        held_out_scenes(empty, None)


def test_box_prior_is_the_mean_of_the_most_frequent_cell(minival_index: Index) -> None:
    records = [minival_index.sample(token) for token in minival_index.tokens("val")[:10]]
    prior = box_prior([record.boxes for record in records])
    assert prior is not None
    best = int(prior.class_id[0])
    centers = np.concatenate([record.boxes.center_m[record.boxes.class_id == best] for record in records])
    inside = centers[(np.floor(centers[:, :2] / 4.0) == np.floor(prior.center_m[0, :2] / 4.0)).all(axis=1)]
    assert prior.center_m[0] == pytest.approx(inside.mean(axis=0), abs=1e-4)
    assert prior.score[0] == pytest.approx(min(1.0, len(inside) / 10))
    assert (np.diff(prior.score) <= 0).all()


def test_map_prior_finds_the_common_element_and_not_its_copies() -> None:
    labels = [label([(line_at(0.1 * i), DIVIDER)]) for i in range(8)] + [label([(line_at(9.0), DIVIDER)])]
    prior = map_prior(labels)
    assert prior is not None
    assert prior.polylines[:, 0, 1].round(1).tolist() == [pytest.approx(0.0, abs=0.31), 9.0]
    assert prior.score.tolist() == pytest.approx([8 / 9, 1 / 9])
    assert map_prior([label([])]) is None


def test_the_prior_comes_from_the_training_split_alone(labelled: tuple[Index, MapStore]) -> None:
    index, maps = labelled
    assert constant_prior(index, maps, 10) == ConstantPredictor(None, None, None)  # everything is held out
    samples = index.samples.set_column(index.samples.schema.get_field_index("split"), "split", [["train"] * index.samples.num_rows])
    training = Index(index.directory, index.dataroot, {"version": "", "fingerprint": ""}, samples)
    prior = constant_prior(training, maps, len(training))
    assert prior.boxes is not None and prior.map is not None and prior.occupancy is not None
    assert prior.map.score.tolist() == [1.0, 1.0]
    assert np.array_equal(prior.occupancy.levels[0].labels, semantics())


def test_retention_is_the_ratio_of_scores() -> None:
    def report(value: float | None) -> dict:
        return {"map": {"AP": value, "per_class": {"divider": {"AP": value}, "boundary": {"AP": None}}}, "skipped": {}}

    assert retention(report(0.3), report(0.4)) == {
        "map": {"AP": pytest.approx(0.75), "per_class": {"divider": pytest.approx(0.75), "boundary": None}}
    }
    assert retention(report(0.3), report(0.0))["map"]["AP"] is None
    assert retention(report(0.3), {"skipped": {}}) == {}


def test_a_damaged_occupancy_label_stops_the_evaluation(labelled: tuple[Index, MapStore], tmp_path: Path) -> None:
    index, maps = labelled
    token = index.tokens("val")[0]
    path = labels_path(tmp_path, index.sample(token).scene_name, token)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(DataError, match=token):
        evaluate(CopyPredictor(), Index.open(index.directory, dataroot=tmp_path), maps, CONFIG)
