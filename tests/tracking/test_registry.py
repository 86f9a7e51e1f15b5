"""Promotion and rollback against a real registry."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from pipeline.champion import read_champion
from pipeline.config import Config, GateConfig, GateRule
from pipeline.errors import DataError
from pipeline.paths import Paths
from pipeline.tracking import audit, registry
from pipeline.tracking.audit import read_log
from pipeline.tracking.registration import Registration, register_release
from pipeline.tracking.registry import PromotionError, fetch_champion, promote, release_history, rollback
from pipeline.tracking.service import find_service


def register_versions(tracked: tuple[Paths, Config], count: int) -> list[Registration]:
    """`count` versions that differ in one parameter of dvc.lock."""
    paths, config = tracked
    done = [register_release(paths, config)]
    lock = paths.root / "dvc.lock"
    for number in range(1, count):
        lock.write_text(lock.read_text().replace(f"steps: {19 + number}", f"steps: {20 + number}"))
        done.append(register_release(paths, config))
    assert [version.version for version in done] == list(range(1, count + 1))
    return done


def client_of(paths: Paths) -> Any:
    uri = find_service(paths.root).uri
    return mlflow.MlflowClient(uri, uri)


def aliases(paths: Paths, name: str) -> dict[str, int]:
    return {alias: int(version) for alias, version in client_of(paths).get_registered_model(name).aliases.items()}


def test_promotions_and_rollbacks_form_a_chain(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    name = register_versions(tracked_copy, 3)[0].name
    assert aliases(paths, name) == {"candidate": 3}
    assert promote(paths, config, 1).replaced is None
    assert promote(paths, config, 2).replaced == 1
    assert promote(paths, config).version == 3  # the candidate
    assert aliases(paths, name) == {"candidate": 3, "champion": 3, "previous": 2}
    assert rollback(paths, config, "too slow on the road").version == 2
    assert aliases(paths, name) == {"candidate": 3, "champion": 2, "previous": 1}
    assert rollback(paths, config).version == 1
    assert aliases(paths, name) == {"candidate": 3, "champion": 1}
    with pytest.raises(PromotionError, match="nothing to roll back to"):
        rollback(paths, config)

    log = read_log(paths)
    assert [(entry["action"], entry["version"], entry["replaced"]) for entry in log] == [
        ("promote", 1, None), ("promote", 2, 1), ("promote", 3, 2), ("rollback", 2, 3), ("rollback", 1, 2),
    ]  # fmt: skip
    assert log[3]["reason"] == "too slow on the road"
    tags = client_of(paths).get_model_version(name, "2").tags
    assert tags["bevj6.promoted_from"] == "1"
    assert tags["bevj6.promoted_at"] == log[3]["at"]


def test_gate_that_did_not_pass_needs_a_reason(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    version = register_versions(tracked_copy, 1)[0]
    client_of(paths).set_model_version_tag(version.name, "1", "bevj6.gate", "failed")
    with pytest.raises(PromotionError, match=r"version 1 is not promoted .*\n?gate is 'failed', must be 'passed'"):
        promote(paths, config)
    assert aliases(paths, version.name) == {"candidate": 1}
    assert read_log(paths) == []
    change = promote(paths, config, force_reason="demo car, closed course")
    assert (change.gate, change.reason) == ("failed", "demo car, closed course")
    assert read_log(paths)[0]["reason"] == "demo car, closed course"
    assert client_of(paths).get_model_version(version.name, "1").tags["bevj6.promoted_reason"] == "demo car, closed course"


def test_stored_model_that_was_changed_is_never_promoted(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    version = register_versions(tracked_copy, 1)[0]
    stored = Path(mlflow.artifacts.download_artifacts(f"models:/{version.name}/1"))  # a local store hands out the file itself
    assert stored.is_relative_to(paths.root)
    model = stored / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"\x00")
    with pytest.raises(DataError, match="changed after it was logged"):
        promote(paths, config, force_reason="even with a reason")
    assert aliases(paths, version.name) == {"candidate": 1}


@pytest.mark.parametrize("version", [None, 7])
def test_unknown_version_is_named(tracked_copy: tuple[Paths, Config], version: int | None) -> None:
    paths, config = tracked_copy
    with pytest.raises(DataError, match=r"not (found )?in the registry"):
        promote(paths, config, version)


def test_champion_is_not_promoted_again(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    register_versions(tracked_copy, 1)
    promote(paths, config)
    with pytest.raises(PromotionError, match="champion already"):
        promote(paths, config)
    assert len(read_log(paths)) == 1


def guarded(config: Config) -> Config:
    """The sample's parameters with one rule against the champion: keep 98 % of its mAP."""
    rule = GateRule(name="mAP of the champion", metric="eval_int8:detection.mAP", op=">=", limit=0.98, relative_to="champion")
    return config.model_copy(update={"gate": GateConfig(rules=(rule,))})


