"""The release gate: rules from params.yaml judged on the JSON files in reports/.

A rule names a metric as `report:dotted.path`, for example `eval_int8:detection.per_class.car.AP`: the value at that path of reports/eval_int8.json.
One part of the path may be `*`: then every entry is judged and the worst one is the rule's value. Three kinds of limit:
- absolute: the value itself is compared with the limit;
- against another metric (`relative_to`, for example the float model's): the ratio to it, or the difference from it, is compared;
- against the champion (`relative_to: champion`): the same, with the champion's value of the same metric (release/champion.json).

A rule whose metric cannot be had fails and says why: no report, no such field, not a number, a reference of 0. Skipped with the reason are rules on a
head that params.yaml leaves out (`model.tasks`) or for which the held-out data has no labels, and rules against the champion while there is none or
where it lacks the metric. The gate passes when no rule of severity `error` failed and at least one was judged; warnings are shown and do not count.

The release checklist is the same verdicts once more, in the words of the people who release: each item names the rules that decide it, or what it
would take to decide it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.config import AGAINST_CHAMPION, ChecklistItem, GateRule
from pipeline.errors import DataError
from pipeline.io import read_json
from pipeline.taxonomy import TASKS

_COMPARE = {">=": operator.ge, "<=": operator.le}
HEAD_REPORTS = ("eval_float", "eval_int8", "robustness")  # say under `skipped` which heads were not evaluated, and why
_RELATION = {(">=", True): "at least", (">=", False): "below", ("<=", True): "at most", ("<=", False): "above"}


class _Missing(Exception):
    """A metric cannot be had; the message says why."""


class _Absent(Exception):
    """A metric belongs to a head that was rightly not evaluated, or there is no champion to compare with; the message says why."""


Numbers = Mapping[str, Mapping[str, float]]  # {report: {dotted path: value}}


@dataclass(frozen=True)
class Verdict:
    """One rule and what became of it. `value` is what was compared with `limit`; None when there was nothing to compare."""

    name: str
    metric: str
    relative_to: str | None
    relation: str
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
        value = self._field(name, path.split("."))
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Missing(f"{self._file(name)}: {path} is {value!r}, not a number")
        return float(value)

    def expand(self, metric: str) -> list[str]:
        """The metrics that `metric` stands for: itself, or one for each entry at its `*` that holds a value.

        Raises:
            _Absent, _Missing: as in `number`; also when no entry holds a value.
        """
        if "*" not in metric:
            return [metric]
        before, _, after = metric.partition("*")
        name, _, path = before.rstrip(".").partition(":")
        entries = self._field(name, path.split("."))
        found = [f"{before}{key}{after}" for key in sorted(entries)] if isinstance(entries, dict) else []
        found = [each for each in found if self._field(name, each.partition(":")[2].split(".")) is not None]
        if not found:
            raise _Missing(f"{self._file(name)} has no value at {metric.partition(':')[2]}")
        return found

    def _field(self, name: str, keys: Sequence[str]) -> Any:
        """What a report holds at a path."""
        value = self._report(name)
        for depth, key in enumerate(keys):
            if isinstance(value, dict) and key in value:
                value = value[key]
                continue
            if name in HEAD_REPORTS:
                self._raise_if_absent(name, keys)
            raise _Missing(f"{self._file(name)} has no field {'.'.join(keys[: depth + 1])}")
        return value

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


def judge(
    rules: Sequence[GateRule],
    reports_dir: Path,
    tasks: Sequence[str],
    champion: Numbers | None = None,
    checklist: Sequence[ChecklistItem] = (),
) -> dict[str, Any]:
    """Verdicts of all rules.

    Args:
        rules: in the order in which they are reported.
        reports_dir: directory with the JSON reports.
        tasks: heads that the model is meant to have.
        champion: numbers of the champion's reports; None while there is no champion.
        checklist: items of the release checklist; they name rules.

    Returns:
        The content of reports/gate.json: `passed`, `reasons` (one line for each error that failed), `rules` and `checklist`.
    """
    reports = Reports(reports_dir, tasks)
    verdicts = [_judge_rule(rule, reports, champion) for rule in rules]
    errors = [verdict for verdict in verdicts if verdict.severity == "error"]
    reasons = [f"{verdict.name}: {verdict.reason}" for verdict in errors if verdict.verdict == "failed"]
    if all(verdict.verdict == "skipped" for verdict in errors):
        reasons.append("no rule of severity error could be judged")
    by_name = {verdict.name: verdict for verdict in verdicts}
    items = [_judge_item(item, [by_name[name] for name in item.rules]) for item in checklist]
    return {"passed": not reasons, "reasons": reasons, "rules": [asdict(verdict) for verdict in verdicts], "checklist": items}


def _judge_item(item: ChecklistItem, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """An item has failed when one of its rules has, whatever the severity, and has passed when all have."""
    found = {verdict.verdict for verdict in verdicts}
    outcome = "undecided" if item.undecided else next((name for name in ("failed", "skipped") if name in found), "passed")
    reason = item.undecided or "; ".join(f"{verdict.name}: {verdict.reason}" for verdict in verdicts)
    return {"item": item.item, "verdict": outcome, "rules": list(item.rules), "reason": reason}


def _judge_rule(rule: GateRule, reports: Reports, champion: Numbers | None) -> Verdict:
    try:
        values = _values(rule, reports, champion)
    except _Missing as problem:
        return _verdict(rule, None, False, str(problem))
    except _Absent as problem:
        return _verdict(rule, None, None, str(problem))
    worst = (min if rule.op == ">=" else max)(values, key=lambda metric: values[metric])
    value = values[worst]
    passed = bool(_COMPARE[rule.op](value, rule.limit))
    subject = "" if worst == rule.metric else f"worst of {len(values)}, {worst.partition(':')[2]}: "
    return _verdict(rule, value, passed, f"{subject}{value:.6g} is {_RELATION[rule.op, passed]} {rule.limit:.6g}")


def _values(rule: GateRule, reports: Reports, champion: Numbers | None) -> dict[str, float]:
    """What is compared with the limit, by metric: one value, or one for each entry at a `*`.

    Raises:
        _Absent, _Missing: the metric or its reference cannot be had.
    """
    values = {metric: reports.number(metric) for metric in reports.expand(rule.metric)}
    if rule.relative_to is None:
        return values
    if rule.relative_to != AGAINST_CHAMPION:
        reference = reports.number(rule.relative_to)
        return {metric: _related(rule, value, rule.relative_to, reference) for metric, value in values.items()}
    if champion is None:
        raise _Absent("there is no champion yet")
    known = {metric: champion.get(metric.partition(":")[0], {}).get(metric.partition(":")[2]) for metric in values}
    references = {metric: reference for metric, reference in known.items() if reference is not None}
    if not references:
        raise _Absent(f"the champion has no {rule.metric}")
    return {metric: _related(rule, values[metric], f"the champion's {metric}", reference) for metric, reference in references.items()}


def _related(rule: GateRule, value: float, reference_name: str, reference: float) -> float:
    if rule.relation == "difference":
        return value - reference
    if reference == 0.0:
        raise _Missing(f"{reference_name} is 0, so there is no ratio to it")
    return value / reference


def _verdict(rule: GateRule, value: float | None, passed: bool | None, reason: str) -> Verdict:
    names: dict[bool | None, Literal["passed", "failed", "skipped"]] = {True: "passed", False: "failed", None: "skipped"}
    return Verdict(
        rule.name, rule.metric, rule.relative_to, rule.relation, rule.op, rule.limit, rule.severity, value, passed, names[passed], reason
    )  # fmt: skip
