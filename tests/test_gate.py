"""Release rules on report files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.config import GateConfig, GateRule, load_config
from pipeline.gate import judge
from pipeline.taxonomy import TASKS

FLOAT = {"detection": {"mAP": 0.4}, "map": {"AP": 0.5}, "skipped": {"occupancy": {"has_labels": False, "reason": "no held-out sample has a label"}}}
INT8 = {"detection": {"mAP": 0.39}, "map": {"AP": 0.1}, "skipped": {"occupancy": {"has_labels": True, "reason": "the model does not predict it"}}}


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    directory = tmp_path / "reports"
    directory.mkdir()
    contents = {"eval_float": FLOAT, "eval_int8": INT8, "profile": {"latency_ms": 28.4, "chip": "j6m", "by_head_ms": {"map": 0}}}
    for name, content in contents.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def rule(metric: str, op: str = ">=", limit: float = 0.3, relative_to: str | None = None, severity: str = "error") -> GateRule:
    return GateRule(name=metric, metric=metric, op=op, limit=limit, relative_to=relative_to, severity=severity)


def only(reports: Path, *rules: GateRule, tasks: tuple[str, ...] = TASKS) -> tuple[bool, list[dict]]:
    verdict = judge(rules, reports, tasks)
    return verdict["passed"], verdict["rules"]


def test_absolute_limits(reports: Path) -> None:
    passed, (accuracy, latency) = only(reports, rule("eval_float:detection.mAP"), rule("profile:latency_ms", "<=", 35.0))
    assert passed
    assert (accuracy["value"], accuracy["limit"], accuracy["passed"]) == (0.4, 0.3, True)
    assert (latency["verdict"], latency["reason"]) == ("passed", "28.4 is at most 35")
    failed, (too_slow,) = only(reports, rule("profile:latency_ms", "<=", 28.0))
    assert not failed and too_slow["reason"] == "28.4 is above 28"


def test_a_limit_is_inclusive(reports: Path) -> None:
    assert only(reports, rule("eval_float:detection.mAP", ">=", 0.4), rule("profile:latency_ms", "<=", 28.4))[0]


def test_ratio_to_another_metric(reports: Path) -> None:
    passed, (kept, lost) = only(
        reports,
        rule("eval_int8:detection.mAP", limit=0.97, relative_to="eval_float:detection.mAP"),
        rule("eval_int8:map.AP", limit=0.97, relative_to="eval_float:map.AP"),
    )
    assert kept["value"] == pytest.approx(0.975) and kept["passed"]
    assert lost["value"] == pytest.approx(0.2) and lost["passed"] is False
    assert not passed


def test_a_collapsed_metric_fails_however_good_the_layers_look(reports: Path) -> None:
    (reports / "eval_int8.json").write_text(json.dumps({"detection": {"mAP": 0.0}, "mean_cosine": 0.999}))
    passed, rules = only(
        reports,
        rule("eval_int8:mean_cosine", limit=0.99),
        rule("eval_int8:detection.mAP", limit=0.97, relative_to="eval_float:detection.mAP"),
    )
    assert not passed
    assert [entry["passed"] for entry in rules] == [True, False]


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ("eval_float:detection.NDS", "reports/eval_float.json has no field detection.NDS"),
        ("profile:fps", "has no field fps"),
        ("profile:chip", "chip is 'j6m', not a number"),
        ("nothing:x", "reports/nothing.json: file not found"),
        ("eval_int8:occupancy.mIoU", "the model does not predict it"),
    ],
)
def test_a_metric_that_cannot_be_had_fails_with_the_reason(reports: Path, metric: str, reason: str) -> None:
    verdict = judge([rule(metric)], reports, TASKS)
    assert not verdict["passed"]
    assert verdict["rules"][0]["value"] is None and verdict["rules"][0]["passed"] is False
    assert reason in verdict["reasons"][0]
    assert str(reports.parent) not in json.dumps(verdict)


def test_a_reference_of_zero_fails(reports: Path) -> None:
    _, (entry,) = only(reports, rule("profile:latency_ms", relative_to="profile:by_head_ms.map"))
    assert "is 0" in entry["reason"] and entry["passed"] is False


def test_a_report_that_is_cut_fails_its_rules(reports: Path) -> None:
    (reports / "profile.json").write_text('{"latency_ms": 28')
    _, (entry,) = only(reports, rule("profile:latency_ms", "<=", 35.0))
    assert "not valid JSON" in entry["reason"] and entry["passed"] is False


def test_heads_without_labels_or_left_out_are_skipped(reports: Path) -> None:
    passed, (judged, no_labels) = only(reports, rule("eval_float:detection.mAP"), rule("eval_float:occupancy.mIoU"))
    assert passed and judged["passed"]
    assert (no_labels["verdict"], no_labels["passed"], no_labels["value"]) == ("skipped", None, None)
    assert no_labels["reason"] == "occupancy: no held-out sample has a label"
    passed, (_, left_out) = only(reports, rule("eval_float:map.AP"), rule("eval_int8:occupancy.mIoU"), tasks=("detection", "map"))
    assert passed and "model.tasks" in left_out["reason"]


def test_warnings_do_not_fail_the_gate(reports: Path) -> None:
    passed, (_, warning) = only(reports, rule("eval_float:map.AP"), rule("eval_float:detection.mAP", limit=0.9, severity="warning"))
    assert passed
    assert warning["passed"] is False


def test_a_gate_that_judged_nothing_does_not_pass(reports: Path) -> None:
    assert judge([], reports, TASKS)["reasons"] == ["no rule of severity error could be judged"]
    assert not only(reports, rule("eval_float:occupancy.mIoU"))[0]
    assert not only(reports, rule("eval_float:map.AP", severity="warning"))[0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"metric": "latency_ms"}, "metric"), ({"op": "=="}, "op"), ({"limit": float("nan")}, "limit"), ({"limits": 3}, "limits")],
)
def test_impossible_rules_name_the_field(changes: dict, field: str) -> None:
    fields = {"name": "latency", "metric": "profile:latency_ms", "op": "<=", "limit": 35.0}
    with pytest.raises(ValidationError, match=field):
        GateRule(**{**fields, **changes})


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="stands twice"):
        GateConfig(rules=(rule("profile:latency_ms"), rule("profile:latency_ms")))


def test_the_shipped_rules_are_judged_on_reports_of_the_agreed_form(project_root: Path, reports: Path) -> None:
    """Every shipped rule finds its metric in reports that hold what docs/architecture.md promises."""
    heads = {"detection": {"mAP": 0.4}, "map": {"AP": 0.5}, "occupancy": {"mIoU": 0.4}, "skipped": {}}
    contents = {
        "eval_float": {**heads, "times_prior": {"detection": 9.0, "map": 9.0, "occupancy": 3.5}},
        "eval_int8": heads,
        "validation": {"counts": {"error": 0, "warning": 3}},
        "profile": {"latency_ms": 20.0, "ddr_gbps_at_design_fps": 1.2, "conditions": {"p99_ms": 21.0}},
    }
    for name, content in contents.items():
        (reports / f"{name}.json").write_text(json.dumps(content))
    verdict = judge(load_config(project_root / "params.yaml").gate.rules, reports, TASKS)
    assert verdict["passed"], verdict["reasons"]
    assert all(entry["verdict"] == "passed" for entry in verdict["rules"])
