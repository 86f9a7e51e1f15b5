"""`bevj6 quantize`: any float ONNX model to INT8 for a chip."""

from __future__ import annotations

from pathlib import Path

from pipeline.config import QuantizationConfig
from pipeline.j6.chip import load_chip
from pipeline.quantization.calibrate import calibrate
from pipeline.quantization.folder import folder_batches
from pipeline.quantization.model import load_float_model
from pipeline.quantization.quantize import Quantized, quantize_network, write_results


def quantize_model(model: Path, calibration_dir: Path, chip: str, out: Path, config: QuantizationConfig | None = None) -> Quantized:
    """Calibrate and quantize a model file; writes `out` and, beside it, <stem>_layer_wise_error.csv and <stem>_sensitivity.json.

    Args:
        model: float32 ONNX model with static shapes.
        calibration_dir: see `pipeline.quantization.folder`.
        chip: chip profile, name or file; all profiles share the number format, so it is checked and not otherwise used yet.
        config: None: the defaults, calibrating with as many of the folder's batches as there are, up to 50.

    Raises:
        ChipError, DataError, ModelError, ConfigError: see the functions called; nothing is written then.
    """
    load_chip(chip)
    network = load_float_model(model)
    available, batches = folder_batches(calibration_dir, network.inputs)
    if config is None:
        defaults = QuantizationConfig()
        config = defaults.model_copy(update={"calibration_batches": min(available, defaults.calibration_batches)})
    result = quantize_network(network, calibrate(network, batches, config), config)
    write_results(result, out, out.with_name(f"{out.stem}_layer_wise_error.csv"), out.with_name(f"{out.stem}_sensitivity.json"))
    return result
