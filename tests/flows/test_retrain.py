"""The retrain flow on the sample project: against real servers and with no server at all (through a worker: tests/integration)."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pipeline.config import load_config
from pipeline.errors import BevError, DataError, ServiceError
from pipeline.paths import Paths
from pipeline.tracking.registration import register_release
from pipeline.tracking.registry import promote

if TYPE_CHECKING:
    from tests.flows.conftest import Servers

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def api(servers: Servers) -> Iterator[Servers]:
    """Flows of this process run against the servers."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    before = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = servers.mlflow
    with temporary_settings({PREFECT_API_URL: servers.prefect_api, PREFECT_HOME: servers.environment["PREFECT_HOME"]}):
        yield servers
    os.environ.pop("MLFLOW_TRACKING_URI") if before is None else os.environ.update(MLFLOW_TRACKING_URI=before)


def run_flow(project: Path, **options: Any) -> tuple[Any, dict[str, str]]:
    """Final state of a flow run, and the name of each task's final state."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    from flows.retrain import retrain

    state = retrain(str(project), return_state=True, **options)
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        tasks = client.read_task_runs(flow_run_filter=chosen, limit=50)
    return state, {task.name.rsplit("-", 1)[0]: task.state_name for task in tasks}


def artifacts(state: Any) -> dict[str, str]:
    """{key: content} of a flow run's artifacts."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[state.state_details.flow_run_id])))
    return {artifact.key: str(artifact.data) for artifact in found}


def versions(address: str, name: str = "bev-multitask-j6m") -> list[Any]:
    import mlflow

    return list(mlflow.MlflowClient(address, address).search_model_versions(f"name = '{name}'"))


def aliases(address: str, name: str) -> dict[str, int]:
    import mlflow

    return {alias: int(version) for alias, version in mlflow.MlflowClient(address, address).get_registered_model(name).aliases.items()}


STAGES = ("dataset", "train", "evaluate", "quantize", "profile", "gate")


def test_flow_runs_all_stages_registers_once_and_then_does_nothing(sample_project: Path, api: Servers) -> None:
    state, tasks = run_flow(sample_project)
    assert state.is_completed(), state.message
    assert tasks == dict.fromkeys((*STAGES, "champion", "register"), "Completed")
    registration = state.result()
    assert registration.created
    assert registration.run_url.startswith(api.mlflow)

    shown = artifacts(state)
    rows = [line.split("|")[1:4] for line in shown["dvc-stages"].splitlines()[2:]]
    assert {name.strip(): result.strip() for name, result, _ in rows} == dict.fromkeys(STAGES, "Completed")
    assert all(float(seconds) > 0 for _, _, seconds in rows)
    assert registration.run_url in shown["mlflow-run"]
    assert registration.report_url in shown["release-report"]
    assert httpx.get(registration.report_url).content == (sample_project / "reports/release.html").read_bytes()
    assert picture_size(shown["picture-predictions-float"]) == (1000, 25)
    assert picture_size(shown["picture-training-curves"]) > (600, 300)
    assert row(shown["metrics-train"], "training:loss") == {"value": 0.05, "champion": None, "difference": None}
    assert [(rule["name"], rule["value"], rule["champion"], rule["limit"]) for rule in json.loads(shown["gate"])] == [("latency", 8.75, None, 33.0)]
    assert [(item["item"], item["verdict"]) for item in json.loads(shown["checklist"])] == [("warm restart", "undecided")]
    assert row(shown["metrics-evaluate"], "eval_float:map.AP") == {"value": 0.5, "champion": None, "difference": None}

    promote(Paths(sample_project), load_config(sample_project / "params.yaml"))
    lock = (sample_project / "dvc.lock").read_bytes()
    again, tasks = run_flow(sample_project)
    shown = artifacts(again)
    assert row(shown["metrics-evaluate"], "eval_float:map.AP") == {"value": 0.5, "champion": 0.5, "difference": 0.0}
    assert row(shown["metrics-train"], "training:loss") == {"value": 0.05, "champion": 0.05, "difference": 0.0}
    assert json.loads(shown["gate"])[0]["champion"] == 8.75
    assert not any(key.startswith("picture-") for key in shown)  # those of the first run are still the ones
    assert tasks == dict.fromkeys(STAGES, "Unchanged") | {"champion": "Completed", "register": "Completed"}
    assert not again.result().created
    assert again.result().version == registration.version
    assert (sample_project / "dvc.lock").read_bytes() == lock
    assert len(versions(api.mlflow)) == 1


def picture_size(uri: str) -> tuple[int, int]:
    """Width and height, px, of a picture that is part of its address."""
    from PIL import Image

    kind, _, content = uri.partition(";base64,")
    assert kind.startswith("data:image/")
    return Image.open(io.BytesIO(base64.b64decode(content))).size


def row(table: str, metric: str) -> dict[str, Any]:
    """Columns of a metric in a table artifact."""
    return {name: value for line in json.loads(table) if line["metric"] == metric for name, value in line.items() if name != "metric"}


