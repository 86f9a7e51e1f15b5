"""A small project tree with report files as the stages write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from pipeline.config import Config, load_config
from pipeline.dataset.occupancy import SHAPE
from pipeline.evaluation.boxes import to_global
from pipeline.evaluation.detection import evaluate_detection
from pipeline.evaluation.map import evaluate_map
from pipeline.evaluation.occupancy import OCC3D, OccupancyEvaluator
from pipeline.gate import judge
from pipeline.io import write_json, write_text
from pipeline.models.prediction import BoxPrediction, OccupancyGrid, OccupancyPrediction
from pipeline.paths import Paths
from pipeline.taxonomy import DETECTION_CLASSES
from tests.evaluation.map_cases import BOUNDARY, DIVIDER, label, line_at, prediction

CHECKLIST = {"coordinate_consistency_rms_m": 0.04, "sensor_timestamps_ms": 2.1, "channel_alignment_std": 0.3}
LAYERS = """tensor,module,op,dtype,sqnr_db,cosine,local_sqnr_db,saturation,rule
a,map_head.decoder.0,MatMul,int8,14.2,0.981,38.0,0.001,default
b,backbone.stages.3.<b>,Conv,int8,21.9,0.997,41.0,0,default
"""


def eval_report(offset_m: float) -> dict[str, Any]:
    """All heads, measured on a box of each class, two lines and a grid that are `offset_m` off."""
    n = len(DETECTION_CLASSES)
    centers = np.stack([np.linspace(-25, 25, n), np.full(n, 4.0), np.ones(n)], axis=1).astype(np.float32)
    sizes, scores = np.full((n, 3), 2.0, np.float32), np.linspace(0.9, 0.5, n).astype(np.float32)
    boxes = BoxPrediction(centers, sizes, np.zeros(n, np.float32), np.zeros((n, 2), np.float32), np.arange(n), scores)
    shift = np.eye(4)
    shift[0, 3] = offset_m
    lines = prediction([(line_at(offset_m), DIVIDER, 0.9), (line_at(6 + offset_m), BOUNDARY, 0.8)])
    grid = np.full(SHAPE, 17, np.uint8)
    grid[:, :, 0] = 11
    shifted = np.roll(grid, round(offset_m * 10), axis=0)
    shifted[: round(offset_m * 100)] = 17
    occupancy = OccupancyEvaluator()
    occupancy.add(grid, np.ones(SHAPE, bool), OccupancyPrediction([OccupancyGrid(shifted, *OCC3D.ranges_m)]))
    return {
        "scenes": 2,
        "samples": 10,
        "detection": evaluate_detection(to_global(boxes, np.eye(4), 0, "s"), to_global(boxes, shift, 0, "s"), {}, 10),
        "map": evaluate_map([label([(line_at(0), DIVIDER), (line_at(6), BOUNDARY)])], [lines], (0.5, 1.0, 1.5)),
        "occupancy": occupancy.result(),
        "skipped": {},
    }


def profile_report() -> dict[str, Any]:
    return {
        "chip": "j6m", "latency_ms": 9.87, "fps": 101.3, "ddr_bytes_per_frame": 52_000_000, "ddr_gbps_at_design_fps": 0.52, "profile_hash": "ab" * 32,
        "by_head_ms": {"shared": 5.0, "detection": 2.5, "map": 1.5, "occupancy": 0.8, "host": 0.07},
        "by_module_ms": {"backbone.stages": 4.0, "map_head.decoder": 1.5},
        "conditions": {"scenario": "nominal", "p50_ms": 9.9, "p99_ms": 10.6},
        "memory": {"temporary": {"peak_bytes": 3_000_000}, "total_ddr_bytes": 9_200_000},
        "bottleneck": "blocks limited by the DDR bus",
        "summary": {"DDR access data": {
            "input memory bytes": 1_000_000, "output memory bytes": 200_000, "static memory bytes": 5_000_000, "dynamic memory bytes": 3_000_000,
        }},
    }  # fmt: skip


def robustness_report() -> dict[str, Any]:
    clear, lost = {"detection": 0.41, "map": 0.52, "occupancy": 0.31}, {"detection": 0.36, "map": 0.5, "occupancy": 0.28}
    return {
        "samples": 12, "scenes": 2, "skipped": {}, "clear": clear,
        "camera_lost": {"CAM_FRONT": {**lost, "drop": {head: clear[head] - value for head, value in lost.items()}}},
        "weather": {"fog": {**lost, "kept": {head: value / clear[head] for head, value in lost.items()}, "kept_least": 0.87}},
        "temporal_state": {"detection": {"bytes": 410_112, "boxes": 300, "boxes_changed_by_replay": 0}},
    }  # fmt: skip


@pytest.fixture
def release(tmp_path: Path, project_root: Path) -> tuple[Config, Paths]:
    """Parameters and a project tree of a release that passes its gate."""
    config, paths = load_config(project_root / "params.yaml"), Paths(tmp_path)
    prior = {name: report for name, report in eval_report(1.4).items() if name in ("detection", "map", "occupancy")}
    measured = eval_report(0.2)
    measured |= {"prior": prior, "times_prior": {"detection": 4.0, "map": 3.2, "occupancy": 5.0}}
    write_json(paths.report("eval_float.json"), measured)
    write_json(paths.report("eval_int8.json"), eval_report(0.2) | {"retention": {}})
    write_json(paths.report("robustness.json"), robustness_report())
    write_json(paths.report("profile.json"), profile_report())
    rule = {"name": "camera_phase", "severity": "warning", "failed": 3, "checked": 400, "meaning": ""}
    samples = {"total": 400, "kept": 397, "dropped": {}}
    write_json(paths.report("validation.json"), {"counts": {"error": 0, "warning": 3}, "samples": samples, "rules": [rule], "checklist": CHECKLIST})
    write_json(paths.report("topology.json"), {"elements": {"divider": 1200, "ped_crossing": 80, "boundary": 900}, "clip_rate": 0.31})
    write_json(paths.report("sensitivity.json"), {"tensors": {"int8": 210, "int16": 14}, "promoted": [{"tensor": "a", "reason": "worst"}]})
    write_text(paths.report("layer_wise_error.csv"), LAYERS)
    cv2.imwrite(str(paths.report("predictions_float.png")), np.full((40, 120, 3), 200, np.uint8))
    write_text(paths.float_dir / "curves.csv", "step,loss\n0,9.5\n500,4.0\n1000,2.75\n")
    write_json(paths.float_dir / "metrics.json", {"loss": 2.75})
    write_text(paths.int8_onnx, "stands for a model: only its hash is shown")
    write_json(
        paths.dataset_json,
        {
            "source": "synthetic", "version": "v1.0-synthetic", "dataroot": "data/nuscenes", "fingerprint": "cd" * 32,
            "counts": {"sample": 400, "sample_annotation": 8000, "sample_data": 2800, "instance": 900},
            "provides": {"lidar": True, "map_expansion": ["boston-seaport"], "occupancy": 400},
            "splits": {"train": ["a", "b"], "val": ["c"]},
        },
    )  # fmt: skip
    write_json(paths.report("gate.json"), judge(config.gate.rules, paths.reports, config.model.tasks, None, config.gate.checklist))
    return config, paths
