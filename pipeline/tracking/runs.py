"""One MLflow run per pipeline version, found again by the hash of dvc.lock."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.tracking.artifacts import MANIFEST_TAG, log_files
from pipeline.tracking.onnx_model import MODEL_HASH_TAG, log_int8_model
from pipeline.tracking.release import LOCK_TAG, PATCH_NAME, Release
from pipeline.tracking.service import Service

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

COMPLETE_TAG = "bevj6.complete"
MODEL_URI_TAG = "bevj6.model_uri"
METRICS_PER_CALL = 1000  # MLflow's limit for one batch
DIGEST_LENGTH = 36  # MLflow's limit for the digest of a data set; the whole fingerprint is a tag


@dataclass(frozen=True)
class LoggedRun:
    """A complete run: its ids, the model logged in it, the hash of that model's file and the hash over the other files."""

    run_id: str
    experiment_id: str
    model_uri: str
    model_sha256: str
    artifacts_sha256: str


def ensure_run(client: MlflowClient, service: Service, experiment: str, release: Release) -> LoggedRun:
    """The run of `release`: the complete one where it exists, else a new one. A run that was cut short is deleted, never half-used."""
    experiment_id = ensure_experiment(client, service, experiment)
    for run in client.search_runs([experiment_id], f"tags.`{LOCK_TAG}` = '{release.key}'"):
        if run.data.tags.get(COMPLETE_TAG) == "true":
            return _logged(run)
        client.delete_run(run.info.run_id)
    return log_run(client, experiment_id, release)


def ensure_experiment(client: MlflowClient, service: Service, name: str) -> str:
    """Id of the experiment; creates it with the service's artifact root."""
    found = client.get_experiment_by_name(name)
    return found.experiment_id if found else client.create_experiment(name, artifact_location=service.artifact_root)


def log_run(client: MlflowClient, experiment_id: str, release: Release) -> LoggedRun:
    """Log everything about `release` in a new run; the last thing written is the mark that it is complete."""
    import mlflow

    tags = {**release.tags, **_dvc_tags()}
    with mlflow.start_run(experiment_id=experiment_id, run_name=f"{release.tags['bevj6.chip']}-{release.key[:10]}", tags=tags) as run:
        run_id = run.info.run_id
        mlflow.log_params(release.params)
        _log_metrics(client, run_id, release)
        _log_dataset(release)
        artifacts = log_files(client, run_id, release.files, {f"pipeline/{PATCH_NAME}": release.git.patch} if release.git.patch else {})
        model_uri, digest = log_int8_model(release.paths.int8_onnx, release.name, release.tags, {"precision": "int8"})
        for tag, value in ((MANIFEST_TAG, artifacts), (MODEL_URI_TAG, model_uri), (MODEL_HASH_TAG, digest), (COMPLETE_TAG, "true")):
            client.set_tag(run_id, tag, value)
    return LoggedRun(run_id, experiment_id, model_uri, digest, artifacts)


def _logged(run: Run) -> LoggedRun:
    tags = run.data.tags
    return LoggedRun(run.info.run_id, run.info.experiment_id, tags[MODEL_URI_TAG], tags[MODEL_HASH_TAG], tags[MANIFEST_TAG])


def _log_metrics(client: MlflowClient, run_id: str, release: Release) -> None:
    """Final metrics at step 0, curves at their own steps."""
    from mlflow.entities import Metric

    now_ms = int(time.time() * 1000)
    points = [Metric(name, value, now_ms, 0) for name, value in release.metrics.items()]
    points += [Metric(point.name, point.value, now_ms, point.step) for point in release.curves]
    for start in range(0, len(points), METRICS_PER_CALL):
        client.log_batch(run_id, metrics=points[start : start + METRICS_PER_CALL])


def _log_dataset(release: Release) -> None:
    """The data set as an input of the run, without reading it."""
    import mlflow
    from mlflow.data.code_dataset_source import CodeDatasetSource
    from mlflow.data.meta_dataset import MetaDataset

    data = release.data
    source = CodeDatasetSource({"dvc.source": data.source, "bevj6.data_fingerprint": data.fingerprint})
    dataset = MetaDataset(source, name=data.name, digest=data.fingerprint[:DIGEST_LENGTH])  # type: ignore[abstract]  # mlflow's own class, complete at run time
    mlflow.log_input(dataset, context="training")


def _dvc_tags() -> dict[str, str]:
    """Where DVC runs this inside an experiment: its name."""
    name = os.environ.get("DVC_EXP_NAME")
    return {"dvc.experiment": name} if name else {}