def test_failed_stage_stops_what_depends_on_it_and_the_next_run_goes_on_there(sample_project: Path, api: Servers) -> None:
    (sample_project / "fail-profile").touch()
    state, tasks = run_flow(sample_project, register_model=False)
    assert state.is_failed()
    with pytest.raises(BevError, match=r"profile: error: data/broken\.json: not valid JSON"):
        state.result()
    assert tasks == dict.fromkeys(("dataset", "train", "evaluate", "quantize"), "Completed") | {"profile": "Failed", "gate": "NotReady"}

    (sample_project / "fail-profile").unlink()
    state, tasks = run_flow(sample_project, register_model=False)
    assert state.is_completed()
    assert tasks == dict.fromkeys(("dataset", "train", "evaluate", "quantize"), "Unchanged") | {"profile": "Completed", "gate": "Completed"}


def test_single_mode_is_one_task(built_copy: Path, api: Servers) -> None:
    state, tasks = run_flow(built_copy, mode="single", register_model=False)
    assert state.is_completed()
    assert tasks == {"dvc repro": "Completed"}
    shown = artifacts(state)
    assert "| gate | Unchanged |  |" in shown["dvc-stages"]
    assert {"metrics-evaluate", "gate", "checklist"} <= shown.keys()


def nobody_listens() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_mlflow_away_keeps_the_version_for_the_next_run(built_copy: Path, api: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    from flows import retrain as module

    with (built_copy / "params.yaml").open("a") as params:
        params.write("tracking:\n  registered_model: waited\n")
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", nobody_listens())
        away.setattr(module, "register", module.register.with_options(retries=0))
        state, tasks = run_flow(built_copy)
    assert (state.is_completed(), state.name) == (True, "Waiting")
    assert tasks["champion"] == "Completed"  # away as well: compared with what the checkout knows
    assert len(list((built_copy / ".services/outbox").glob("0001-*"))) == 1
    params_file = built_copy / "params.yaml"
    params_file.write_text(params_file.read_text().replace("steps: 20", "steps: 7"))
    state, _ = run_flow(built_copy)
    registration = state.result()
    assert (registration.version, registration.sent, registration.created) == (2, (1,), True)
    assert sorted(int(version.version) for version in versions(api.mlflow, "waited-j6m")) == [1, 2]
    assert list((built_copy / ".services/outbox").glob("0001-*")) == []


def test_unchanged_data_start_nothing_when_only_new_data_count(built_copy: Path, api: Servers) -> None:
    state, tasks = run_flow(built_copy, register_model=False, only_on_new_data=True)
    assert (state.name, tasks) == ("NoNewData", {})
    params = built_copy / "params.yaml"
    params.write_text(params.read_text().replace("seed: 0", "seed: 1"))
    state, tasks = run_flow(built_copy, register_model=False, only_on_new_data=True)
    assert state.is_completed(), state.message
    assert tasks["dataset"] == tasks["train"] == "Completed"


def test_registered_version_is_promoted_and_profiled_on_another_chip(built_copy: Path, api: Servers) -> None:
    from flows.profile_model import profile_model
    from flows.release import promote_model, rollback_model

    with (built_copy / "params.yaml").open("a") as params:
        params.write("tracking:\n  registered_model: profiled\n")
    register_release(Paths(built_copy), load_config(built_copy / "params.yaml"))
    state = promote_model(str(built_copy), return_state=True)
    assert "| action | promote |" in artifacts(state)["release"]
    with pytest.raises(BevError, match="nothing to roll back to"):
        rollback_model(str(built_copy))
    state = profile_model("champion", "j6e", str(built_copy), return_state=True)
    figures = state.result()
    assert (figures["chip"], figures["registered_version"], figures["logged_latency_ms"]) == ("j6e", 1, 8.75)
    assert figures["latency_ms"] > 0
    assert "latency_ms of" in artifacts(state)["profile-j6e"]

    lock = built_copy / "dvc.lock"
    lock.write_text(lock.read_text().replace("steps: 20", "steps: 21"))  # another version of the same files
    assert register_release(Paths(built_copy), load_config(built_copy / "params.yaml")).version == 2
    assert promote_model(str(built_copy))["replaced"] == 1
    state = rollback_model(str(built_copy), "too slow on the road", return_state=True)
    change = state.result()
    assert (change["action"], change["version"], change["replaced"], change["reason"]) == ("rollback", 1, 2, "too slow on the road")
    assert "| action | rollback |" in artifacts(state)["release"]
    assert aliases(api.mlflow, "profiled-j6m") == {"candidate": 2, "champion": 1}


def validated_events(api: Servers) -> int:
    """How many batches the server knows to have passed."""
    asked = {"filter": {"event": {"name": ["bevj6.data.validated"]}, "occurred": {"since": "2000-01-01T00:00:00Z"}}}
    return int(httpx.post(f"{api.prefect_api}/events/filter", json=asked).raise_for_status().json()["total"])


def test_new_batch_is_judged_and_announced(api: Servers, project_root: Path, tmp_path: Path) -> None:
    from flows import data as module
    from tests.integration.chain import project, run_stages
    from tests.integration.test_faults import TINY

    config, paths = project(tmp_path, project_root / "params.yaml", TINY)
    run_stages(["dataset"], config, paths)
    state = module.validate_data(str(paths.synthetic_dataroot), "v1.0-synthetic", str(tmp_path), return_state=True)
    assert state.is_completed(), state.message
    assert state.result()["passed"]
    deadline = time.monotonic() + 60
    while not (announced := validated_events(api)):
        assert time.monotonic() < deadline, "the event never reached the server"
        time.sleep(0.2)
    for image in paths.synthetic_dataroot.glob("samples/CAM_FRONT/*.jpg"):
        image.write_bytes(image.read_bytes()[:100])
    state = module.validate_data(str(paths.synthetic_dataroot), "v1.0-synthetic", str(tmp_path), return_state=True)
    with pytest.raises(DataError, match="did not pass"):
        state.result()
    assert validated_events(api) == announced
    assert "validation-findings" in artifacts(state)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ServiceError("MLflow at http://x: away"), True), (DataError("data/dataset.json: cut"), False), (KeyError("defect"), False)],
)
def test_only_outside_causes_are_retried(error: Exception, expected: bool) -> None:
    from prefect.states import Failed

    from flows.dvc_dag import StageError, StageInterruptedError
    from flows.profile_model import profile_task
    from flows.release import promote_task, rollback_task
    from flows.retrain import register, run_all, run_stage
    from flows.retries import is_outside_cause

    assert is_outside_cause(None, None, Failed(data=error)) is expected
    assert is_outside_cause(None, None, Failed(data=StageInterruptedError("lock"))) is True
    assert is_outside_cause(None, None, Failed(data=StageError("bad data"))) is False
    for task in (run_stage, run_all, register, promote_task, rollback_task, profile_task):
        assert task.retry_condition_fn is is_outside_cause
        assert task.retries == 2


