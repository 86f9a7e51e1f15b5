"""Train the multi-task model: python -m pipeline.stages.train

Reads data/index, data/maps, images and labels; writes models/float/{model.pt, metrics.json, curves.csv}.
"""

from __future__ import annotations

import sys

from pipeline.config import Config
from pipeline.paths import Paths
from pipeline.stages.main import stage_main
from pipeline.training.trainer import TrainResult, train


def run(config: Config, paths: Paths) -> TrainResult:
    """Train with the parameters in `config`."""
    return train(config, paths)


def main() -> int:
    """Command line."""
    return stage_main("train", run)


if __name__ == "__main__":
    sys.exit(main())
