"""Bad cases are chosen by what the task lost, head by head."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pipeline.quantization.cases import SideBySide


@dataclass
class Scripted:
    """Answers with the next of a list of scores."""

    answers: list[dict[str, float]]
    resets: int = 0

    def reset(self) -> None:
        self.resets += 1

    def step(self, record: Any) -> Any:
        return self.answers.pop(0)


def test_the_samples_that_lose_most_come_first() -> None:
    exact = Scripted([{"detection": 0.5, "map": 0.4}, {"detection": 0.9}, {"detection": 0.3, "map": 0.2}])
    rounded = Scripted([{"detection": 0.4, "map": 0.6}, {"detection": 0.2}, {"detection": 0.3, "map": 0.1}])
    both = SideBySide(rounded, exact, lambda record, prediction: prediction)
    both.reset()
    answers = [both.step(SimpleNamespace(token=f"t{index}", scene_name="scene-1", index_in_scene=index)) for index in range(3)]
    assert answers[1] == {"detection": 0.2}  # what the INT8 model says
    assert rounded.resets == exact.resets == 1
    worst = both.worst(count=1)
    assert [(row["token"], round(row["loss"], 6)) for row in worst["detection"]] == [("t1", 0.7)]
    assert [row["token"] for row in worst["map"]] == ["t2"]  # a sample that gains is no bad case
    assert [row["token"] for row in both.worst()["detection"]] == ["t1", "t0"]  # equal is no loss