def test_deployments_reach_the_server(built_copy: Path, api: Servers, project_root: Path) -> None:
    from prefect.client.orchestration import get_client

    for name in ("prefect.yaml", "prefect.toml"):
        shutil.copy(project_root / name, built_copy)
    shutil.copytree(project_root / "flows", built_copy / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    prefect(built_copy, api, "work-pool", "create", "bevj6", "--type", "process")
    prefect(built_copy, api, "deploy", "--all")
    with get_client(sync_client=True) as client:
        nightly = client.read_deployment_by_name("retrain/nightly")
        assert {deployment.name for deployment in client.read_deployments()} >= {"nightly", "promote", "rollback"}
        expected = [getattr(automation.trigger, "expect", set()) for automation in client.read_automations()]
    assert {"bevj6.data.validated"} in expected  # the deployment on-new-data answers it
    assert nightly.schedules[0].schedule.cron == "0 2 * * *"
    assert nightly.schedules[0].schedule.timezone == "Europe/Berlin"
    assert nightly.global_concurrency_limit.limit == 1
    assert nightly.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(built_copy)}}]


def test_kubernetes_pool_is_accepted_by_the_server(api: Servers, project_root: Path) -> None:
    """The server checks that every placeholder of the job has a variable."""
    template = json.loads((project_root / "services/kubernetes-pool.json").read_text())
    pool = {"name": "on-kubernetes", "type": "kubernetes", "base_job_template": template}
    made = httpx.post(f"{api.prefect_api}/work_pools/", json=pool)
    assert made.status_code == 201, made.text
    del template["variables"]["properties"]["image"]
    refused = httpx.post(f"{api.prefect_api}/work_pools/", json=pool | {"name": "without-image"})
    assert refused.status_code == 422
    assert "image" in refused.text


def prefect(project: Path, api: Servers, *arguments: str) -> str:
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=project, env=api.environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_cancelled_run_without_a_server_leaves_no_stage_behind(built_copy: Path, project_root: Path, tmp_path: Path) -> None:
    """`python -m flows.retrain` starts its own temporary server; SIGTERM ends it, DVC and the stage, and keeps the last good outputs."""
    good = (built_copy / "models/multitask.onnx").read_bytes()
    params = built_copy / "params.yaml"
    params.write_text(params.read_text().replace("steps: 20", "steps: 7"))
    (built_copy / "stop-train").touch()
    environment = {key: value for key, value in os.environ.items() if key not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")}
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": str(project_root)}
    log = tmp_path / "flow.log"
    with log.open("w") as stream:
        flow = subprocess.Popen([sys.executable, "-m", "flows.retrain"], cwd=built_copy, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 180
    while not (built_copy / "stop-train.running").exists():
        assert flow.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    flow.send_signal(signal.SIGTERM)
    assert flow.wait(60) != 0
    assert not [process for process in Path("/proc").glob("[0-9]*") if runs_in(process, built_copy)]
    assert (built_copy / "models/multitask.onnx").read_bytes() == good


def runs_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").readlink() == folder
    except OSError:  # ended, or not ours
        return False
