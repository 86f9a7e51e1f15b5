"""The pipeline on real nuScenes pieces.

Three key frames of two scenes to train on, one of a third held out; no occupancy labels, two lidar files missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from pipeline.io import read_json
from pipeline.paths import Paths
from tests.integration.chain import project, run_stages

STAGES = [
    "dataset", "validate", "topology", "train", "evaluate", "export", "calibrate", "quantize", "evaluate_int8", "compile", "profile", "gate",
]  # fmt: skip

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def run(shared: Path, project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Paths, dict[str, Any]]:
    dataroot = shared / "data" / "nuscenes-subset"
    overrides = {
        "dataset": {
            "source": "nuscenes",
            "dataroot": str(dataroot),
            "version": "v1.0-trainval",
            "watch": str(dataroot / "v1.0-trainval"),
            "val_scenes": ["scene-0003"],
        },
        # The tables hold a re-packed excerpt, which breaks rules about chains and neighbours: report, and go on.
        "validation": {"fail_on": "never"},
        "quantization": {"calibration_batches": 3},
    }
    root = tmp_path_factory.mktemp("real")
    config, paths = project(root, project_root / "params.yaml", overrides)
    return paths, run_stages(STAGES, config, paths)


def test_what_the_data_lacks_is_reported(run: tuple[Paths, dict[str, Any]]) -> None:
    paths, _ = run
    data = read_json(paths.dataset_json)
    assert data["provides"]["occupancy"] == 0
    assert data["splits"] == {"train": ["scene-0061", "scene-0103"], "val": ["scene-0003"]}
    metrics = read_json(paths.float_dir / "metrics.json")
    assert "occupancy" in str(metrics)
    for name in ("eval_float.json", "eval_int8.json"):
        report = read_json(paths.report(name))
        assert "occupancy" not in report
        assert report["skipped"]["occupancy"]["has_labels"] is False
        assert report["detection"]["mAP"] >= 0.0


def test_int8_model_runs_and_has_a_simulated_latency(run: tuple[Paths, dict[str, Any]]) -> None:
    paths, _ = run
    session = onnxruntime.InferenceSession(paths.int8_onnx, providers=["CPUExecutionProvider"])
    assert {"images", "det_anchors", "det_features"} <= {value.name for value in session.get_inputs()}
    profile = read_json(paths.report("profile.json"))
    assert profile["chip"] == "j6m"
    assert profile["latency_ms"] > 0.0
    assert profile["ddr_bytes_per_frame"] > 0
    assert set(profile["by_head_ms"]) >= {"detection", "map"}
    assert len(profile["profile_hash"]) == 64


def test_a_barely_trained_model_does_not_pass_the_gate(run: tuple[Paths, dict[str, Any]]) -> None:
    paths, _ = run
    gate = read_json(paths.report("gate.json"))
    assert gate["passed"] is False
    verdicts = {rule["name"]: rule for rule in gate["rules"]}
    assert any(rule["verdict"] == "skipped" for rule in verdicts.values())
    assert all({"name", "value", "limit", "passed", "severity"} <= set(rule) for rule in gate["rules"])