def register_with(paths: Paths, config: Config, change: Callable[[dict[str, Any]], None]) -> Registration:
    """Register a version whose INT8 report was changed, with a dvc.lock that says so."""
    report, lock = paths.report("eval_int8.json"), paths.root / "dvc.lock"
    content, old = json.loads(report.read_text()), hashlib.md5(report.read_bytes()).hexdigest()
    change(content)
    report.write_text(json.dumps(content))
    lock.write_text(lock.read_text().replace(old, hashlib.md5(report.read_bytes()).hexdigest()))
    return register_release(paths, config)


def test_version_worse_than_the_champion_needs_a_reason(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy[0], guarded(tracked_copy[1])
    name = register_versions(tracked_copy, 1)[0].name
    promote(paths, config)
    worse = register_with(paths, config, lambda report: report["detection"].update(mAP=0.38))  # 0.395 * 0.98 = 0.3871
    with pytest.raises(PromotionError, match=r"against the champion, version 1: mAP of the champion: 0\.962025 is below 0\.98"):
        promote(paths, config)
    assert aliases(paths, name) == {"candidate": 2, "champion": 1}
    change = promote(paths, config, worse.version, "measured on the old val split")
    assert len(change.overruled) == 1
    assert read_log(paths)[-1]["overruled"] == list(change.overruled)
    # Now 0.38 is the champion's value, so 0.375 is good enough.
    register_with(paths, config, lambda report: report["detection"].update(mAP=0.375))
    assert promote(paths, config).version == 3


def test_checkout_knows_the_champion_after_promotion_rollback_and_fetch(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    name = register_versions(tracked_copy, 1)[0].name
    assert fetch_champion(paths, config) is None
    promote(paths, config)
    register_with(paths, config, lambda report: report["map"].update(AP=0.6))
    promote(paths, config)
    champion = read_champion(paths, name)
    assert champion is not None
    assert (champion.version, champion.reports["eval_int8"]["map.AP"], champion.reports["profile"]["latency_ms"]) == (2, 0.6, 8.75)
    rollback(paths, config)
    first = read_champion(paths, name)
    assert first is not None
    assert (first.version, first.reports["eval_int8"]["map.AP"]) == (1, 0.496)
    client_of(paths).set_registered_model_alias(name, "champion", "2")
    assert fetch_champion(paths, config) == champion == read_champion(paths, name)


def test_stored_file_that_was_changed_forbids_promotion(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    version = register_versions(tracked_copy, 1)[0]
    store = Path(client_of(paths).get_run(version.run_id).info.artifact_uri.removeprefix("file://"))
    for file in ("reports/gate.json", "pipeline/dvc.lock", "pipeline/sha256.json"):
        good = (store / file).read_text()
        (store / file).write_text(good.replace("a", "b", 1))
        with pytest.raises(DataError, match=f"version 1: {file} (was changed after it was|is not the one that was) logged"):
            promote(paths, config, force_reason="even with a reason")
        (store / file).unlink()
        with pytest.raises(DataError, match=f"version 1: {file} is missing in the artifact store"):
            promote(paths, config, force_reason="even with a reason")
        (store / file).write_text(good)
    assert aliases(paths, version.name) == {"candidate": 1}
    assert promote(paths, config).version == 1


def test_new_verdict_on_the_same_model_is_no_new_version(tracked_copy: tuple[Paths, Config]) -> None:
    """Rules were changed and the gate judged again: the version keeps its number and gets the verdict."""
    paths, config = tracked_copy
    first = register_versions(tracked_copy, 1)[0]
    gate, lock = paths.report("gate.json"), paths.root / "dvc.lock"
    old = hashlib.md5(gate.read_bytes()).hexdigest()
    gate.write_text(gate.read_text().replace("true", "false"))
    lock.write_text(lock.read_text().replace(old, hashlib.md5(gate.read_bytes()).hexdigest()))
    again = register_release(paths, config)
    assert (again.version, again.created, again.gate) == (1, False, "failed")
    assert client_of(paths).get_model_version(first.name, "1").tags["bevj6.gate"] == "failed"
    with pytest.raises(PromotionError, match="gate is 'failed'"):
        promote(paths, config)
    assert promote(paths, config, force_reason="kept files fit their hashes again").version == 1


def test_alias_moved_by_someone_else_meanwhile_changes_nothing(tracked_copy: tuple[Paths, Config], monkeypatch: pytest.MonkeyPatch) -> None:
    paths, config = tracked_copy
    name = register_versions(tracked_copy, 3)[0].name
    promote(paths, config, 1)
    verify = registry.verify_stored_model

    def move_alias_too(uri: str, digest: str) -> None:
        verify(uri, digest)
        client_of(paths).set_registered_model_alias(name, "champion", "2")

    monkeypatch.setattr(registry, "verify_stored_model", move_alias_too)
    with pytest.raises(PromotionError, match="moved by someone else"):
        promote(paths, config, 3)
    assert aliases(paths, name) == {"candidate": 3, "champion": 2}
    assert [entry["version"] for entry in read_log(paths)] == [1]
    changes = release_history(paths, config)
    assert [(change.action, change.version) for change in changes] == [("promote", 1), ("moved outside bevj6", 2)]
    monkeypatch.undo()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", find_service(paths.root).uri)


@pytest.mark.parametrize("cut", ["before", "after"])
def test_promotion_that_was_killed_is_completed_or_forgotten(tracked_copy: tuple[Paths, Config], monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    paths, config = tracked_copy
    name = register_versions(tracked_copy, 2)[0].name
    promote(paths, config, 1)

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(registry, "_tag_version" if cut == "before" else "_complete", die)
        with pytest.raises(Killed):
            promote(paths, config, 2)
    assert [change.done for change in release_history(paths, config)][:2] == [True, False]
    if cut == "before":
        assert aliases(paths, name) == {"candidate": 2, "champion": 1}
        promote(paths, config, 2)
    else:
        assert aliases(paths, name) == {"candidate": 2, "champion": 2}
        with pytest.raises(PromotionError, match="champion already"):
            promote(paths, config, 2)
    assert aliases(paths, name) == {"candidate": 2, "champion": 2, "previous": 1}
    assert [(change.number, change.version, change.done) for change in release_history(paths, config)] == [(1, 1, True), (2, 2, True)]


def test_rollback_that_was_killed_can_be_repeated(tracked_copy: tuple[Paths, Config], monkeypatch: pytest.MonkeyPatch) -> None:
    paths, config = tracked_copy
    name = register_versions(tracked_copy, 3)[0].name
    for version in (1, 2, 3):
        promote(paths, config, version)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_complete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            rollback(paths, config)
    assert rollback(paths, config).version == 2
    assert aliases(paths, name) == {"candidate": 3, "champion": 2, "previous": 1}
    assert len(release_history(paths, config)) == 4


def test_clock_that_jumps_back_keeps_the_order(tracked_copy: tuple[Paths, Config], monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime, timedelta

    paths, config = tracked_copy
    register_versions(tracked_copy, 2)
    promote(paths, config, 1)

    class Yesterday(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(days=1)

    monkeypatch.setattr(registry, "datetime", Yesterday)
    promote(paths, config, 2)
    changes = release_history(paths, config)
    assert changes[0].at > changes[1].at
    assert [change.version for change in changes] == [1, 2]
    assert rollback(paths, config).version == 1
    assert audit.read_log(paths)[-1]["number"] == 3
