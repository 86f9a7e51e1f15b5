"""Promotion and rollback of registered model versions: the evidence before, the aliases, the record after.

A version becomes champion when its gate has passed, when it is not worse than the champion on any rule of params.yaml that compares with the
champion, and when everything stored with it still has the bytes that were logged. A reason given with `--force` overrules the first two and is
recorded; the third is never overruled.
"""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.champion import Champion, registered_name, reports_numbers, write_champion
from pipeline.config import AGAINST_CHAMPION, Config
from pipeline.errors import BevError, DataError
from pipeline.gate import judge
from pipeline.lock import exclusive
from pipeline.paths import Paths
from pipeline.tracking import audit
from pipeline.tracking.artifacts import stored_files
from pipeline.tracking.audit import AliasChange
from pipeline.tracking.numbers import version_numbers
from pipeline.tracking.onnx_model import MODEL_HASH_TAG, verify_stored_model
from pipeline.tracking.registration import CANDIDATE
from pipeline.tracking.release import GATE_TAG, LOCK_TAG
from pipeline.tracking.service import find_service, mlflow_session

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHAMPION = "champion"
PREVIOUS = "previous"
PROMOTED_FROM_TAG = "bevj6.promoted_from"


class PromotionError(BevError):
    """The evidence does not allow this promotion, or there is nothing to roll back to."""


def promote(paths: Paths, config: Config, version: int | None = None, force_reason: str | None = None) -> AliasChange:
    """Make a version champion (default: the candidate); the champion until now becomes `previous`.

    Raises:
        PromotionError: something speaks against it and no reason was given, or the version is champion already.
        DataError: no such version, or something stored with it was changed.
        ServiceError: MLflow is away or refuses.
    """
    name = registered_name(config, config.j6.chip)
    with _registry(paths) as client:
        _mend(client, paths, name)
        target = find_version(client, name, CANDIDATE if version is None else version)
        champion = _alias(client, name, CHAMPION)
        if champion == int(target.version):
            raise PromotionError(f"{name} version {target.version}: is {CHAMPION} already")
        _verify_model(target)
        with stored_files(client, target) as folder:
            objections = _objections(client, config, target, champion, folder)
            numbers = version_numbers(folder)
        if objections and not force_reason:
            raise PromotionError("\n".join([f"{name} version {target.version} is not promoted (--force REASON overrules):", *objections]))
        change = _change("promote", target, champion, force_reason, tuple(objections))
        change = _make(client, paths, change)
    write_champion(paths, name, _as_champion(target, numbers))
    return change


def rollback(paths: Paths, config: Config, reason: str | None = None) -> AliasChange:
    """Make the `previous` version champion again; `previous` then is the champion before that, if any, so rollbacks can follow each other.

    Raises:
        PromotionError: there is no previous version.
        DataError: something stored with it was changed or is gone.
        ServiceError: MLflow is away or refuses.
    """
    name = registered_name(config, config.j6.chip)
    with _registry(paths) as client:
        mended = _mend(client, paths, name)
        champion, previous = _alias(client, name, CHAMPION), _alias(client, name, PREVIOUS)
        if previous is None and mended is None:
            raise PromotionError(f"{name}: no alias {PREVIOUS!r}, so there is nothing to roll back to")
        repeated = mended is not None and mended.action == "rollback"  # the same command once more, after it was cut short
        target = find_version(client, name, champion if repeated and champion is not None else PREVIOUS)
        _verify_model(target)
        with stored_files(client, target) as folder:
            numbers = version_numbers(folder)
        change = mended if repeated and mended is not None else _make(client, paths, _change("rollback", target, champion, reason))
    write_champion(paths, name, _as_champion(target, numbers))
    return change


def release_history(paths: Paths, config: Config) -> list[AliasChange]:
    """All changes of the champion that the registry knows, oldest first.

    Raises:
        DataError: the model is not registered.
        ServiceError: MLflow is away or refuses.
    """
    name = registered_name(config, config.j6.chip)
    with mlflow_session(find_service(paths.root)) as client:
        champion = _alias(client, name, CHAMPION)
        found = audit.history(client, name)
    last = next((change for change in reversed(found) if change.done), None)
    if champion is not None and (last is None or last.version != champion):
        # Someone used MLflow's page or client instead: it shows here until the next promotion or rollback.
        found.append(AliasChange("moved outside bevj6", name, champion, last.version if last else None, "unknown", None, "unknown", "unknown"))
    return found


def fetch_champion(paths: Paths, config: Config) -> Champion | None:
    """Bring release/champion.json in line with the registry. Returns the champion.

    Raises:
        DataError: something stored with it was changed.
        ServiceError: MLflow is away or refuses; the file stays as it is.
    """
    name = registered_name(config, config.j6.chip)
    with mlflow_session(find_service(paths.root)) as client:
        version = _champion(client, name)
        if version is None:
            champion = None
        else:
            with stored_files(client, version) as folder:
                champion = _as_champion(version, version_numbers(folder))
    write_champion(paths, name, champion)
    return champion


