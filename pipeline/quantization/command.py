"""`bevj6 quantize`: any float ONNX model to INT8 for a chip."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from pipeline.config import QuantizationConfig, explain_problems
from pipeline.errors import ConfigError
from pipeline.j6.chip import load_chip
from pipeline.quantization.calibrate import calibrate
from pipeline.quantization.folder import folder_batches
from pipeline.quantization.model import load_float_model
from pipeline.quantization.quantize import Quantized, quantize_network
from pipeline.quantization.reports import ReportFiles, write_results


def quantize_model(model: Path, calibration_dir: Path, chip: str, out: Path, config: QuantizationConfig | None = None) -> Quantized:
    """Calibrate and quantize a model file; writes `out` and, beside it, its reports with the stem of `out` in front of their names.

    Args:
        model: float32 ONNX model with static shapes.
        calibration_dir: see `pipeline.quantization.folder`.
        chip: chip profile, name or file; its simulated time decides between promotions.
        config: None: the defaults, calibrating with as many of the folder's batches as there are, up to 50.

    Raises:
        ChipError, DataError, ModelError, ConfigError: see the functions called; nothing is written then.
    """
    profile = load_chip(chip)
    network = load_float_model(model)
    available, batches = folder_batches(calibration_dir, network.inputs)
    if config is None:
        defaults = QuantizationConfig()
        config = defaults.model_copy(update={"calibration_batches": min(available, defaults.calibration_batches)})
    calibration = calibrate(network, batches, config)
    result = quantize_network(network, calibration, config, profile, lambda: folder_batches(calibration_dir, network.inputs)[1])
    write_results(result, calibration, out, _files_beside(out))
    return result


def _files_beside(out: Path) -> ReportFiles:
    def beside(name: str) -> Path:
        return out.with_name(f"{out.stem}_{name}")

    return ReportFiles(
        errors=beside("layer_wise_error.csv"),
        sensitivity=beside("sensitivity.json"),
        plan=beside("quant_plan.csv"),
        front_csv=beside("mixed_precision.csv"),
        front_figure=beside("mixed_precision.png"),
        distributions_figure=beside("worst_distributions.png"),
    )


def read_quantization(path: Path) -> QuantizationConfig:
    """The quantization section of a YAML file: its key `quantization`, or the whole file where it has none.

    Raises `ConfigError` naming the file, the field, the value and the rule.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a readable YAML file ({error})") from error
    section = content.get("quantization", content) if isinstance(content, dict) else content
    try:
        return QuantizationConfig.model_validate(section if section is not None else {})
    except ValidationError as error:
        raise ConfigError(explain_problems(path, error, "quantization")) from error
