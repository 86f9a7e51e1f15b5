"""The gate looks at the task: a cosine above 0.99 does not save a model whose answers changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.config import GateRule
from pipeline.gate import judge
from pipeline.io import write_json


def test_high_cosine_and_collapsed_metric_fails(tmp_path: Path) -> None:
    """Every sample has two classes whose logits are large and nearly equal: a small error turns the decision, and hardly the vector."""
    rng = np.random.default_rng(0)
    wanted = rng.integers(0, 2, 500)
    logits = np.full((500, 2), 10.0)
    logits[np.arange(500), wanted] += 0.1
    rounded = np.round(logits + rng.normal(size=logits.shape) * 0.5)
    cosine = float(np.sum(logits * rounded) / np.linalg.norm(logits) / np.linalg.norm(rounded))
    accuracy = [float(np.mean(values.argmax(axis=1) == wanted)) for values in (logits, rounded)]
    assert cosine > 0.99 and accuracy[0] == 1.0 and accuracy[1] < 0.75
    for name, value in zip(("eval_float", "eval_int8"), accuracy, strict=True):
        write_json(tmp_path / f"{name}.json", {"detection": {"mAP": value}})
    write_json(tmp_path / "sensitivity.json", {"outputs": {"det_logits": {"cosine": cosine}}})
    rules = [
        GateRule(name="cosine", metric="sensitivity:outputs.det_logits.cosine", op=">=", limit=0.99),
        GateRule(name="kept", metric="eval_int8:detection.mAP", op=">=", limit=0.99, relative_to="eval_float:detection.mAP"),
    ]
    verdict = judge(rules, tmp_path, ("detection",))
    assert not verdict["passed"]
    assert [(rule["name"], rule["passed"]) for rule in verdict["rules"]] == [("cosine", True), ("kept", False)]
