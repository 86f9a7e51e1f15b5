"""One MLflow database for all tests of tracking; tests that change the registry use a registered model of their own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.config import Config, load_config
from pipeline.paths import Paths
from pipeline.tracking.registration import Registration, register_release
from pipeline.tracking.service import Service, find_service


@dataclass(frozen=True)
class Registered:
    """The sample project after `register_release`, in its own SQLite database."""

    paths: Paths
    config: Config
    registration: Registration
    service: Service


@pytest.fixture(scope="session")
def registered(built_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Registered:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        project = Path(shutil.copytree(built_project, tmp_path_factory.mktemp("registered") / "project", symlinks=True))
        paths, config = Paths(project), load_config(project / "params.yaml")
        return Registered(paths, config, register_release(paths, config), find_service(project))


@pytest.fixture
def tracked_copy(registered: Registered, built_copy: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[Paths, Config]:
    """A private working tree whose MLflow is the session's database, with a registered model named after the test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", registered.service.uri)
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    config = load_config(built_copy / "params.yaml", {"tracking": {"registered_model": name, "experiment": name}})
    return Paths(built_copy), config
