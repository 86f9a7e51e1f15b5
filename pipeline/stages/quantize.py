"""INT8 QDQ model, plan as applied, error of every layer, sensitivity, mixed-precision search.

python -m pipeline.stages.quantize
"""

from __future__ import annotations

import sys

from pipeline.config import Config
from pipeline.j6.chip import load_chip
from pipeline.paths import Paths
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
    result = quantize_network(model, calibration, config.quantization, load_chip(config.j6.chip, config.j6.chip_overrides))
    write_results(result, calibration, paths.int8_onnx, report_files(paths))
    for finding in result.findings:
        print(f"quantize: {finding}", file=sys.stderr)
    if result.promotion.search is not None:
        print(front_text(result.promotion.search), file=sys.stderr)
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
