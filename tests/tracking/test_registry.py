"""Promotion and rollback against a real registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pytest

from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.paths import Paths
from pipeline.tracking.registration import Registration, register_release
from pipeline.tracking.registry import PromotionError, promote, read_release_log, rollback
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

    log = read_release_log(paths)
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
    with pytest.raises(PromotionError, match=r"version 1: gate is 'failed', must be 'passed'"):
        promote(paths, config)
    assert aliases(paths, version.name) == {"candidate": 1}
    assert read_release_log(paths) == []
    change = promote(paths, config, force_reason="demo car, closed course")
    assert (change.gate, change.reason) == ("failed", "demo car, closed course")
    assert read_release_log(paths)[0]["reason"] == "demo car, closed course"
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
    with pytest.raises(DataError, match="not found in the registry"):
        promote(paths, config, version)


def test_champion_is_not_promoted_again(tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    register_versions(tracked_copy, 1)
    promote(paths, config)
    with pytest.raises(PromotionError, match="champion already"):
        promote(paths, config)
    assert len(read_release_log(paths)) == 1
