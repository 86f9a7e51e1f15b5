"""Accuracy of the INT8 model on the held-out scenes, run by onnxruntime with the same host code and metrics as the float model.

    python -m pipeline.stages.evaluate_int8

Reads models/multitask_int8.onnx, models/multitask.onnx, models/contract.json, reports/eval_float.json, data/index, data/maps, images and occupancy
labels. Writes reports/eval_int8.json with the retention table (INT8 / float), the fidelity of road edges and the samples that lose most and, if
evaluate.detections_json is set, reports/detections_int8.json.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.evaluation.retention import retention
from pipeline.evaluation.runner import HEADLINES, evaluate, headlines, held_out_scenes
from pipeline.evaluation.samples import SampleScorer
from pipeline.io import read_json, write_json
from pipeline.maps.store import MapStore
from pipeline.models.predictor import onnx_predictor
from pipeline.paths import Paths
from pipeline.quantization.bev import EdgeProbe
from pipeline.quantization.cases import SideBySide
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """Headline metric and the share of the float value that is kept, by head; printed as one line."""

    metrics: dict[str, float]
    kept: dict[str, float | None]

    def __str__(self) -> str:
        parts = []
        for head, value in self.metrics.items():
            kept = self.kept.get(head)
            parts.append(f"{head} {HEADLINES[head]} {value:.3f}" + ("" if kept is None else f" ({100 * kept:.1f} % of float)"))
        return ", ".join(parts) or "no head could be evaluated"


def run(config: Config, paths: Paths) -> Result:
    """Evaluate the quantized model.

    Raises:
        DataError: an input is missing or damaged, or nothing is held out.
        ModelError: the model cannot be loaded or predicts something impossible.
    """
    reference = read_json(paths.report("eval_float.json"))
    index, maps = Index.open(paths.index_dir), MapStore.open(paths.maps_dir)
    predictor, exact = (onnx_predictor(path, paths.contract, config) for path in (paths.int8_onnx, paths.onnx))
    probe = EdgeProbe(predictor.session, exact.session, predictor.config.occupancy.levels[0])
    if "occupancy" in predictor.tasks:
        predictor.session = probe
    tokens = [token for scene in held_out_scenes(index, config.evaluate.max_samples).values() for token in scene]
    scorer = SampleScorer(index, maps, tokens, config.evaluate)
    both = SideBySide(predictor, exact, scorer.scores)
    result = evaluate(both, index, maps, config.evaluate)
    report = {**result.report, "retention": retention(result.report, reference), "bev": probe.report(), "bad_cases": both.worst()}
    if config.evaluate.detections_json:
        write_json(paths.report("detections_int8.json"), result.submission())
    write_json(paths.report("eval_int8.json"), report)
    return Result(headlines(report), {head: kept[HEADLINES[head]] for head, kept in report["retention"].items()})


def main() -> int:
    """Entry point of `python -m pipeline.stages.evaluate_int8`."""
    return stage_main("evaluate_int8", run)


if __name__ == "__main__":
    sys.exit(main())
