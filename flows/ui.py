"""MLflow and Prefect in the browser, on loopback, over this project's own files: `make ui`, or `python -m flows.ui`.

Both servers run until Ctrl-C. Other ports: `make ui MLFLOW_PORT=5001 PREFECT_PORT=4201`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import BevError, ConfigError, ServiceError
from pipeline.telemetry import switch_off

HOST = "127.0.0.1"
START_LIMIT_S = 180.0
STOP_GRACE_S = 15.0


@dataclass(frozen=True)
class Server:
    """A server to start: its command, extra environment, the page people open, and the address that answers 200 once it is up."""

    name: str
    command: list[str]
    environment: dict[str, str]
    page: str
    health: str


def local_servers(root: Path, environment: Mapping[str, str]) -> tuple[Server, Server]:
    """MLflow over `<root>/mlflow.db`, and Prefect over the user's own Prefect database.

    Raises:
        ConfigError: MLFLOW_PORT or PREFECT_PORT is not a port number, or is taken.
    """
    mlflow_port, prefect_port = _port(environment, "MLFLOW_PORT", 5000), _port(environment, "PREFECT_PORT", 4200)
    python = sys.executable
    store = ["--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}", "--artifacts-destination", (root / "mlartifacts").as_uri()]
    address = ["--host", HOST, "--port"]
    mlflow = Server(
        "MLflow",
        [python, "-m", "mlflow", "server", *store, *address, str(mlflow_port), "--workers", "1"],
        {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # job workers take six times the memory and nothing here uses them
        f"http://{HOST}:{mlflow_port}",
        f"http://{HOST}:{mlflow_port}/health",
    )
    api = f"http://{HOST}:{prefect_port}/api"
    prefect = Server(
        "Prefect",
        [python, "-m", "prefect", "server", "start", *address, str(prefect_port)],
        {"PREFECT_API_URL": api},  # on a port other than 4200 the page asks the wrong address without it
        f"http://{HOST}:{prefect_port}",
        f"{api}/health",
    )
    return mlflow, prefect


def serve(servers: tuple[Server, ...], root: Path) -> None:
    """Start the servers, print their addresses once they answer, wait for Ctrl-C or SIGTERM, stop them.

    Raises:
        ServiceError: a server did not start, or ended by itself.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    children: list[subprocess.Popen[bytes]] = []
    log_dir = root / ".services"
    log_dir.mkdir(exist_ok=True)
    try:
        for server in servers:
            with (log_dir / f"{server.name.lower()}.log").open("wb") as log:
                environment = {**os.environ, **server.environment}
                # Own group: Ctrl-C reaches this process only, which then stops both in order.
                children.append(
                    subprocess.Popen(server.command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )
        for server, child in zip(servers, children, strict=True):
            _wait_until_up(server, child, log_dir)
            print(f"{server.name:8s} {server.page}", flush=True)
        print("Ctrl-C stops both. Other ports: make ui MLFLOW_PORT=5001 PREFECT_PORT=4201", flush=True)
        _watch(servers, children, log_dir)
    except KeyboardInterrupt:
        print("stopping", flush=True)
    finally:
        for child in children:
            _stop(child)


def _port(environment: Mapping[str, str], variable: str, default: int) -> int:
    text = environment.get(variable, str(default))
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ConfigError(f"{variable} = {text!r}: must be a port number, 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, int(text)))
        except OSError as error:
            problem = f"cannot listen on {HOST}:{text} ({error.strerror})"
            raise ConfigError(f"{variable} = {text}: {problem}. Choose another: make ui {variable}=...") from None
    return int(text)


def _wait_until_up(server: Server, child: subprocess.Popen[bytes], log_dir: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not _answers(server.health):
        if child.poll() is not None:
            raise ServiceError(f"{server.name}: ended with status {child.returncode} while starting; see {log_dir}/{server.name.lower()}.log")
        if time.monotonic() > deadline:
            raise ServiceError(f"{server.name}: no answer at {server.health} within {START_LIMIT_S:.0f} s; see {log_dir}/{server.name.lower()}.log")
        time.sleep(0.3)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _watch(servers: tuple[Server, ...], children: list[subprocess.Popen[bytes]], log_dir: Path) -> None:
    """Return never, unless a server ends."""
    while True:
        for server, child in zip(servers, children, strict=True):
            if child.poll() is not None:
                raise ServiceError(f"{server.name}: ended with status {child.returncode}; see {log_dir}/{server.name.lower()}.log")
        time.sleep(0.5)


def _stop(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(STOP_GRACE_S)
    except ProcessLookupError:
        child.wait()
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Serve the project in the current directory. Returns 0 after Ctrl-C, 1 after printing why a server is not there."""
    switch_off()
    root = Path.cwd()
    try:
        serve(local_servers(root, os.environ), root)
    except BevError as error:
        print(f"ui: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
