"""Release rules on report files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.champion import Champion, read_champion, reports_numbers, write_champion
from pipeline.config import ChecklistItem, GateConfig, GateRule, load_config
from pipeline.errors import DataError
from pipeline.gate import judge
from pipeline.paths import Paths
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


def rule(
    metric: str, op: str = ">=", limit: float = 0.3, relative_to: str | None = None, severity: str = "error", relation: str = "ratio"
) -> GateRule:
    return GateRule(name=metric, metric=metric, op=op, limit=limit, relative_to=relative_to, severity=severity, relation=relation)


def only(reports: Path, *rules: GateRule, tasks: tuple[str, ...] = TASKS, champion: dict | None = None) -> tuple[bool, list[dict]]:
    verdict = judge(rules, reports, tasks, champion)
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
    per_class = {"detection": {"car": {"AP": 0.4}, "bus": {"AP": None}}, "map": {"divider": {"AP": 0.5}}, "occupancy": {"car": {"IoU": 0.3}}}
    main = {"detection": ("mAP", 0.4), "map": ("AP", 0.5), "occupancy": ("mIoU", 0.4)}
    heads: dict = {head: {name: value, "per_class": per_class[head]} for head, (name, value) in main.items()} | {"skipped": {}}
    retention = {head: {"per_class": dict.fromkeys(classes, 0.99)} for head, classes in per_class.items()}
    checklist = {"coordinate_consistency_rms_m": 0.01, "sensor_timestamps_ms": 1.0, "channel_alignment_std": 0.3}
    contents = {
        "eval_float": {**heads, "times_prior": {"detection": 9.0, "map": 9.0, "occupancy": 3.5}},
        "eval_int8": {**heads, "retention": retention, "bev": {"road_edge_psnr_db": 33.1}},
        "robustness": {
            "skipped": {}, "weather": {"fog": {"kept_least": 0.9}}, "camera_lost": {"CAM_FRONT": {"drop": {"occupancy": 0.01}}},
            "temporal_state": {"detection": {"bytes": 410_112, "boxes_changed_by_replay": 0}},
        },
        "validation": {"counts": {"error": 0, "warning": 3}, "checklist": checklist},
        "profile": {
            "latency_ms": 20.0, "ddr_gbps_at_design_fps": 1.2, "conditions": {"p50_ms": 20.0, "p99_ms": 21.0},
            "memory": {"total_ddr_bytes": 9_000_000, "temporary": {"peak_bytes": 1_499_136}},
        },
    }  # fmt: skip
    for name, content in contents.items():
        (reports / f"{name}.json").write_text(json.dumps(content))
    rules = load_config(project_root / "params.yaml").gate.rules
    first = judge(rules, reports, TASKS)
    assert first["passed"], first["reasons"]
    against = {entry["name"] for entry in first["rules"] if entry["relative_to"] == "champion"}
    assert {entry["name"] for entry in first["rules"] if entry["verdict"] == "skipped"} == against != set()
    later = judge(rules, reports, TASKS, reports_numbers(reports))
    assert later["passed"], later["reasons"]
    assert all(entry["verdict"] == "passed" for entry in later["rules"])


def test_difference_from_another_metric(reports: Path) -> None:
    (reports / "profile.json").write_text(json.dumps({"conditions": {"p50_ms": 20.0, "p99_ms": 29.0}}))
    jitter = rule("profile:conditions.p99_ms", "<=", 8.0, "profile:conditions.p50_ms", relation="difference")
    passed, (verdict,) = only(reports, jitter)
    assert not passed
    assert (verdict["value"], verdict["reason"]) == (9.0, "9 is above 8")


def test_worst_entry_counts_and_is_named(reports: Path) -> None:
    classes = {"car": {"AP": 0.5}, "bus": {"AP": 0.1}, "trailer": {"AP": None}}
    (reports / "eval_float.json").write_text(json.dumps({"detection": {"per_class": classes}, "skipped": {}}))
    weakest = rule("eval_float:detection.per_class.*.AP", limit=0.2)
    passed, (verdict,) = only(reports, weakest)
    assert (passed, verdict["value"], verdict["reason"]) == (False, 0.1, "worst of 2, detection.per_class.bus.AP: 0.1 is below 0.2")
    _, (highest,) = only(reports, rule("eval_float:detection.per_class.*.AP", "<=", 0.4))
    assert highest["value"] == 0.5
    (reports / "eval_float.json").write_text(json.dumps({"detection": {"per_class": {"car": {"AP": None}}}, "skipped": {}}))
    passed, (empty,) = only(reports, weakest)
    assert (passed, empty["reason"]) == (False, "reports/eval_float.json has no value at detection.per_class.*.AP")


def test_against_the_champion(reports: Path) -> None:
    guard = rule("eval_int8:detection.mAP", limit=0.98, relative_to="champion")
    latency = rule("profile:latency_ms", "<=", 2.0, relative_to="champion", relation="difference")
    champion = {"eval_int8": {"detection.mAP": 0.4}, "profile": {"latency_ms": 25.0}}
    passed, (kept, slower) = only(reports, guard, latency, champion=champion)  # 0.39 against 0.4, 28.4 ms against 25 ms
    assert not passed
    assert (kept["verdict"], slower["verdict"]) == ("failed", "failed")
    assert kept["value"] == pytest.approx(0.975) and slower["value"] == pytest.approx(3.4)
    assert only(reports, guard, latency, champion={"eval_int8": {"detection.mAP": 0.39}, "profile": {"latency_ms": 28.0}})[0]
    always = rule("eval_float:map.AP")
    passed, (_, alone) = only(reports, always, guard)
    assert passed and (alone["verdict"], alone["reason"]) == ("skipped", "there is no champion yet")
    passed, (_, unknown) = only(reports, always, guard, champion={"eval_int8": {}})
    assert passed and (unknown["verdict"], unknown["reason"]) == ("skipped", "the champion has no eval_int8:detection.mAP")
    passed, (_, zero) = only(reports, always, guard, champion={"eval_int8": {"detection.mAP": 0.0}})
    assert not passed and "the champion's eval_int8:detection.mAP is 0" in zero["reason"]


def test_champion_file_keeps_other_models_and_names_damage(tmp_path: Path) -> None:
    paths, champion = Paths(tmp_path), Champion(3, "c" * 64, {"profile": {"latency_ms": 8.5}})
    assert read_champion(paths, "bev-j6m") is None
    write_champion(paths, "bev-j6m", champion)
    write_champion(paths, "bev-j6e", Champion(1, "d" * 64, {}))
    assert read_champion(paths, "bev-j6m") == champion
    write_champion(paths, "bev-j6m", None)
    assert read_champion(paths, "bev-j6m") is None
    assert read_champion(paths, "bev-j6e") == Champion(1, "d" * 64, {})
    (paths.release_dir / "champion.json").write_text('{"bev-j6m": {"version": "two"}}')
    with pytest.raises(DataError, match=r"champion\.json: entry 'bev-j6m' must hold version, lock_sha and reports"):
        read_champion(paths, "bev-j6m")


@pytest.mark.parametrize("metric", ["eval_float:*.*.AP", "eval_float:detection.per*.AP", "*:x"])
def test_wildcard_is_one_whole_part(metric: str) -> None:
    with pytest.raises(ValidationError, match="metric"):
        rule(metric)


def test_checklist_repeats_verdicts_and_says_what_nothing_decides(reports: Path) -> None:
    rules = (rule("profile:latency_ms", "<=", 35.0), rule("eval_float:map.AP", limit=0.9, severity="warning"), rule("eval_float:occupancy.mIoU"))
    items = [
        ChecklistItem(item="fast", rules=["profile:latency_ms"]),
        ChecklistItem(item="fast and accurate", rules=["profile:latency_ms", "eval_float:map.AP"]),
        ChecklistItem(item="sees voxels", rules=["profile:latency_ms", "eval_float:occupancy.mIoU"]),
        ChecklistItem(item="warm restart", undecided="needs the board"),
    ]
    verdict = judge(rules, reports, TASKS, None, items)
    assert verdict["passed"]  # a warning fails its item and not the gate
    assert {item["item"]: item["verdict"] for item in verdict["checklist"]} == {
        "fast": "passed", "fast and accurate": "failed", "sees voxels": "skipped", "warm restart": "undecided",
    }  # fmt: skip
    assert verdict["checklist"][0]["reason"] == "profile:latency_ms: 28.4 is at most 35"
    assert verdict["checklist"][3]["reason"] == "needs the board"


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({"item": "a", "rules": ["unknown"]}, "names 'unknown', which is no rule"),
        ({"item": "a"}, "either rules or undecided"),
        ({"item": "a", "rules": ["fast"], "undecided": "needs the board"}, "either rules or undecided"),
    ],
)
def test_checklist_item_without_a_basis_is_refused(item: dict, problem: str) -> None:
    fast = {"name": "fast", "metric": "profile:latency_ms", "op": "<=", "limit": 1.0}
    with pytest.raises(ValidationError, match=problem):
        GateConfig.model_validate({"rules": [fast], "checklist": [item]})


def test_the_shipped_checklist_has_its_twelve_items(project_root: Path) -> None:
    checklist = load_config(project_root / "params.yaml").gate.checklist
    assert len(checklist) == 12
    assert [item.item for item in checklist if item.undecided] == ["difference between chips", "no memory leak in 72 h", "warm restart within 120 ms"]
