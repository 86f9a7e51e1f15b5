"""Ranges of all tensors of the float model over training samples.

    python -m pipeline.stages.calibrate

Reads models/multitask.onnx, models/contract.json, data/index and the images of the picked training samples. Writes models/calibration.npz.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.paths import Paths
from pipeline.quantization.batches import calibration_batches
from pipeline.quantization.calibrate import calibrate, save_calibration
from pipeline.quantization.model import load_float_model
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """What the stage did; printed as one line."""

    batches: int
    tensors: int
    findings: int

    def __str__(self) -> str:
        return f"{self.tensors} tensors over {self.batches} training samples, {self.findings} findings"


def run(config: Config, paths: Paths) -> Result:
    """Calibrate the exported model.

    Raises:
        DataError: too few training samples, or an input that the linter refuses.
        ModelError: the exported model is missing or unusable.
    """
    model = load_float_model(paths.onnx)
    batches = calibration_batches(config, Index.open(paths.index_dir), paths.onnx, paths.contract)
    calibration = calibrate(model, batches, config.quantization)
    save_calibration(paths.calibration, calibration)
    for finding in calibration.findings:
        print(f"calibrate: {finding}", file=sys.stderr)
    return Result(calibration.batches, len(calibration.statistics), len(calibration.findings))


def main() -> int:
    """Entry point of `python -m pipeline.stages.calibrate`."""
    return stage_main("calibrate", run)


if __name__ == "__main__":
    sys.exit(main())
