"""From files to a registered model version: idempotent, keyed by dvc.lock. `bevj6 register` and the last step of the retrain flow."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.io import sha256_file
from pipeline.lock import exclusive
from pipeline.paths import Paths
from pipeline.tracking import outbox
from pipeline.tracking.artifacts import MANIFEST_TAG, RUN_TAG, log_files
from pipeline.tracking.onnx_model import MODEL_HASH_TAG
from pipeline.tracking.release import GATE_TAG, LOCK_TAG, PATCH_NAME, Release, read_release
from pipeline.tracking.runs import LoggedRun, ensure_run
from pipeline.tracking.service import Service, find_service, mlflow_session

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CANDIDATE = "candidate"
ANNOUNCED_TAG = "bevj6.announced"  # the version has been given the alias `candidate` once
VERDICT_TAG = "bevj6.gate_sha256"  # of reports/gate.json


@dataclass(frozen=True)
class Registration:
    """A model version and the run behind it; `created` is False when both were there already. `sent`: versions that had waited for the server."""

    name: str
    version: int
    run_id: str
    run_url: str
    report_url: str
    gate: str
    created: bool
    sent: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def register_release(paths: Paths, config: Config) -> Registration:
    """Log the working tree's pipeline version in MLflow and register its INT8 model with the alias `candidate`. Does nothing the second time.

    Versions in the outbox, whose server was away when they were made, go first.

    Raises:
        DataError, ModelError: a file is missing, malformed or not the one in dvc.lock.
        ServiceError: MLflow is away or refuses.
    """
    release = read_release(paths, config)
    service = find_service(paths.root)
    with exclusive(paths.root, "register"), mlflow_session(service) as client:
        sent = []
        for parked in outbox.waiting(paths, config):
            if parked.release.key != release.key:
                sent.append(_register(client, service, config, parked.release).version)
            parked.remove()
        return replace(_register(client, service, config, release), sent=tuple(sent))


def _register(client: MlflowClient, service: Service, config: Config, release: Release) -> Registration:
    run = ensure_run(client, service, config.tracking.experiment, release)
    version, created = ensure_version(client, release, run)
    report = service.artifact_url(run.run_id, "reports/release.html")
    url = service.run_url(run.experiment_id, run.run_id)
    return Registration(release.name, int(version.version), run.run_id, url, report, release.tags[GATE_TAG], created)


def ensure_version(client: MlflowClient, release: Release, run: LoggedRun) -> tuple[ModelVersion, bool]:
    """The model version of `release`, and whether it was created now.

    The alias `candidate` moves only to a version that is new (or that was cut off before it got the alias): one that people moved stays where it is.
    A version that was judged anew gets the new verdict.
    """
    import mlflow

    found = list(client.search_model_versions(f"name = '{release.name}' and tags.`{LOCK_TAG}` = '{release.key}'"))
    verdict = sha256_file(release.paths.report("gate.json"))
    if found:
        version = found[0]
        if version.tags.get(VERDICT_TAG) != verdict:
            _judge_anew(client, version, release, verdict)
    else:
        origin = {MODEL_HASH_TAG: run.model_sha256, MANIFEST_TAG: run.artifacts_sha256, RUN_TAG: run.run_id, VERDICT_TAG: verdict}
        version = mlflow.register_model(run.model_uri, release.name, tags={**release.tags, **origin})
    if version.tags.get(ANNOUNCED_TAG) != "true":
        client.set_registered_model_alias(release.name, CANDIDATE, str(version.version))
        client.set_model_version_tag(release.name, str(version.version), ANNOUNCED_TAG, "true")
    return version, not found


def _judge_anew(client: MlflowClient, version: ModelVersion, release: Release, verdict: str) -> None:
    """Put the new verdict in the place of the old one. Cut short, the hashes do not fit: no promotion until the next registration has mended it."""
    run_id, patch = version.tags[RUN_TAG], f"pipeline/{PATCH_NAME}"
    texts = {}
    if any(file.path == patch for file in client.list_artifacts(run_id, "pipeline")):  # what the files were made from stays as it is
        with tempfile.TemporaryDirectory() as folder:
            texts[patch] = Path(client.download_artifacts(run_id, patch, folder)).read_text(encoding="utf-8", errors="surrogateescape")
    manifest = log_files(client, run_id, release.files, texts)
    for tag, value in ((MANIFEST_TAG, manifest), (GATE_TAG, release.tags[GATE_TAG]), (VERDICT_TAG, verdict)):
        client.set_tag(run_id, tag, value)
        client.set_model_version_tag(version.name, version.version, tag, value)
