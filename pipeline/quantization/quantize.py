"""From a float model and its calibration to the INT8 model: plan, repair, promotion, QDQ, error table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import ModelProto

from pipeline.config import QuantizationConfig
from pipeline.errors import ModelError
from pipeline.j6.chip import ChipProfile
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.compare import LayerError, layer_errors, sqnr_db
from pipeline.quantization.equalize import equalized
from pipeline.quantization.lint import Finding, lint_plan
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, make_plan
from pipeline.quantization.promotion import Promotion, promote
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.repair import repair
from pipeline.quantization.sessions import Runner, output_noise


@dataclass(frozen=True)
class Quantized:
    """The INT8 model and everything that explains it. Noise is noise power / signal power by output: as planned, repaired, and promoted."""

    model: FloatModel
    proto: ModelProto
    plan: QuantPlan
    errors: list[LayerError]
    promotion: Promotion
    findings: tuple[Finding, ...]
    noise_planned: Mapping[str, float]
    noise_repaired: Mapping[str, float]
    noise: Mapping[str, float]

    def counts(self) -> dict[str, int]:
        """Quantized storage groups by dtype."""
        counts: dict[str, int] = {}
        for decision in self.plan.roots().values():
            counts[decision.dtype] = counts.get(decision.dtype, 0) + 1
        return counts

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {dtype}" for dtype, count in sorted(self.counts().items()))
        worst = max(self.noise, key=lambda name: self.noise[name])
        promoted = f"{len(self.promotion.reasons)} promoted for {self.promotion.extra_us:.1f} us simulated"
        return f"{counts} tensors ({promoted}), worst output {worst} at {sqnr_db(1.0, self.noise[worst]):.1f} dB SQNR"


def quantize_network(model: FloatModel, calibration: Calibration, config: QuantizationConfig, chip: ChipProfile) -> Quantized:
    """Quantize `model` for `chip`; the first analysis batch measures sensitivity, all of them the rest.

    Raises:
        ConfigError: a rule matches nothing, two rules disagree, or a scale is impossible.
        ModelError: calibration and model do not fit, or the analysis batches are missing.
    """
    if not calibration.analysis:
        raise ModelError(f"{model.path}: the calibration keeps no analysis batch; calibrate again")
    model = equalized(model, calibration.equalization)
    planned = make_plan(model, config, calibration.statistics)
    repaired = repair(model, planned, config.repair, calibration.analysis, config.threads)
    promotion = promote(model, repaired, calibration, config, chip)
    proto = write_qdq(model, promotion.plan)
    before = _noise(model, write_qdq(model, planned), calibration, config)
    between = before if repaired is planned else _noise(model, write_qdq(model, repaired), calibration, config)
    after = _noise(model, proto, calibration, config) if promotion.reasons else between
    errors = layer_errors(model, promotion.plan, proto, calibration.analysis, config.threads)
    findings = (*calibration.findings, *lint_plan(model, promotion.plan))
    return Quantized(model, proto, promotion.plan, errors, promotion, findings, before, between, after)


def _noise(model: FloatModel, qdq: ModelProto, calibration: Calibration, config: QuantizationConfig) -> dict[str, float]:
    """Noise power / signal power of each float output of the QDQ model, mean over the analysis batches."""
    outputs = [name for name in model.outputs if name in model.float_tensors]
    exact, quantized = Runner(model.proto, outputs, config.threads), Runner(qdq, outputs, config.threads)
    pairs = [(exact.run(batch), quantized.run(batch)) for batch in calibration.analysis]
    return {name: output_noise([exact[name] for exact, _ in pairs], [value[name] for _, value in pairs]) for name in outputs}
