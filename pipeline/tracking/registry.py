"""Promotion and rollback of registered model versions, with evidence before and a record after.

MLflow keeps no history of its aliases. Every change made here is therefore written twice: as tags of the model version and as one JSON line in
release_log.jsonl, which belongs in git.
"""

from __future__ import annotations

import getpass
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.errors import BevError, DataError
from pipeline.paths import Paths
from pipeline.tracking.onnx_model import MODEL_HASH_TAG, verify_stored_model
from pipeline.tracking.registration import CANDIDATE
from pipeline.tracking.release import registered_name
from pipeline.tracking.service import find_service, mlflow_session

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
PREVIOUS = "previous"
PROMOTED_FROM_TAG = "bevj6.promoted_from"
LOG_NAME = "release_log.jsonl"


class PromotionError(BevError):
    """The evidence does not allow this promotion, or there is nothing to roll back to."""


@dataclass(frozen=True)
class AliasChange:
    """One line of the release log. `replaced`: the version that was champion before, None at first."""

    action: str
    model: str
    version: int
    replaced: int | None
    gate: str
    reason: str | None
    by: str
    at: str

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and the log."""
        return asdict(self)


def promote(paths: Paths, config: Config, version: int | None = None, force_reason: str | None = None) -> AliasChange:
    """Make a version champion (default: the candidate); the champion until now becomes `previous`.

    The gate may be overruled with `force_reason`, which is recorded. A stored model whose bytes are not those that were logged is never promoted.

    Raises:
        PromotionError: the gate has not passed and no reason was given, or the version is champion already.
        DataError: no such version, or its stored model was changed.
        ServiceError: MLflow is away or refuses.
    """
    name = registered_name(config, config.j6.chip)
    with mlflow_session(find_service(paths.root)) as client:
        target = _find_version(client, name, CANDIDATE if version is None else version)
        champion = _alias(client, name, CHAMPION)
        if champion == int(target.version):
            raise PromotionError(f"{name} version {target.version}: is {CHAMPION} already")
        gate = target.tags.get("bevj6.gate", "unknown")
        if gate != "passed" and not force_reason:
            hint = "See reports/gate.json of its run; --force REASON overrules"
            raise PromotionError(f"{name} version {target.version}: gate is {gate!r}, must be 'passed'. {hint}")
        _verify(target)
        change = _change("promote", target, champion, force_reason)
        _move_champion(client, change)
        if champion is not None:
            client.set_registered_model_alias(name, PREVIOUS, str(champion))
    _record(paths, change)
    return change


def rollback(paths: Paths, config: Config, reason: str | None = None) -> AliasChange:
    """Make the `previous` version champion again; `previous` then is the champion before that, if any, so rollbacks can follow each other.

    Raises:
        PromotionError: there is no previous version.
        DataError: its stored model was changed or is gone.
        ServiceError: MLflow is away or refuses.
    """
    name = registered_name(config, config.j6.chip)
    with mlflow_session(find_service(paths.root)) as client:
        if _alias(client, name, PREVIOUS) is None:
            raise PromotionError(f"{name}: no alias {PREVIOUS!r}, so there is nothing to roll back to")
        target = _find_version(client, name, PREVIOUS)
        _verify(target)
        change = _change("rollback", target, _alias(client, name, CHAMPION), reason)
        _move_champion(client, change)
        earlier = target.tags.get(PROMOTED_FROM_TAG)
        if earlier:
            client.set_registered_model_alias(name, PREVIOUS, earlier)
        else:
            client.delete_registered_model_alias(name, PREVIOUS)
    _record(paths, change)
    return change


def read_release_log(paths: Paths) -> list[dict[str, Any]]:
    """Entries of the release log, oldest first; empty where there is none yet."""
    log = paths.root / LOG_NAME
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []


def _find_version(client: MlflowClient, name: str, version: int | str) -> ModelVersion:
    """A version by number, or by alias when `version` is text."""
    from mlflow.exceptions import MlflowException

    try:
        if isinstance(version, str):
            return client.get_model_version_by_alias(name, version)
        return client.get_model_version(name, str(version))
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        what = f"alias {version!r}" if isinstance(version, str) else f"version {version}"
        raise DataError(f"{name}: {what} not found in the registry. `bevj6 register` makes a candidate") from None


def _alias(client: MlflowClient, name: str, alias: str) -> int | None:
    """Version that holds an alias."""
    from mlflow.exceptions import MlflowException

    try:
        aliases = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise DataError(f"{name}: not in the registry. `bevj6 register` makes a candidate") from None
    return int(aliases[alias]) if alias in aliases else None


def _verify(target: ModelVersion) -> None:
    digest = target.tags.get(MODEL_HASH_TAG)
    if digest is None:
        raise DataError(f"{target.name} version {target.version}: has no tag {MODEL_HASH_TAG}; it was not registered by this project")
    verify_stored_model(f"models:/{target.name}/{target.version}", digest)


def _change(action: str, target: ModelVersion, replaced: int | None, reason: str | None) -> AliasChange:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    gate = target.tags.get("bevj6.gate", "unknown")
    return AliasChange(action, target.name, int(target.version), replaced, gate, reason, getpass.getuser(), now)


def _move_champion(client: MlflowClient, change: AliasChange) -> None:
    """Tag the version, then set the alias, unless someone else has moved it since it was read.

    Raises:
        PromotionError: the alias has moved meanwhile; nothing was changed.
    """
    if _alias(client, change.model, CHAMPION) != change.replaced:
        raise PromotionError(f"{change.model}: alias {CHAMPION!r} was moved by someone else just now; look again")
    tags = {"promoted_at": change.at, "promoted_by": change.by, "promoted_reason": change.reason or ""}
    if change.action == "promote":
        tags["promoted_from"] = "" if change.replaced is None else str(change.replaced)
    for key, value in tags.items():
        client.set_model_version_tag(change.model, str(change.version), f"bevj6.{key}", value)
    client.set_registered_model_alias(change.model, CHAMPION, str(change.version))


def _record(paths: Paths, change: AliasChange) -> None:
    with (paths.root / LOG_NAME).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(change.as_dict(), sort_keys=True) + "\n")
