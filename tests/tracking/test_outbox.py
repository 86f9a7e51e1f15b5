"""Versions that wait until MLflow is there again: none is lost, none is registered twice."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.config import Config
from pipeline.errors import ServiceError
from pipeline.paths import Paths
from pipeline.tracking import runs
from pipeline.tracking.outbox import park, waiting
from pipeline.tracking.registration import register_release

if TYPE_CHECKING:
    from .conftest import Registered


def change_lock(paths: Paths, old: int, new: int) -> None:
    lock = paths.root / "dvc.lock"
    assert f"steps: {old}" in lock.read_text()
    lock.write_text(lock.read_text().replace(f"steps: {old}", f"steps: {new}"))


def versions(registered: Registered, name: str) -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient(registered.service.uri, registered.service.uri)
    return sorted(client.search_model_versions(f"name = '{name}'"), key=lambda version: int(version.version))


def nobody_listens() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_versions_made_while_the_server_was_away_are_sent_in_order(
    registered: Registered, tracked_copy: tuple[Paths, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, config = tracked_copy
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", nobody_listens())
        for steps in (20, 21):
            if steps != 20:
                change_lock(paths, steps - 1, steps)
            with pytest.raises(ServiceError, match="cannot connect"):
                register_release(paths, config)
            assert park(paths, config) == park(paths, config)
    assert [parked.release.params["train.steps"] for parked in waiting(paths, config)] == ["20", "20"]
    keys = [parked.release.key for parked in waiting(paths, config)]
    change_lock(paths, 21, 22)
    done = register_release(paths, config)
    assert (done.version, done.sent, done.created) == (3, (1, 2), True)
    assert [version.tags["bevj6.lock_sha"] for version in versions(registered, done.name)][:2] == keys
    assert list(waiting(paths, config)) == []
    assert register_release(paths, config).sent == ()
    assert len(versions(registered, done.name)) == 3


def test_version_that_waited_keeps_its_own_commit_and_files(registered: Registered, tracked_copy: tuple[Paths, Config]) -> None:
    import subprocess

    import mlflow

    paths, config = tracked_copy
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=paths.root, capture_output=True, text=True, check=True).stdout.strip()
    (paths.root / "work.py").write_text((paths.root / "work.py").read_text() + "# a change that was not committed\n")
    park(paths, config)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, "commit", "--quiet", "--all", "--message", "later"], cwd=paths.root, check=True)
    change_lock(paths, 20, 21)
    done = register_release(paths, config)
    first, second = versions(registered, done.name)
    assert (first.tags["bevj6.git_commit"], first.tags["bevj6.git_dirty"]) == (commit, "true")
    assert second.tags["bevj6.git_dirty"] == "false"
    client = mlflow.MlflowClient(registered.service.uri, registered.service.uri)
    patch = Path(client.download_artifacts(first.tags["bevj6.run_id"], "pipeline/uncommitted.patch"))
    assert "+# a change that was not committed" in patch.read_text()


def test_server_lost_in_the_middle_leaves_no_half_version(
    registered: Registered, tracked_copy: tuple[Paths, Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks while files are being sent: the next registration makes the run anew, once."""
    paths, config = tracked_copy

    def lose_connection(*_: object) -> None:
        raise ConnectionError("Connection aborted")

    with monkeypatch.context() as broken:
        broken.setattr(runs, "log_int8_model", lose_connection)
        with pytest.raises(ServiceError, match="Connection aborted"):
            register_release(paths, config)
    park(paths, config)
    done = register_release(paths, config)
    assert (done.version, done.sent, done.created) == (1, (), True)
    assert list(waiting(paths, config)) == []
    import mlflow

    client = mlflow.MlflowClient(registered.service.uri, registered.service.uri)
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [done.run_id]


def test_full_disk_is_named_and_leaves_no_half_version(registered: Registered, tracked_copy: tuple[Paths, Config], project_root: Path) -> None:
    """A file size limit of the kernel stands in for a full disk: MLflow's database cannot grow."""
    import resource
    import subprocess
    import sys

    paths, config = tracked_copy
    with paths.params.open("a") as params:
        params.write(f"tracking:\n  registered_model: {config.tracking.registered_model}\n  experiment: {config.tracking.experiment}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "register", "--project", str(paths.root)],
        cwd=project_root, capture_output=True, text=True, timeout=300, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "The disk is full" in done.stderr or "cannot write" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    again = register_release(paths, config)
    assert (again.version, again.created) == (1, True)
    assert len(versions(registered, again.name)) == 1


def test_copies_in_the_outbox_are_no_pipelines(tracked_copy: tuple[Paths, Config]) -> None:
    from flows.dvc_dag import read_dag

    paths, config = tracked_copy
    before = read_dag(paths.root)
    park(paths, config)
    assert read_dag(paths.root) == before
