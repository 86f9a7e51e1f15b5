"""One MLflow server and one Prefect server for all flow tests: `python -m flows.ui`, the command behind `make ui`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

START_LIMIT_S = 180.0


@dataclass(frozen=True)
class Servers:
    """Addresses, and the environment in which commands use these servers and no state of the user's."""

    mlflow: str
    prefect_api: str
    environment: dict[str, str]
    printed: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("servers")
    ports = {"MLFLOW_PORT": str(free_port()), "PREFECT_PORT": str(free_port())}
    environment = os.environ | ports | {"PREFECT_HOME": str(folder / "prefect"), "PYTHONPATH": str(project_root)}
    log = folder / "ui.log"
    with log.open("w") as stream:
        ui = subprocess.Popen([sys.executable, "-m", "flows.ui"], cwd=folder, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while "Ctrl-C" not in log.read_text():
            assert ui.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        mlflow, prefect_api = (f"http://127.0.0.1:{ports['MLFLOW_PORT']}", f"http://127.0.0.1:{ports['PREFECT_PORT']}/api")
        yield Servers(mlflow, prefect_api, environment | {"MLFLOW_TRACKING_URI": mlflow, "PREFECT_API_URL": prefect_api}, log.read_text())
    finally:
        ui.send_signal(signal.SIGINT)
        assert ui.wait(60) == 0
    for port in ports.values():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(port))) != 0, "a server outlived `flows.ui`"
