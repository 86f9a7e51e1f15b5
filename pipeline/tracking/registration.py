"""From files to a registered model version: idempotent, keyed by dvc.lock. `bevj6 register` and the last step of the retrain flow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.paths import Paths
from pipeline.tracking.onnx_model import MODEL_HASH_TAG
from pipeline.tracking.release import LOCK_TAG, Release, read_release
from pipeline.tracking.runs import LoggedRun, ensure_run
from pipeline.tracking.service import find_service, mlflow_session

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CANDIDATE = "candidate"


@dataclass(frozen=True)
class Registration:
    """A model version and the run behind it; `created` is False when both were there already."""

    name: str
    version: int
    run_id: str
    run_url: str
    gate: str
    created: bool

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def register_release(paths: Paths, config: Config) -> Registration:
    """Log the working tree's pipeline version in MLflow and register its INT8 model with the alias `candidate`. Does nothing the second time.

    Raises:
        DataError, ModelError: a file is missing, malformed or not the one in dvc.lock.
        ServiceError: MLflow is away or refuses.
    """
    release = read_release(paths, config)
    service = find_service(paths.root)
    with mlflow_session(service) as client:
        run = ensure_run(client, service, config.tracking.experiment, release)
        version, created = ensure_version(client, release, run)
    url = service.run_url(run.experiment_id, run.run_id)
    return Registration(release.name, int(version.version), run.run_id, url, release.tags["bevj6.gate"], created)


def ensure_version(client: MlflowClient, release: Release, run: LoggedRun) -> tuple[ModelVersion, bool]:
    """The model version of `release`, and whether it was created now.

    The alias `candidate` moves only to a version that is new (or that was cut off before it got the alias): one that people moved stays where it is.
    """
    import mlflow

    found = list(client.search_model_versions(f"name = '{release.name}' and tags.`{LOCK_TAG}` = '{release.key}'"))
    created = not found
    tags = {**release.tags, MODEL_HASH_TAG: run.model_sha256}
    version = found[0] if found else mlflow.register_model(run.model_uri, release.name, tags=tags)
    if created or CANDIDATE not in client.get_registered_model(release.name).aliases:
        client.set_registered_model_alias(release.name, CANDIDATE, str(version.version))
    return version, created
