"""Accuracy of the float model on the held-out scenes.

    python -m pipeline.stages.evaluate

Reads models/float, data/index, data/maps, images and occupancy labels. Writes reports/eval_float.json (with the constant prior beside it),
reports/predictions_float.png and, if evaluate.detections_json is set, reports/detections_float.json.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.evaluation.baseline import constant_prior
from pipeline.evaluation.pictures import write_pictures
from pipeline.evaluation.runner import HEADLINES, evaluate, headlines, with_prior
from pipeline.io import write_json
from pipeline.maps.store import MapStore
from pipeline.models.predictor import torch_predictor
from pipeline.paths import Paths
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """Headline metric by head; printed as one line."""

    metrics: dict[str, float]
    samples: int

    def __str__(self) -> str:
        values = ", ".join(f"{head} {HEADLINES[head]} {value:.3f}" for head, value in self.metrics.items())
        return f"{values or 'no head could be evaluated'} on {self.samples} samples"


def run(config: Config, paths: Paths) -> Result:
    """Evaluate the torch model.

    Raises:
        DataError: an input is missing or damaged, or nothing is held out.
        ModelError: the model cannot be read or predicts something impossible.
    """
    index, maps = Index.open(paths.index_dir), MapStore.open(paths.maps_dir)
    predictor = torch_predictor(paths.float_dir / "model.pt", config)
    result = evaluate(predictor, index, maps, config.evaluate, config.evaluate.pictures)
    prior = evaluate(constant_prior(index, maps, config.evaluate.prior_samples), index, maps, config.evaluate)
    write_pictures(paths.report("predictions_float.png"), result.examples, index, maps)
    if config.evaluate.detections_json:
        write_json(paths.report("detections_float.json"), result.submission())
    write_json(paths.report("eval_float.json"), with_prior(result.report, prior.report))
    return Result(headlines(result.report), result.report["samples"])


def main() -> int:
    """Entry point of `python -m pipeline.stages.evaluate`."""
    return stage_main("evaluate", run)


if __name__ == "__main__":
    sys.exit(main())
