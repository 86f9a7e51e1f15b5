"""INT8 QDQ model, plan as applied, error of every layer, sensitivity, mixed-precision search, training where that is not enough.

    python -m pipeline.stages.quantize

Reads models/multitask.onnx, models/contract.json, models/calibration.npz and, to decide about training, reports/eval_float.json with the held-out
samples; training reads training samples.
"""

from __future__ import annotations

import sys

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.j6.chip import load_chip
from pipeline.paths import Paths
from pipeline.quantization.acceptance import share_kept
from pipeline.quantization.batches import training_batches
from pipeline.quantization.calibrate import load_calibration
from pipeline.quantization.model import load_float_model
from pipeline.quantization.quantize import Quantized, quantize_network
from pipeline.quantization.reports import ReportFiles, front_text, write_results
from pipeline.stages.main import stage_main


def run(config: Config, paths: Paths) -> Quantized:
    """models/multitask.onnx and models/calibration.npz -> models/multitask_int8.onnx and the reports on it.

    Raises:
        ConfigError, ModelError, DataError, ChipError: see the functions called; the last good files stay.
    """
    model = load_float_model(paths.onnx)
    calibration = load_calibration(paths.calibration, model)
    settings = config.quantization
    chip = load_chip(config.j6.chip, config.j6.chip_overrides)
    result = quantize_network(
        model,
        calibration,
        settings,
        chip,
        training=lambda: training_batches(config, Index.open(paths.index_dir), paths.onnx, paths.contract, settings.qat.samples),
        kept=lambda proto: share_kept(proto, config, paths),
    )
    write_results(result, calibration, paths.int8_onnx, report_files(paths))
    for finding in result.findings:
        print(f"quantize: {finding}", file=sys.stderr)
    if result.promotion.search is not None:
        print(front_text(result.promotion.search), file=sys.stderr)
    if result.training.reason:
        verdict = "used" if result.training.used else "not used"
        print(f"quantize: training because {result.training.reason}: {verdict}", file=sys.stderr)
    return result


def report_files(paths: Paths) -> ReportFiles:
    """Where this stage's reports go."""
    return ReportFiles(
        errors=paths.report("layer_wise_error.csv"),
        sensitivity=paths.report("sensitivity.json"),
        plan=paths.report("quant_plan.csv"),
        front_csv=paths.report("mixed_precision.csv"),
        front_figure=paths.report("mixed_precision.png"),
        distributions_figure=paths.report("worst_distributions.png"),
    )


def main() -> int:
    """Entry point of `python -m pipeline.stages.quantize`."""
    return stage_main("quantize", run)


if __name__ == "__main__":
    sys.exit(main())