@contextmanager
def registered_files(paths: Paths, config: Config, version: int | str) -> Iterator[tuple[ModelVersion, Path]]:
    """A version (by number or alias) and a temporary folder with the files kept with it, checked, and with its model as model.onnx.

    Raises:
        DataError: no such version, or something stored with it was changed.
        ServiceError: MLflow is away or refuses.
    """
    import mlflow

    with mlflow_session(find_service(paths.root)) as client:
        target = find_version(client, registered_name(config, config.j6.chip), version)
        _verify_model(target)
        with stored_files(client, target) as folder, tempfile.TemporaryDirectory() as model:
            stored = Path(mlflow.artifacts.download_artifacts(f"models:/{target.name}/{target.version}", dst_path=model)) / "model.onnx"
            (folder / "model.onnx").write_bytes(stored.read_bytes())
            yield target, folder


def find_version(client: MlflowClient, name: str, version: int | str) -> ModelVersion:
    """A version by number, or by alias when `version` is text.

    Raises:
        DataError: there is none.
    """
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


@contextmanager
def _registry(paths: Paths) -> Iterator[MlflowClient]:
    """A client, for one change at a time in this checkout."""
    with exclusive(paths.root, "release"), mlflow_session(find_service(paths.root)) as client:
        yield client


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


def _champion(client: MlflowClient, name: str) -> ModelVersion | None:
    """The champion; None where there is none, or no such model yet."""
    try:
        number = _alias(client, name, CHAMPION)
    except DataError:
        return None
    return None if number is None else find_version(client, name, number)


def _verify_model(target: ModelVersion) -> None:
    digest = target.tags.get(MODEL_HASH_TAG)
    if digest is None:
        raise DataError(f"{target.name} version {target.version}: has no tag {MODEL_HASH_TAG}; it was not registered by this project")
    verify_stored_model(f"models:/{target.name}/{target.version}", digest)


def _objections(client: MlflowClient, config: Config, target: ModelVersion, champion: int | None, folder: Path) -> list[str]:
    """What speaks against a promotion, one line each: the gate, and the rules against today's champion, whoever that was when the gate was judged."""
    gate = target.tags.get(GATE_TAG, "unknown")
    lines = [] if gate == "passed" else [f"gate is {gate!r}, must be 'passed': see reports/gate.json of its run"]
    rules = [rule for rule in config.gate.rules if rule.relative_to == AGAINST_CHAMPION and rule.severity == "error"]
    if champion is None or not rules:
        return lines
    try:
        with stored_files(client, find_version(client, target.name, champion)) as files:
            against = reports_numbers(files / "reports")
    except DataError as error:
        return [*lines, f"the champion, version {champion}, cannot be compared with: {error}"]
    verdicts = judge(rules, folder / "reports", config.model.tasks, against)["rules"]
    return lines + [f"against the champion, version {champion}: {rule['name']}: {rule['reason']}" for rule in verdicts if rule["verdict"] == "failed"]


def _change(action: str, target: ModelVersion, replaced: int | None, reason: str | None, overruled: tuple[str, ...] = ()) -> AliasChange:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    gate = target.tags.get(GATE_TAG, "unknown")
    return AliasChange(action, target.name, int(target.version), replaced, gate, reason, getpass.getuser(), now, overruled=overruled)


def _make(client: MlflowClient, paths: Paths, change: AliasChange) -> AliasChange:
    """Move the aliases, with the record before and after, unless someone else has moved the champion since it was read.

    Raises:
        PromotionError: the alias has moved meanwhile; nothing was changed.
    """
    begun = audit.begin(client, change)
    if _alias(client, change.model, CHAMPION) != change.replaced:
        audit.withdraw(client, begun)
        raise PromotionError(f"{change.model}: alias {CHAMPION!r} was moved by someone else just now; look again")
    _tag_version(client, change)
    client.set_registered_model_alias(change.model, CHAMPION, str(change.version))
    return _complete(client, paths, begun)


def _mend(client: MlflowClient, paths: Paths, name: str) -> AliasChange | None:
    """Complete a change that was cut short after the champion had moved, and return it; forget one that was cut short before."""
    _alias(client, name, CHAMPION)  # says so when there is no such model
    changes = audit.history(client, name)
    if not changes or changes[-1].done:
        return None
    if _alias(client, name, CHAMPION) == changes[-1].version:
        return _complete(client, paths, changes[-1])
    audit.withdraw(client, changes[-1])
    return None


def _complete(client: MlflowClient, paths: Paths, change: AliasChange) -> AliasChange:
    """The second alias and the end of the record. `previous` is the champion until now; after a rollback the champion before the one restored."""
    if change.action == "promote":
        previous = None if change.replaced is None else str(change.replaced)
    else:
        previous = find_version(client, change.model, change.version).tags.get(PROMOTED_FROM_TAG)
    if previous:
        client.set_registered_model_alias(change.model, PREVIOUS, previous)
    elif PREVIOUS in client.get_registered_model(change.model).aliases:
        client.delete_registered_model_alias(change.model, PREVIOUS)
    return audit.finish(client, paths, change)


def _tag_version(client: MlflowClient, change: AliasChange) -> None:
    tags = {"promoted_at": change.at, "promoted_by": change.by, "promoted_reason": change.reason or ""}
    if change.action == "promote":
        tags["promoted_from"] = "" if change.replaced is None else str(change.replaced)
    for key, value in tags.items():
        client.set_model_version_tag(change.model, str(change.version), f"bevj6.{key}", value)


def _as_champion(version: ModelVersion, numbers: dict[str, dict[str, float]]) -> Champion:
    return Champion(int(version.version), version.tags[LOCK_TAG], numbers)
