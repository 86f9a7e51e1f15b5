"""From the files of the sample project to MLflow, in a real SQLite database."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.errors import ServiceError
from pipeline.io import sha256_file
from pipeline.paths import Paths
from pipeline.tracking.registration import register_release
from pipeline.tracking.runs import COMPLETE_TAG
from pipeline.tracking.service import ADDRESS_VARIABLES, mlflow_session

if TYPE_CHECKING:
    from .conftest import Registered



def client_of(registered: Registered) -> Any:
    import mlflow

    mlflow.set_tracking_uri(registered.service.uri)
    mlflow.set_registry_uri(registered.service.uri)
    return mlflow.MlflowClient(registered.service.uri, registered.service.uri)


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {"images": rng.normal(size=(6, 3, 8, 8)).astype(np.float32), "ego2img": rng.normal(size=(6, 4, 4)).astype(np.float32)}


def test_run_holds_everything_about_the_version(registered: Registered) -> None:
    client = client_of(registered)
    run = client.get_run(registered.registration.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "20"
    assert run.data.metrics["float/map.AP"] == 0.5
    assert run.data.metrics["int8/map.AP"] == 0.496
    assert run.data.metrics["latency_ms/detection"] == 2.0
    curve = client.get_metric_history(run.info.run_id, "curve/loss")
    assert [(point.step, round(point.value * (1 + point.step), 9)) for point in curve] == [(step, 1.0) for step in range(20)]
    dataset = run.inputs.dataset_inputs[0].dataset
    assert (dataset.name, dataset.digest) == ("synthetic-v1.0-synthetic", "0" * 36)
    assert json.loads(dataset.source)["tags"]["bevj6.data_fingerprint"] == "0" * 64


def test_artifacts_are_the_files(registered: Registered, tmp_path: Path) -> None:
    client, root = client_of(registered), registered.paths.root
    folder = Path(client.download_artifacts(registered.registration.run_id, "", str(tmp_path)))
    expected = {"reports": ["release.html", "gate.json", "profile.json"], "models": ["multitask.onnx", "contract.json"]}
    for kind, names in expected.items():
        assert all(sha256_file(folder / kind / name) == sha256_file(root / kind / name) for name in names)
    assert all(sha256_file(folder / "pipeline" / name) == sha256_file(root / name) for name in ("params.yaml", "dvc.yaml", "dvc.lock"))


def test_version_carries_its_origin_and_is_the_candidate(registered: Registered) -> None:
    version = client_of(registered).get_model_version_by_alias("bev-multitask-j6m", "candidate")
    assert int(version.version) == registered.registration.version == 1
    assert registered.registration.created
    assert version.tags["bevj6.gate"] == "passed"
    assert version.tags["bevj6.data_fingerprint"] == "0" * 64
    assert version.tags["bevj6.chip_profile_hash"] == "c" * 64
    assert len(version.tags["bevj6.lock_sha"]) == 64
    assert len(version.tags["bevj6.git_commit"]) == 40


def test_registered_model_loads_back_with_the_same_outputs(registered: Registered) -> None:
    import mlflow
    import onnxruntime

    client_of(registered)
    batch = inputs()
    expected = onnxruntime.InferenceSession(str(registered.paths.int8_onnx)).run(None, batch)
    uri = "models:/bev-multitask-j6m@candidate"
    loaded = onnxruntime.InferenceSession(mlflow.onnx.load_model(uri).SerializeToString()).run(None, batch)
    served = mlflow.pyfunc.load_model(uri)
    assert [spec.name for spec in served.metadata.signature.inputs] == ["images", "ego2img"]
    assert [spec.shape for spec in served.metadata.signature.outputs] == [(6, 4), (6, 4)]
    answers = served.predict(batch)
    for index, name in enumerate(("scores", "pose_mean")):
        np.testing.assert_array_equal(loaded[index], expected[index])
        np.testing.assert_array_equal(answers[name], expected[index])


def test_second_registration_changes_nothing(registered: Registered) -> None:
    client = client_of(registered)
    again = register_release(registered.paths, registered.config)
    assert not again.created
    assert (again.version, again.run_id) == (registered.registration.version, registered.registration.run_id)
    assert len(client.search_model_versions("name = 'bev-multitask-j6m'")) == 1
    assert len(client.get_metric_history(again.run_id, "curve/loss")) == 20


def test_session_leaves_no_address_behind(registered: Registered, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ADDRESS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with mlflow_session(registered.service) as client:
        assert client.get_run(registered.registration.run_id).info.status == "FINISHED"
    assert [name for name in ADDRESS_VARIABLES if name in os.environ] == []


def test_alias_that_people_moved_stays(registered: Registered, tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    client = client_of(registered)
    first = register_release(paths, config)
    change_lock(paths)
    second = register_release(paths, config)
    assert (first.version, second.version) == (1, 2)
    client.set_registered_model_alias(second.name, "candidate", "1")
    register_release(paths, config)
    assert client.get_model_version_by_alias(second.name, "candidate").version == 1


def test_run_that_was_cut_short_is_replaced(registered: Registered, tracked_copy: tuple[Paths, Config]) -> None:
    paths, config = tracked_copy
    client = client_of(registered)
    first = register_release(paths, config)
    client.set_tag(first.run_id, COMPLETE_TAG, "false")
    client.delete_model_version(first.name, str(first.version))
    second = register_release(paths, config)
    assert second.created
    assert second.run_id != first.run_id
    assert client.get_run(first.run_id).info.lifecycle_stage == "deleted"
    assert len(client.search_model_versions(f"name = '{first.name}'")) == 1


def change_lock(paths: Paths) -> None:
    """A new pipeline version with the same files: another value of a parameter."""
    lock = paths.root / "dvc.lock"
    text = lock.read_text()
    assert "steps: 20" in text
    lock.write_text(text.replace("steps: 20", "steps: 21"))


def test_server_that_is_away_is_named_at_once(built_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    start = time.monotonic()
    with pytest.raises(ServiceError, match=address):
        register_release(Paths(built_copy), Config())
    assert time.monotonic() - start < 60  # MLflow's own retries would take minutes
