"""INT8 QDQ model, error of every layer, sensitivity.

python -m pipeline.stages.quantize
"""

from __future__ import annotations

import sys

from pipeline.config import Config
from pipeline.paths import Paths
from pipeline.quantization.calibrate import load_calibration
from pipeline.quantization.model import load_float_model
from pipeline.quantization.quantize import Quantized, quantize_network, write_results
from pipeline.stages.main import stage_main


def run(config: Config, paths: Paths) -> Quantized:
    """models/multitask.onnx and models/calibration.npz -> models/multitask_int8.onnx and the two reports."""
    model = load_float_model(paths.onnx)
    result = quantize_network(model, load_calibration(paths.calibration, model), config.quantization)
    write_results(result, paths.int8_onnx, paths.report("layer_wise_error.csv"), paths.report("sensitivity.json"))
    for finding in result.findings:
        print(f"quantize: {finding}", file=sys.stderr)
    return result


def main() -> int:
    """Entry point of `python -m pipeline.stages.quantize`."""
    return stage_main("quantize", run)


if __name__ == "__main__":
    sys.exit(main())
