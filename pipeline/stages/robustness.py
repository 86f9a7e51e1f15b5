"""What the INT8 model still does with a camera lost, in bad weather, and from a scene played twice.

    python -m pipeline.stages.robustness

Reads models/multitask_int8.onnx, models/contract.json, data/index, data/maps, images and occupancy labels. Writes reports/robustness.json.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.evaluation.runner import HEADLINES
from pipeline.io import write_json
from pipeline.maps.store import MapStore
from pipeline.models.predictor import onnx_predictor
from pipeline.paths import Paths
from pipeline.robustness.checks import examine
from pipeline.robustness.disturbances import DisturbedImages
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """The largest drop with one camera lost, by head, and the smallest share kept in each weather; printed as one line."""

    drops: dict[str, float]
    kept: dict[str, float | None]
    samples: int

    def __str__(self) -> str:
        lost = ", ".join(f"{head} {HEADLINES[head]} -{drop:.3f}" for head, drop in self.drops.items())
        weather = ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in self.kept.items() if share is not None)
        return f"one camera lost: {lost or 'no head could be evaluated'}; kept in {weather or 'no weather'}; {self.samples} samples"


def run(config: Config, paths: Paths) -> Result:
    """Examine the quantized model.

    Raises:
        DataError: an input is missing or damaged, or nothing is held out.
        ModelError: the model cannot be loaded or predicts something impossible.
    """
    index, maps = Index.open(paths.index_dir), MapStore.open(paths.maps_dir)
    images = DisturbedImages(config.model.image_size)
    predictor = onnx_predictor(paths.int8_onnx, paths.contract, config, images)
    report = examine(predictor, images, index, maps, config)
    write_json(paths.report("robustness.json"), report)
    drops = {head: max(lost["drop"][head] for lost in report["camera_lost"].values()) for head in report["clear"]}
    return Result(drops, {kind: weather["kept_least"] for kind, weather in report["weather"].items()}, report["samples"])


def main() -> int:
    """Entry point of `python -m pipeline.stages.robustness`."""
    return stage_main("robustness", run)


if __name__ == "__main__":
    sys.exit(main())
