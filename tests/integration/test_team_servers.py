"""The servers for a team, natively: Postgres, S3, MLflow with authentication, Prefect and a worker, over the sample project.

Every fault here has the same outcome: nothing is lost, nothing is there twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from flows.dvc_dag import is_unfinished
from pipeline.champion import read_champion
from pipeline.config import Config, load_config
from pipeline.errors import ServiceError
from pipeline.paths import Paths
from pipeline.tracking.doctor import examine
from pipeline.tracking.outbox import park, waiting
from pipeline.tracking.registration import register_release
from pipeline.tracking.registry import promote, release_history, rollback
from tests.conftest import copy_sample_project
from tests.integration.servers import Stack, free_port, stack, wait_until

pytestmark = pytest.mark.integration

MODEL = "bev-multitask-j6m"
VALIDATED_EVENT = "bevj6.data.validated"  # flows.data.VALIDATED_EVENT, without importing Prefect


@pytest.fixture(scope="module")
def up(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("team")
    with pytest.MonkeyPatch.context() as patch, stack(project_root, folder) as servers:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
            patch.setenv(name, servers.environment[name])
        yield servers


@pytest.fixture(scope="module")
def project(up: Stack, project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample project with the flows and deployments of the real one. The tests of this file follow each other in it."""
    folder = copy_sample_project(tmp_path_factory.mktemp("team-project") / "project")
    shutil.copy(project_root / "prefect.yaml", folder)
    shutil.copytree(project_root / "flows", folder / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def settings(project: Path) -> tuple[Paths, Config]:
    return Paths(project), load_config(project / "params.yaml")


def set_steps(project: Path, steps: int) -> None:
    params = project / "params.yaml"
    params.write_text("".join(f"  steps: {steps}\n" if "steps:" in line else line for line in params.read_text().splitlines(keepends=True)))


def registered(up: Stack) -> dict[int, str]:
    """{version: key} of the registered model."""
    import mlflow

    found = mlflow.MlflowClient(up.mlflow, up.mlflow).search_model_versions(f"name = '{MODEL}'")
    return {int(version.version): version.tags["bevj6.lock_sha"] for version in sorted(found, key=lambda version: int(version.version))}


def starts(project: Path, stage: str) -> int:
    file = project / "starts"
    return file.read_text().splitlines().count(stage) if file.is_file() else 0


def working_in(folder: Path) -> list[str]:
    """Commands of the live processes whose working directory is `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder and (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # ended, or not ours
            continue
    return found


def test_doctor_finds_everything_reachable(up: Stack, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", up.prefect_api)
    monkeypatch.setenv("MLFLOW_S3_ENDPOINT_URL", up.s3)
    checks = {check.name: check for check in examine(project)}
    for name in ("mlflow", "s3 (MLFLOW_S3_ENDPOINT_URL)", "prefect (PREFECT_API_URL)"):
        assert checks[name].ok is True, checks[name]


def test_health_checks_of_the_compose_file_tell_up_from_down(up: Stack, project_root: Path) -> None:
    services = yaml.safe_load((project_root / "docker-compose.yml").read_text())["services"]
    for name, inside, port in (("mlflow", 5000, urlsplit(up.mlflow).port), ("prefect", 4200, urlsplit(up.prefect_api).port)):
        assert_tells_up_from_down(services[name], inside, port)
    # The S3 server here has no page for health: one that it answers takes its place, and a path that it refuses is down as well.
    s3 = services["s3"]["healthcheck"]["test"]
    for page, healthy in (("moto-api/", True), ("health", False)):
        command = [part.replace("7070/health", f"{urlsplit(up.s3).port}/{page}") for part in s3[1:]]
        assert (subprocess.run(command, capture_output=True, check=False).returncode == 0) is healthy, page
    ready = [str(up.postgres.programs / part) if part == "pg_isready" else part for part in services["postgres"]["healthcheck"]["test"][1:]]
    for address, healthy in ((up.postgres.port, True), (free_port(), False)):
        assert (subprocess.run([*ready, f"--port={address}"], capture_output=True, check=False).returncode == 0) is healthy


def assert_tells_up_from_down(service: dict[str, Any], inside: int, port: int | None) -> None:
    """A service's health check, with the port it has here, and with one where nobody listens."""
    for address, healthy in ((port, True), (free_port(), False)):
        command = [part.replace(str(inside), str(address)).replace("python", sys.executable) for part in service["healthcheck"]["test"][1:]]
        assert (subprocess.run(command, capture_output=True, check=False).returncode == 0) is healthy, command


def test_wrong_password_is_refused_and_named(up: Stack, built_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    with pytest.raises(ServiceError, match="MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"):
        register_release(*settings(built_copy))


def test_worker_retrains_although_postgres_restarts_and_s3_stumbles(up: Stack, project: Path, project_root: Path) -> None:
    """Postgres is restarted while the training runs; then S3 is slow and refuses the first two files."""
    health_port = up.start_worker(project)
    assert_tells_up_from_down(yaml.safe_load((project_root / "docker-compose.yml").read_text())["services"]["worker"], 8080, health_port)
    (project / "hold-train").touch()
    command = [sys.executable, "-m", "prefect", "deployment", "run", "retrain/nightly", "--watch", "--watch-interval", "1"]
    watched = subprocess.Popen(command, cwd=project, env=up.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(f"training ({up.log('worker')})", lambda: watched.poll() is None and (project / "hold-train.running").exists())
    up.postgres.restart()
    up.faults.errors, up.faults.delay_s = 2, 0.05
    (project / "hold-train").unlink()
    output, _ = watched.communicate(timeout=400)
    assert "Completed" in output or "finished successfully" in output, output + up.log("worker") + up.log("prefect")
    assert up.faults.served == 2
    up.faults.delay_s = 0.0
    assert list(registered(up)) == [1]
    assert starts(project, "train") == 1


def test_promotion_and_rollback_with_everything_on_the_servers(up: Stack, project: Path) -> None:
    paths, config = settings(project)
    promote(paths, config)
    first = read_champion(paths, MODEL)
    assert first is not None
    assert first.version == 1
    set_steps(project, 7)
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=project, check=True, env=up.environment)
    assert register_release(paths, config).version == 2
    assert promote(paths, config).replaced == 1
    assert rollback(paths, config, "from the server back to the first").version == 1
    assert [(change.action, change.version) for change in release_history(paths, config)] == [("promote", 1), ("promote", 2), ("rollback", 1)]


def test_user_without_permission_may_look_but_not_promote(up: Stack, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user is made as docs/operations.md says; services/mlflow-auth.ini lets everybody with a name read."""
    from mlflow.server import get_app_client

    get_app_client("basic-auth", up.mlflow).create_user("reader", "at-least-12-characters")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "reader")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "at-least-12-characters")
    paths, config = settings(project)
    history = release_history(paths, config)
    assert len(history) == 3
    with pytest.raises(ServiceError, match="ask for the permission"):
        promote(paths, config, 2)
    assert release_history(paths, config) == history


def test_s3_that_stays_broken_leaves_no_half_version(up: Stack, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, config = settings(project)
    before = registered(up)
    set_steps(project, 8)
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=project, check=True, env=up.environment)
    up.faults.errors = 10_000
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    try:
        with pytest.raises(ServiceError):
            register_release(paths, config)
    finally:
        up.faults.errors = 0
    assert registered(up) == before
    done = register_release(paths, config)
    assert (done.version, done.created) == (3, True)
    assert promote(paths, config, 3).version == 3  # everything stored has the bytes that were logged


def test_mlflow_killed_in_the_middle_of_a_registration_leaves_one_version(up: Stack, project: Path) -> None:
    """The files are on their way when the server gets SIGKILL; what it had received stays without effect, and is sent anew when it is back."""
    paths, config = settings(project)
    before = registered(up)
    set_steps(project, 12)
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=project, check=True, env=up.environment)
    writes, up.faults.delay_s = up.faults.writes, 0.3
    command = [sys.executable, "-m", "pipeline.cli", "register", "--project", str(project)]
    with (up.folder / "register.log").open("w") as log:
        sending = subprocess.Popen(command, cwd=project, env=up.environment, stdout=log, stderr=subprocess.STDOUT)
    wait_until("files are being stored", lambda: sending.poll() is None and up.faults.writes >= writes + 2)
    up.stop("mlflow", signal.SIGKILL)
    assert sending.wait(200) == 1, up.log("register")
    assert "error: MLflow at" in up.log("register")
    assert "Traceback" not in up.log("register")
    park(paths, config)
    up.faults.delay_s = 0.0
    up.start_mlflow_again()
    assert registered(up) == before
    done = register_release(paths, config)
    assert (done.created, len(registered(up))) == (True, len(before) + 1)
    assert list(waiting(paths, config)) == []
    assert promote(paths, config, done.version).version == done.version  # every stored file has the bytes that were logged


def flow_runs(up: Stack, deployment: str) -> list[dict[str, Any]]:
    """Runs of a deployment, the latest first."""
    asked = {"deployments": {"name": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_DESC", "limit": 20}
    return list(httpx.post(f"{up.prefect_api}/flow_runs/filter", json=asked).raise_for_status().json())


def test_event_of_new_data_starts_a_retraining_and_cancel_in_the_page_ends_it_cleanly(up: Stack, project: Path) -> None:
    """The event that `validate-data` emits starts `on-new-data`. Cancelled while it trains, it leaves no stage, and the last good outputs."""
    before, good = registered(up), (project / "models/multitask.onnx").read_bytes()
    params = project / "params.yaml"
    params.write_text(params.read_text().replace("seed: 0", "seed: 1"))  # a data set of its own
    set_steps(project, 13)
    (project / "hold-train").touch()
    (project / "hold-train.running").unlink(missing_ok=True)
    event = {"event": VALIDATED_EVENT, "resource": {"prefect.resource.id": "bevj6.data.v2"}, "occurred": datetime.now(UTC).isoformat()}
    httpx.post(f"{up.prefect_api}/events", json=[event | {"id": str(uuid.uuid4())}]).raise_for_status()
    wait_until(f"training ({up.log('worker')})", lambda: (project / "hold-train.running").exists())
    run = next(run for run in flow_runs(up, "on-new-data") if run["state_type"] == "RUNNING")
    page = f"{up.prefect_api}/flow_runs/{run['id']}"
    httpx.post(f"{page}/set_state", json={"state": {"type": "CANCELLING"}, "force": False}).raise_for_status()
    wait_until(f"cancelled ({up.log('worker')})", lambda: httpx.get(page).json()["state_type"] == "CANCELLED")
    wait_until("stage ends with its flow", lambda: not [command for command in working_in(project) if "work.py" in command], 30)
    (project / "hold-train").unlink()
    assert (project / "models/multitask.onnx").read_bytes() == good
    assert registered(up) == before
    assert is_unfinished(project)  # so the next event, although it finds the same data, goes on with the training


def test_killed_worker_leaves_no_stage_and_the_next_run_goes_on(up: Stack, project: Path) -> None:
    """SIGKILL for the worker and the flow it runs, in the middle of the training."""
    before = registered(up)
    set_steps(project, 9)
    (project / "hold-train").touch()
    (project / "hold-train.running").unlink(missing_ok=True)
    up.run(project, "prefect", "deployment", "run", "retrain/nightly")
    wait_until(f"training ({up.log('worker')})", lambda: (project / "hold-train.running").exists())
    trained = starts(project, "train")
    worker = up.processes["worker"]
    for victim in (worker.pid, *children_of(worker.pid)):
        os.kill(victim, signal.SIGKILL)
    worker.wait()
    up.processes.pop("worker")
    wait_until("stage ends with its flow", lambda: not [command for command in working_in(project) if "work.py" in command], 30)
    (project / "hold-train").unlink()
    done = subprocess.run([sys.executable, "-m", "flows.retrain"], cwd=project, env=up.environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(registered(up)) == len(before) + 1
    assert starts(project, "train") == trained + 1


def children_of(pid: int) -> list[int]:
    """Flow processes that a worker has started. What they started in their turn is for them to take along."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def test_two_flows_at_once_run_one_after_the_other(up: Stack, project: Path) -> None:
    before = registered(up)
    set_steps(project, 10)
    (project / "hold-train").touch()
    (project / "hold-train.running").unlink(missing_ok=True)
    trained = starts(project, "train")
    command = [sys.executable, "-m", "flows.retrain"]
    first = subprocess.Popen(command, cwd=project, env=up.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until("training", lambda: first.poll() is None and (project / "hold-train.running").exists())
    with (up.folder / "second.log").open("w") as log:
        second = subprocess.Popen(command, cwd=project, env=up.environment, stdout=log, stderr=subprocess.STDOUT)
    wait_until("the second flow waits", lambda: second.poll() is None and "waiting for it" in up.log("second"))
    (project / "hold-train").unlink()
    assert first.wait(600) == 0, first.stdout.read() if first.stdout else ""
    assert second.wait(600) == 0, up.log("second")
    assert "already registered" in up.log("second")
    assert starts(project, "train") == trained + 1
    assert len(registered(up)) == len(before) + 1


def test_prefect_lost_in_the_middle_costs_no_finished_stage(up: Stack, project: Path) -> None:
    """The last test: the Prefect server is killed while the training runs. What was finished stays, without Prefect the rest is one command away."""
    paths, config = settings(project)
    environment = up.environment | {"PREFECT_CLIENT_MAX_RETRIES": "0"}  # the default of five waits for minutes
    before = registered(up)
    set_steps(project, 11)
    (project / "hold-train").touch()
    (project / "hold-train.running").unlink(missing_ok=True)
    trained = starts(project, "train")
    with (up.folder / "lost.log").open("w") as log:
        flow = subprocess.Popen([sys.executable, "-m", "flows.retrain"], cwd=project, env=environment, stdout=log, stderr=subprocess.STDOUT)
    wait_until("training", lambda: flow.poll() is None and (project / "hold-train.running").exists())
    up.stop("prefect", signal.SIGKILL)
    (project / "hold-train").unlink()
    assert flow.wait(400) != 0
    assert "retrain: error: Prefect at" in (up.folder / "lost.log").read_text()
    wait_until("no stage is left", lambda: not [command for command in working_in(project) if "work.py" in command], 30)
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=project, check=True, env=up.environment)
    assert register_release(paths, config).created
    assert list(waiting(paths, config)) == []
    assert len(registered(up)) == len(before) + 1
    assert starts(project, "train") - trained <= 2
    done = subprocess.run([sys.executable, "-m", "flows.retrain"], cwd=project, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "Prefect" in done.stderr and "dvc repro" in done.stderr
    assert "Traceback" not in done.stderr
