"""The stage `robustness` on a small generated data set with a network that has learned nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.io import read_json
from pipeline.models.export import export
from pipeline.models.multitask import MultitaskModel
from pipeline.models.predictor import onnx_predictor
from pipeline.models.weights import empty_anchors, load_model, save_model
from pipeline.paths import Paths
from pipeline.robustness.checks import temporal_state
from pipeline.robustness.disturbances import LOST, WEATHER, DisturbedImages
from pipeline.stages import robustness, topology
from pipeline.taxonomy import CAMERAS
from tests.integration.chain import indexed_data_set, project
from tests.models.tiny import TINY

SMALL: dict[str, Any] = {
    "dataset": {"synthetic": {"train_scenes": 1, "val_scenes": 1, "samples_per_scene": 2, "image_width": 96, "image_height": 64}},
    "model": TINY,
    "robustness": {"samples": 2},
}
Project = tuple[Config, Paths]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Project:
    config, paths = project(tmp_path_factory.mktemp("robust"), project_root / "params.yaml", SMALL)
    indexed_data_set(config, paths)
    topology.run(config, paths)
    torch.manual_seed(0)
    anchors = empty_anchors(config.model)
    anchors.boxes[:, :2] = np.random.default_rng(0).uniform(-14.0, 14.0, anchors.boxes[:, :2].shape)
    model = MultitaskModel(config.model, anchors)
    for layer in model.detection.layers:  # confident enough to be remembered
        torch.nn.init.constant_(layer.classify.bias, 3.0)
    save_model(paths.float_dir / "model.pt", config.model, model.state_dict(), ("detection", "map", "occupancy"))
    export(load_model(paths.float_dir / "model.pt"), paths.int8_onnx, paths.contract)
    return config, paths


def test_every_camera_and_weather_is_tried_and_the_report_is_the_same_twice(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    config, paths = built
    monkeypatch.chdir(paths.root)
    assert robustness.run(config, paths).samples == 2
    report = read_json(paths.report("robustness.json"))
    assert set(report["camera_lost"]) == set(CAMERAS)
    assert set(report["weather"]) == {"fog", "night", "rain"}
    for lost in report["camera_lost"].values():
        assert lost["drop"] == {head: pytest.approx(value - lost[head]) for head, value in report["clear"].items()}
    for weather in report["weather"].values():
        assert weather["kept"] == {head: weather[head] / value if value else None for head, value in report["clear"].items()}
    detection = config.model.detection
    state = report["temporal_state"]["detection"]
    assert state["bytes"] == 4 * detection.anchors * (11 + config.model.neck.channels)
    assert state["boxes"] > 0 and state["boxes_changed_by_replay"] == 0
    first = paths.report("robustness.json").read_bytes()
    robustness.run(config, paths)
    assert paths.report("robustness.json").read_bytes() == first


def test_state_that_survives_a_reset_is_found(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    config, paths = built
    monkeypatch.chdir(paths.root)
    index = Index.open(paths.index_dir)
    predictor = onnx_predictor(paths.int8_onnx, paths.contract, config)
    monkeypatch.setattr(predictor, "reset", lambda: None)
    state = temporal_state(predictor, [index.sample(token) for token in index.tokens("val")])
    assert state["boxes_changed_by_replay"] > 0


def test_lost_camera_is_black_and_the_others_are_untouched(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    config, paths = built
    monkeypatch.chdir(paths.root)
    index = Index.open(paths.index_dir)
    record = index.sample(index.tokens("val")[0])
    images = DisturbedImages(config.model.image_size)
    clear = images(record)
    images.disturbance = LOST["CAM_BACK"]
    lost = images(record)
    position = CAMERAS.index("CAM_BACK")
    assert not lost[position].any() and clear[position].any()
    assert np.array_equal(np.delete(lost, position, 0), np.delete(clear, position, 0))


@pytest.mark.parametrize("kind", sorted(WEATHER))
def test_weather_lowers_contrast_and_repeats_itself(kind: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 24, 3), dtype=np.uint8)
    once, again = (WEATHER[kind](images, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(once, again)
    assert once.shape == images.shape and once.dtype == np.uint8
    assert once.std() < 0.8 * images.std()
