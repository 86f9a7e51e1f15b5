"""The stages evaluate and evaluate_int8 on real samples with a model that has learned nothing."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from pipeline.config import Config, load_config, merge
from pipeline.dataset.build import build_index
from pipeline.dataset.index import Index, write_index
from pipeline.dataset.tables import read_tables
from pipeline.errors import ModelError
from pipeline.evaluation.runner import HEADLINES
from pipeline.io import read_json
from pipeline.maps.build import MapSources, build_map_labels
from pipeline.models.export import export
from pipeline.models.multitask import MultitaskModel
from pipeline.models.weights import empty_anchors, load_model, save_model
from pipeline.paths import Paths
from pipeline.quantization.acceptance import share_kept
from pipeline.stages import evaluate, evaluate_int8

Project = tuple[Config, Paths]


@pytest.fixture(scope="module")
def project(minival_root: Path, project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """scene-0103 for training, scene-0061 held out, six cameras and map labels, no occupancy labels; the float ONNX stands for the INT8 one."""
    config = load_config(project_root / "params.yaml", {"evaluate": {"pictures": 1, "detections_json": True}, "model": {"image_size": [64, 192]}})
    paths = Paths(tmp_path_factory.mktemp("project"))
    tables = read_tables(minival_root, "v1.0-mini")
    splits = {"val": ["scene-0061"], "train": ["scene-0103"]}
    write_index(build_index(tables, splits), paths.index_dir, str(minival_root), "v1.0-mini", "fingerprint")
    sources = MapSources(minival_root, None, config.maps.topology.node_tolerance_m)
    build_map_labels(Index.open(paths.index_dir), paths.maps_dir, sources, config.maps, workers=1)
    torch.manual_seed(0)
    model = MultitaskModel(config.model, empty_anchors(config.model))
    save_model(paths.float_dir / "model.pt", config.model, model.state_dict(), ("detection", "map", "occupancy"))
    export(load_model(paths.float_dir / "model.pt"), paths.int8_onnx, paths.contract)
    paths.onnx.write_bytes(paths.int8_onnx.read_bytes())
    return config, paths


def test_float_then_int8(project: Project) -> None:
    config, paths = project
    result = evaluate.run(config, paths)
    report = read_json(paths.report("eval_float.json"))
    assert result.samples == report["samples"] == 1
    assert report["detection"]["mAP"] == result.metrics["detection"]
    assert report["skipped"] == {"occupancy": {"has_labels": False, "reason": "no held-out sample has a label"}}
    assert set(report["prior"]) == set(report["times_prior"]) == {"detection", "map"}
    assert paths.report("predictions_float.png").stat().st_size > 100_000

    evaluate_int8.run(config, paths)
    int8 = read_json(paths.report("eval_int8.json"))
    # The same network run by onnxruntime: the same accuracy to rounding.
    assert int8["detection"]["mAP"] == pytest.approx(report["detection"]["mAP"], abs=1e-3)
    assert int8["map"]["AP"] == pytest.approx(report["map"]["AP"], abs=1e-3)
    assert set(int8["retention"]) == {"detection", "map"}
    assert share_kept(onnx.load(paths.int8_onnx), config, paths) == {head: int8["retention"][head][HEADLINES[head]] for head in int8["retention"]}
    assert set(int8["retention"]["detection"]["per_size"]) == {"small", "medium", "large"}
    assert int8["bad_cases"] == {"detection": [], "map": []}  # both models are the same file: nothing is lost
    assert int8["bev"]["samples"] == 1 and int8["bev"]["road_edge_psnr_db"] in (None, 200.0)  # both sessions run the same file
    assert list(read_json(paths.report("detections_int8.json"))["results"]) == list(read_json(paths.report("detections_float.json"))["results"])


def test_a_missing_model_is_named_and_the_last_report_stays(project: Project, tmp_path: Path) -> None:
    config, paths = project
    changed = config.model_validate(merge(config.model_dump(), {"evaluate": {"max_samples": 1}}))
    elsewhere = Paths(tmp_path)
    (tmp_path / "data").symlink_to(paths.root / "data")
    elsewhere.reports.mkdir()
    elsewhere.report("eval_float.json").write_text("{}\n")
    with pytest.raises(ModelError, match=r"model\.pt"):
        evaluate.run(changed, elsewhere)
    assert elsewhere.report("eval_float.json").read_text() == "{}\n"
    with pytest.raises(ModelError, match=r"multitask_int8\.onnx"):
        elsewhere.contract.parent.mkdir(parents=True, exist_ok=True)
        elsewhere.contract.write_bytes(paths.contract.read_bytes())
        evaluate_int8.run(changed, elsewhere)
