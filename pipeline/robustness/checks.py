"""The checks, on the first held-out samples: accuracy with each camera lost, accuracy in each weather, and the temporal state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.dataset.records import SampleRecord
from pipeline.evaluation.runner import evaluate, headlines, held_out_scenes
from pipeline.maps.store import MapStore
from pipeline.models.predictor import Predictor
from pipeline.robustness.disturbances import LOST, WEATHER, Disturbance, DisturbedImages, unchanged

STATE_INPUTS = ("det_anchors", "det_features")
Scores = dict[str, float]


def examine(predictor: Predictor, images: DisturbedImages, index: Index, maps: MapStore, config: Config) -> dict[str, Any]:
    """All checks.

    Args:
        predictor: the model as it is deployed; `images` is its image source.
        images: what the disturbances are given to.
        index: samples.
        maps: map labels.
        config: sections `robustness` and `evaluate`.

    Returns:
        The content of reports/robustness.json: `samples`, `scenes`, `skipped` as in the evaluation; `clear`, headline metrics by head; `camera_lost`,
        for each camera the headlines and their `drop` below clear; `weather`, for each kind the headlines, the share `kept` of clear, and the
        smallest share over the heads; `temporal_state`, by head.

    Raises:
        DataError: nothing is held out, or an image or a label file is damaged.
        ModelError: a prediction is not finite.
    """
    limited = config.evaluate.model_copy(update={"max_samples": config.robustness.samples})

    def scores(disturbance: Disturbance) -> tuple[Scores, dict[str, Any]]:
        images.disturbance = disturbance
        report = evaluate(predictor, index, maps, limited).report
        return headlines(report), report

    clear, report = scores(unchanged)
    lost = {camera: _lost(clear, scores(disturbance)[0]) for camera, disturbance in LOST.items()}
    weather = {kind: _weather(clear, scores(disturbance)[0]) for kind, disturbance in WEATHER.items()}
    images.disturbance = unchanged
    first = next(iter(held_out_scenes(index, config.robustness.samples).values()))
    state = {"detection": temporal_state(predictor, [index.sample(token) for token in first])} if "detection" in predictor.tasks else {}
    about = {name: report[name] for name in ("samples", "scenes", "skipped")}
    return {**about, "clear": clear, "camera_lost": lost, "weather": weather, "temporal_state": state}


def _lost(clear: Scores, without: Scores) -> dict[str, Any]:
    return {**without, "drop": {head: clear[head] - value for head, value in without.items()}}


def _weather(clear: Scores, disturbed: Scores) -> dict[str, Any]:
    kept = {head: value / clear[head] if clear[head] else None for head, value in disturbed.items()}
    shares = [share for share in kept.values() if share is not None]
    return {**disturbed, "kept": kept, "kept_least": min(shares, default=None)}


def temporal_state(predictor: Predictor, records: Sequence[SampleRecord]) -> dict[str, int]:
    """What the detection head remembers between the frames of a scene.

    Returns:
        `bytes`: size of the state that the network reads, the same for every frame; `boxes`: predicted in the scene; `boxes_changed_by_replay`: how
        many of them come out otherwise when the scene is played once more: 0, unless something beside this state survives `reset`.
    """
    predictor.reset()
    inputs = predictor.inputs(records[0])
    first, second = (_box_rows(predictor, records) for _ in range(2))
    changed = sum((first - second).values())
    return {"bytes": sum(inputs[name].nbytes for name in STATE_INPUTS), "boxes": first.total(), "boxes_changed_by_replay": changed}


def _box_rows(predictor: Predictor, records: Sequence[SampleRecord]) -> Counter[tuple[str, bytes]]:
    """Every box of a scene, bit by bit, with its sample."""
    predictor.reset()
    rows: Counter[tuple[str, bytes]] = Counter()
    for record in records:
        boxes = predictor.step(record).boxes
        assert boxes is not None
        parts = (boxes.center_m, boxes.size_wlh_m, boxes.yaw_rad[:, None], boxes.velocity_mps, boxes.class_id[:, None], boxes.score[:, None])
        rows.update((record.token, row.tobytes()) for row in np.concatenate(parts, axis=1))
    return rows
