"""From a float model and its calibration to the INT8 model: plan, sensitivity, promotion, QDQ, error table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from pipeline.config import QuantizationConfig
from pipeline.errors import ModelError
from pipeline.io import atomic_path, write_json, write_text
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.compare import LayerError, layer_errors, local_errors_db, sqnr_db, to_csv
from pipeline.quantization.lint import Finding, lint_plan
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, make_plan
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.sensitivity import Sensitivity, choose_promotions, measure, worst_by_own_error
from pipeline.quantization.sessions import Runner, output_noise


@dataclass(frozen=True)
class Quantized:
    """The INT8 model and everything that explains it. `output_noise` is noise power / signal power by output, before and after promotion."""

    proto: ModelProto
    plan: QuantPlan
    errors: list[LayerError]
    sensitivity: list[Sensitivity]
    promoted: Mapping[str, str]
    findings: tuple[Finding, ...]
    noise_before: Mapping[str, float]
    noise_after: Mapping[str, float]

    def counts(self) -> dict[str, int]:
        """Quantized storage groups by dtype."""
        counts: dict[str, int] = {}
        for decision in self.plan.roots().values():
            counts[decision.dtype] = counts.get(decision.dtype, 0) + 1
        return counts

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {dtype}" for dtype, count in sorted(self.counts().items()))
        worst = max(self.noise_after, key=lambda name: self.noise_after[name])
        return f"{counts} tensors ({len(self.promoted)} promoted), worst output {worst} at {sqnr_db(1.0, self.noise_after[worst]):.1f} dB SQNR"


def quantize_network(model: FloatModel, calibration: Calibration, config: QuantizationConfig) -> Quantized:
    """Quantize `model`; the first analysis batch measures sensitivity, all of them the error table.

    Raises:
        ConfigError: a rule matches nothing, or two rules disagree.
        ModelError: calibration and model do not fit, or the analysis batches are missing.
    """
    if not calibration.analysis:
        raise ModelError(f"{model.path}: the calibration keeps no analysis batch; calibrate again")
    base = make_plan(model, config, calibration.statistics)
    results = _sensitivity(model, base, calibration, config)
    int8 = sum(decision.dtype == "int8" for decision in base.roots().values())
    promoted = choose_promotions(results, int8, config.promote_fraction)
    plan = make_plan(model, config, calibration.statistics, promoted) if promoted else base
    proto = write_qdq(model, plan)
    before = _noise(model, write_qdq(model, base) if promoted else proto, calibration, config)
    after = _noise(model, proto, calibration, config) if promoted else before
    errors = layer_errors(model, plan, proto, calibration.analysis, config.threads)
    findings = (*calibration.findings, *lint_plan(model, plan))
    return Quantized(proto, plan, errors, results, promoted, findings, before, after)


def _sensitivity(model: FloatModel, plan: QuantPlan, calibration: Calibration, config: QuantizationConfig) -> list[Sensitivity]:
    first = calibration.analysis[:1]
    own = local_errors_db(model, plan, first, config.threads)
    candidates = worst_by_own_error(own, plan, config.sensitivity_tensors)
    return measure(model, plan, candidates, first, config.threads)


def _noise(model: FloatModel, qdq: ModelProto, calibration: Calibration, config: QuantizationConfig) -> dict[str, float]:
    """Noise power / signal power of each float output of the QDQ model, mean over the analysis batches."""
    outputs = [name for name in model.outputs if name in model.float_tensors]
    exact, quantized = Runner(model.proto, outputs, config.threads), Runner(qdq, outputs, config.threads)
    pairs = [(exact.run(batch), quantized.run(batch)) for batch in calibration.analysis]
    return {name: output_noise([exact[name] for exact, _ in pairs], [value[name] for _, value in pairs]) for name in outputs}


def write_results(result: Quantized, model_path: Path, errors_path: Path, sensitivity_path: Path) -> None:
    """Write the model, the error table and the sensitivity report."""
    content = result.proto.SerializeToString(deterministic=True)
    with atomic_path(model_path) as temporary:
        temporary.write_bytes(content)
    write_text(errors_path, to_csv(result.errors))
    write_json(sensitivity_path, sensitivity_report(result))


def sensitivity_report(result: Quantized) -> dict[str, Any]:
    """Content of reports/sensitivity.json."""
    return {
        "tensors": result.counts(),
        "outputs": {
            name: {"sqnr_before_promotion_db": _db(result.noise_before[name]), "sqnr_db": _db(noise)} for name, noise in result.noise_after.items()
        },
        "promoted": [{"tensor": name, "reason": reason} for name, reason in result.promoted.items()],
        "ranking": [_ranking_row(row) for row in result.sensitivity],
        "modules": _by_module(result.sensitivity),
        "findings": [str(finding) for finding in result.findings],
    }


def _db(noise: float) -> float:
    return round(sqnr_db(1.0, noise), 3)


def _ranking_row(row: Sensitivity) -> dict[str, Any]:
    by_output = {name: _db(noise) for name, noise in row.by_output.items()}
    return {"tensor": row.tensor, "module": row.module, "op": row.op, "sqnr_db": _db(row.noise), "sqnr_by_output_db": by_output}


def _by_module(rows: Sequence[Sensitivity], depth: int = 2) -> list[dict[str, Any]]:
    """Summed noise of the tensors of each module (first `depth` parts of its path), strongest first: independent noises add up."""
    totals: dict[str, float] = {}
    for row in rows:
        module = ".".join(row.module.split(".")[:depth])
        totals[module] = totals.get(module, 0.0) + row.noise
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return [{"module": name, "sqnr_db": _db(noise)} for name, noise in ranked]
