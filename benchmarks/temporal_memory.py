"""What the memory of earlier frames is worth: the trained model with its instance bank, and with a bank that forgets before every frame.

    python benchmarks/temporal_memory.py        # in a project whose stages up to train have run

Evaluates models/float/model.pt on the held-out scenes both ways and prints one JSON document: NDS, mAP and the errors of the boxes found, and the
velocity error of moving classes. The difference is what the frames before the present one contribute.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.config import Config, load_config
from pipeline.dataset.images import ImageStore
from pipeline.dataset.index import Index
from pipeline.dataset.records import SampleRecord
from pipeline.evaluation.runner import evaluate
from pipeline.maps.store import MapStore
from pipeline.models.prediction import Prediction
from pipeline.models.predictor import Predictor, torch_predictor
from pipeline.paths import Paths

SHOWN = ("NDS", "mAP", "mATE", "mASE", "mAOE", "mAVE")
MOVING = ("car", "truck", "bus", "motorcycle")


class Forgetful:
    """A predictor whose every frame is the first of a scene."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def reset(self) -> None:
        """Nothing is remembered anyway."""

    def step(self, record: SampleRecord) -> Prediction:
        """Predict without memory."""
        self._predictor.reset()
        return self._predictor.step(record)


def measure(config: Config, paths: Paths) -> dict[str, dict[str, Any]]:
    """Detection metrics with and without memory."""
    index, maps = Index.open(paths.index_dir), MapStore.open(paths.maps_dir)
    images = ImageStore(index, config.model.image_size, paths.image_cache_dir).images
    predictor = torch_predictor(paths.float_dir / "model.pt", config, images)
    results = {}
    for name, candidate in (("with_memory", predictor), ("without_memory", Forgetful(predictor))):
        report = evaluate(candidate, index, maps, config.evaluate).report["detection"]
        speeds = {label: report["per_class"][label]["AVE"] for label in MOVING}
        results[name] = {**{metric: report[metric] for metric in SHOWN}, "AVE_mps": speeds}
    return results


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    paths = Paths(Path.cwd())
    print(json.dumps(measure(load_config(paths.params), paths), indent=2))


if __name__ == "__main__":
    main()
