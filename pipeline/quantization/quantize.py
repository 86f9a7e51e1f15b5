"""From a float model and its calibration to the INT8 model: plan, repair, promotion, training where that is not enough, QDQ, error table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from onnx import ModelProto

from pipeline.config import QatConfig, QuantizationConfig
from pipeline.errors import ModelError
from pipeline.j6.chip import ChipProfile
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.compare import LayerError, layer_errors, sqnr_db
from pipeline.quantization.equalize import equalized
from pipeline.quantization.lint import Finding, lint_plan
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan, make_plan
from pipeline.quantization.promotion import Promotion, output_targets_db, promote
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.repair import repair
from pipeline.quantization.sensitivity import switchable_all
from pipeline.quantization.sessions import Batch, Runner, output_noise

Noise = Mapping[str, float]
"""Output -> noise power / signal power."""
TrainingBatches = Callable[[], Iterable[Batch]]
Kept = Callable[[ModelProto], Mapping[str, float | None]]
"""Share of the float metric that a QDQ model keeps, by head; None where the float metric is 0."""


@dataclass(frozen=True)
class Training:
    """Whether quantization-aware training ran, and why. `log`: mean SQNR of each epoch, dB; `used`: its result became the INT8 model."""

    reason: str
    log: tuple[float, ...] = ()
    used: bool = False


@dataclass(frozen=True)
class Quantized:
    """The INT8 model and everything that explains it.

    `targets_db`: signal to noise that each output should reach. `forms`: every form the model took on the way, with the noise of its outputs
    (`FORMS`). `kept`: share of each head's float metric that the model without training keeps, where that was measured.
    """

    model: FloatModel
    proto: ModelProto
    plan: QuantPlan
    errors: list[LayerError]
    promotion: Promotion
    findings: tuple[Finding, ...]
    targets_db: Mapping[str, float]
    forms: Mapping[str, Noise]
    training: Training
    kept: Mapping[str, float | None]

    @property
    def noise(self) -> Noise:
        """Of the INT8 model as written."""
        return self.forms["trained" if self.training.used else "promoted"]

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
        trained = ", trained" if self.training.used else ""
        return f"{counts} tensors ({promoted}{trained}), worst output {worst} at {sqnr_db(1.0, self.noise[worst]):.1f} dB SQNR"


FORMS = {
    "activations": "activations rounded, weights float: what the ranges of calibration cost",
    "planned": "weights rounded to nearest too",
    "repaired": "with the steps of `repair`",
    "promoted": "with the int16 promotions: the model without training",
    "trained": "after quantization-aware training",
}
"""Forms in the order in which a model takes them."""


def quantize_network(
    model: FloatModel, calibration: Calibration, config: QuantizationConfig, chip: ChipProfile, training: TrainingBatches | None = None,
    kept: Kept | None = None,
) -> Quantized:  # fmt: skip
    """Quantize `model` for `chip`; the first analysis batch measures sensitivity, all of them the rest.

    Args:
        training: batches for quantization-aware training, read only when it is needed; None: never train.
        kept: judges the model without training by its task; None: the target of the outputs does.

    Raises:
        ConfigError: a rule matches nothing, two rules disagree, or a scale is impossible.
        ModelError: calibration and model do not fit, the analysis batches are missing, or training (`qat.when: always`) does not know an operator.
    """
    if not calibration.analysis:
        raise ModelError(f"{model.path}: the calibration keeps no analysis batch; calibrate again")
    model = equalized(model, calibration.equalization)
    planned = make_plan(model, config, calibration.statistics)
    repaired = repair(model, planned, config.repair, calibration.analysis, config.threads)
    promotion = promote(model, repaired, calibration, config, chip)
    measure = _Noise(model, calibration, config.threads)
    forms = {"activations": measure(switchable_all(model, planned)), "planned": measure(write_qdq(model, planned))}
    forms["repaired"] = forms["planned"] if repaired is planned else measure(write_qdq(model, repaired))
    proto = write_qdq(model, promotion.plan)
    forms["promoted"] = measure(proto) if promotion.reasons else forms["repaired"]
    targets = output_targets_db(model, config.promotion)
    reason, shares = needs_training(forms["promoted"], targets, proto, config.qat, kept)
    plan, done = promotion.plan, Training(reason)
    if training is not None and reason:
        trained, done = _train(model, promotion, calibration, config, training, reason)
        if trained is not None:
            trained_proto = write_qdq(model, trained)
            forms["trained"] = measure(trained_proto)
            if _level_db(forms["trained"]) > _level_db(forms["promoted"]):
                plan, proto, done = trained, trained_proto, replace(done, used=True)
    errors = layer_errors(model, plan, proto, calibration.analysis, config.threads)
    findings = (*calibration.findings, *lint_plan(model, plan))
    return Quantized(model, proto, plan, errors, promotion, findings, targets, forms, done, shares)


def needs_training(
    noise: Noise, targets_db: Mapping[str, float], proto: ModelProto, config: QatConfig, kept: Kept | None
) -> tuple[str, Mapping[str, float | None]]:
    """(why the model without training is not good enough, or "", share that its heads keep where that was measured).

    Where the task can be asked, its metrics alone decide; noise at the outputs is what there is to go by for other models.
    """
    if config.when != "auto":
        return ("qat.when: always" if config.when == "always" else ""), {}
    if kept is not None:
        shares = kept(proto)
        missed = [f"{head} keeps {share:.2%}" for head, share in shares.items() if share is not None and share < config.min_kept]
        return (f"{', '.join(missed)}, qat.min_kept is {config.min_kept:.2%}" if missed else ""), shares
    margins = {name: sqnr_db(1.0, noise[name]) - target for name, target in targets_db.items()}
    worst = min(margins, key=lambda name: margins[name])
    if margins[worst] < 0.0:
        return f"output {worst} reaches {sqnr_db(1.0, noise[worst]):.1f} dB, its target is {targets_db[worst]:g} dB", {}
    return "", {}


def _train(
    model: FloatModel, promotion: Promotion, calibration: Calibration, config: QuantizationConfig, training: TrainingBatches, reason: str
) -> tuple[QuantPlan | None, Training]:
    """(trained plan, or None where the model cannot be trained; what happened)."""
    from pipeline.quantization.qat import train  # torch: two seconds that most quantizations do not need

    batches = list(islice(training(), config.qat.samples))
    try:
        trained = train(model, promotion.plan, promotion.reasons, batches, calibration.statistics, config)
    except ModelError as error:
        if config.qat.when == "always":
            raise
        return None, Training(f"{reason}; not possible: {error}")
    return trained.plan, Training(reason, tuple(epoch.mean_sqnr_db for epoch in trained.log))


def _level_db(noise: Noise) -> float:
    """Mean over outputs of signal to noise, dB: what training works on."""
    return sum(sqnr_db(1.0, value) for value in noise.values()) / len(noise)


class _Noise:
    """Noise of the float outputs of any form of one model, mean over the analysis batches; the float model runs once."""

    def __init__(self, model: FloatModel, calibration: Calibration, threads: int) -> None:
        self._outputs = model.float_outputs
        self._batches, self._threads = calibration.analysis, threads
        exact = Runner(model.proto, self._outputs, threads)
        self._exact = [exact.run(batch) for batch in self._batches]

    def __call__(self, proto: ModelProto) -> dict[str, float]:
        runner = Runner(proto, self._outputs, self._threads)
        values = [runner.run(batch) for batch in self._batches]
        return {name: output_noise([exact[name] for exact in self._exact], [value[name] for value in values]) for name in self._outputs}
