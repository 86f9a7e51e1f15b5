"""The mixed-precision search against the plain rule "int16 for the worst 5 %" at equal accuracy, in simulated time.

    python benchmarks/mixed_precision.py [--project DIR] [--top 0.05]

Needs models/multitask.onnx and models/calibration.npz of a project that has run. Both start from the same INT8 model (with and without repair);
the plain rule promotes by measured effect on the outputs, and what each output then reaches is the search's target for it. Accuracy is the
signal-to-noise ratio of each output over the analysis batches, measured in one session. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pipeline.config import Config, QuantizationConfig, load_config
from pipeline.j6.chip import ChipProfile, load_chip
from pipeline.paths import Paths
from pipeline.quantization.calibrate import Calibration, load_calibration
from pipeline.quantization.compare import local_errors_db, sqnr_db
from pipeline.quantization.mixed import MixedModel
from pipeline.quantization.model import FloatModel, load_float_model
from pipeline.quantization.plan import make_plan
from pipeline.quantization.promotion import promoted_plan
from pipeline.quantization.repair import repair
from pipeline.quantization.search import J6Prices, search
from pipeline.quantization.sensitivity import choose_promotions, measure, worst_by_own_error

TOLERANCE_DB = 0.05  # outputs of the search may be that far below the plain rule's


def compare(model: FloatModel, calibration: Calibration, config: QuantizationConfig, chip: ChipProfile, top: float) -> dict[str, Any]:
    """Simulated time of both sets, and what every output reaches with each."""
    plan = make_plan(model, config, calibration.statistics)
    plan = repair(model, plan, config.repair, calibration.analysis, config.threads)
    own = local_errors_db(model, plan, calibration.analysis[:1], config.threads)
    candidates = worst_by_own_error(own, plan)[: config.promotion.candidates]
    ranking = measure(model, plan, candidates, calibration.analysis[:1], config.threads)
    wide = promoted_plan(model, plan, calibration, config, dict.fromkeys(candidates, "candidate"))
    mixed = MixedModel(model, plan, wide, candidates, calibration.analysis, config.threads)
    prices = J6Prices(model, plan, chip)
    int8 = sum(decision.dtype == "int8" for decision in plan.roots().values())
    plain = set(choose_promotions(ranking, round(top * int8)))
    reached = {name: sqnr_db(1.0, noise) for name, noise in mixed.noise(plain).items()}
    targets = {name: level - TOLERANCE_DB for name, level in reached.items()}
    found = search(model, plan, ranking, targets, prices, mixed.noise)
    return {
        "int8_us": prices.base_us,
        "plain": {"promoted": len(plain), "extra_us": prices.extra_us(plain), "sqnr_db": reached},
        "search": {
            "promoted": len(found.chosen.promoted), "extra_us": found.chosen.extra_us, "sqnr_db": found.chosen.sqnr_db,
            "margin_db": found.chosen.margin_db,
        },
    }  # fmt: skip


def run(config: Config, paths: Paths, top: float) -> dict[str, Any]:
    """Both comparisons."""
    model = load_float_model(paths.onnx)
    calibration = load_calibration(paths.calibration, model)
    chip = load_chip(config.j6.chip, config.j6.chip_overrides)
    base = config.quantization
    bare = base.repair.model_copy(update={"rounding": False, "bias_correction": False})
    unrepaired = base.model_copy(update={"repair": bare})
    return {
        "without_repair": compare(model, calibration, unrepaired, chip, top),
        "with_repair": compare(model, calibration, base, chip, top),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=Path(), help="directory of a project that has run")
    parser.add_argument("--top", type=float, default=0.05, help="share of the int8 tensors that the plain rule promotes")
    options = parser.parse_args()
    print(json.dumps(run(load_config(options.project / "params.yaml"), Paths(options.project), options.top), indent=2, sort_keys=True))


if __name__ == "__main__":
    main()
