"""Bad cases of a quantized model, chosen by task metric: the samples on which it loses most against the float model, head by head.

Both models step through the scenes side by side, each with its own temporal state, so that a loss which builds up over frames is seen too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.dataset.records import SampleRecord
from pipeline.evaluation.runner import Predictor
from pipeline.models.prediction import Prediction

SHOWN = 5  # samples of each head
Score = Callable[[SampleRecord, Prediction], Mapping[str, float]]
"""Task metric of one sample by head, more is better."""


@dataclass(frozen=True)
class Case:
    """Task metric of one sample with both models."""

    head: str
    token: str
    scene: str
    index_in_scene: int
    float_score: float
    int8_score: float

    @property
    def loss(self) -> float:
        """float - INT8."""
        return self.float_score - self.int8_score


class SideBySide:
    """A predictor that answers with the INT8 model and asks the float model the same."""

    def __init__(self, int8: Predictor, exact: Predictor, score: Score) -> None:
        self._int8, self._exact, self._score = int8, exact, score
        self.cases: list[Case] = []

    def reset(self) -> None:
        """A new scene begins."""
        self._int8.reset()
        self._exact.reset()

    def step(self, record: SampleRecord) -> Prediction:
        """Prediction of the INT8 model."""
        answer = self._int8.step(record)
        expected, found = self._score(record, self._exact.step(record)), self._score(record, answer)
        for head in expected:
            if head in found:
                self.cases.append(Case(head, record.token, record.scene_name, record.index_in_scene, expected[head], found[head]))
        return answer

    def worst(self, count: int = SHOWN) -> dict[str, list[dict[str, Any]]]:
        """Field `bad_cases` of eval_int8.json: the samples that lose most, by head; samples that lose nothing are left out."""
        ranked = sorted((case for case in self.cases if case.loss > 0.0), key=lambda case: (-case.loss, case.token))
        heads = dict.fromkeys(case.head for case in self.cases)
        return {head: [_row(case) for case in ranked if case.head == head][:count] for head in heads}


def _row(case: Case) -> dict[str, Any]:
    return {
        "token": case.token, "scene": case.scene, "index_in_scene": case.index_in_scene, "float": case.float_score, "int8": case.int8_score,
        "loss": case.loss,
    }  # fmt: skip
