"""The release gate: rules from params.yaml judged on the JSON files in reports/.

A rule names a metric as `report:dotted.path`, for example `eval_int8:detection.per_class.car.AP`: the value at that path of reports/eval_int8.json.
Its value, divided by the value of `relative_to` where the rule has one, is compared with the limit.

A rule whose metric cannot be had fails and says why: no report, no such field, not a number, a reference of 0. There is one exception: a rule on a
head that params.yaml leaves out (`model.tasks`), or for which the held-out data has no labels, is skipped with the reason. The gate passes when no
rule of severity `error` failed and at least one was judged; warnings are shown and do not count.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.config import GateRule
from pipeline.errors import DataError
from pipeline.io import read_json
from pipeline.taxonomy import TASKS

_COMPARE = {">=": operator.ge, "<=": operator.le}
_RELATION = {(">=", True): "at least", (">=", False): "below", ("<=", True): "at most", ("<=", False): "above"}


class _Missing(Exception):
    """A metric cannot be had; the message says why."""


class _Absent(Exception):
    """A metric belongs to a head that was rightly not evaluated; the message says why."""


@dataclass(frozen=True)
class Verdict:
    """One rule and what became of it. `value` is what was compared with `limit`; None when there was nothing to compare."""

    name: str
    metric: str
    relative_to: str | None
    op: str
    limit: float
    severity: str
    value: float | None
    passed: bool | None  # None: skipped
    verdict: Literal["passed", "failed", "skipped"]
    reason: str


class Reports:
    """The JSON files of one reports directory, read when they are first asked for."""

    def __init__(self, directory: Path, tasks: Sequence[str]) -> None:
        self._directory = directory
        self._tasks = tuple(tasks)
        self._loaded: dict[str, Any] = {}

    def number(self, metric: str) -> float:
        """The number at `report:dotted.path`.

        Raises:
            _Absent: the metric is one of a head that was rightly not evaluated.
            _Missing: there is no such report, field or number.
        """
        name, _, path = metric.partition(":")
        value = self._report(name)
        keys = path.split(".")
        for depth, key in enumerate(keys):
            if isinstance(value, dict) and key in value:
                value = value[key]
                continue
            if name.startswith("eval_"):
                self._raise_if_absent(name, keys)
            raise _Missing(f"{self._file(name)} has no field {'.'.join(keys[: depth + 1])}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Missing(f"{self._file(name)}: {path} is {value!r}, not a number")
        return float(value)

    def _report(self, name: str) -> Any:
        if name not in self._loaded:
            try:
                self._loaded[name] = read_json(self._directory / f"{name}.json")
            except DataError as error:
                # The file name alone: gate.json must not depend on where the project lies.
                raise _Missing(str(error).replace(str(self._directory), self._directory.name)) from None
        return self._loaded[name]

    def _file(self, name: str) -> str:
        return f"{self._directory.name}/{name}.json"

    def _raise_if_absent(self, name: str, keys: Sequence[str]) -> None:
        head = next((key for key in keys if key in TASKS), None)
        if head is None:
            return
        if head not in self._tasks:
            raise _Absent(f"params.yaml leaves the head {head!r} out (model.tasks)")
        report = self._report(name)
        skipped = report.get("skipped", {}).get(head) if isinstance(report, dict) else None
        if skipped is not None and not skipped["has_labels"]:
            raise _Absent(f"{head}: {skipped['reason']}")
        if skipped is not None:
            raise _Missing(f"{head} was not evaluated: {skipped['reason']}")


def judge(rules: Sequence[GateRule], reports_dir: Path, tasks: Sequence[str]) -> dict[str, Any]:
    """Verdicts of all rules.

    Args:
        rules: in the order in which they are reported.
        reports_dir: directory with the JSON reports.
        tasks: heads that the model is meant to have.

    Returns:
        The content of reports/gate.json: `passed`, `reasons` (one line for each error that failed) and `rules`.
    """
    reports = Reports(reports_dir, tasks)
    verdicts = [_judge_rule(rule, reports) for rule in rules]
    errors = [verdict for verdict in verdicts if verdict.severity == "error"]
    reasons = [f"{verdict.name}: {verdict.reason}" for verdict in errors if verdict.verdict == "failed"]
    if all(verdict.verdict == "skipped" for verdict in errors):
        reasons.append("no rule of severity error could be judged")
    return {"passed": not reasons, "reasons": reasons, "rules": [asdict(verdict) for verdict in verdicts]}


def _judge_rule(rule: GateRule, reports: Reports) -> Verdict:
    try:
        value = reports.number(rule.metric)
        if rule.relative_to is not None:
            value = _ratio(value, rule.relative_to, reports.number(rule.relative_to))
    except _Missing as problem:
        return _verdict(rule, None, False, str(problem))
    except _Absent as problem:
        return _verdict(rule, None, None, str(problem))
    passed = bool(_COMPARE[rule.op](value, rule.limit))
    return _verdict(rule, value, passed, f"{value:.6g} is {_RELATION[rule.op, passed]} {rule.limit:.6g}")


def _ratio(value: float, reference_name: str, reference: float) -> float:
    if reference == 0.0:
        raise _Missing(f"{reference_name} is 0, so there is no ratio to it")
    return value / reference


def _verdict(rule: GateRule, value: float | None, passed: bool | None, reason: str) -> Verdict:
    names: dict[bool | None, Literal["passed", "failed", "skipped"]] = {True: "passed", False: "failed", None: "skipped"}
    return Verdict(
        rule.name, rule.metric, rule.relative_to, rule.op, rule.limit, rule.severity, value, passed, names[passed], reason
    )  # fmt: skip
