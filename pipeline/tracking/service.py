"""The way to MLflow: which address, is it there, and how its failures become `ServiceError`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from pipeline.errors import ServiceError

if TYPE_CHECKING:
    from mlflow import MlflowClient

CONNECT_TIMEOUT_S = 5.0
LOCAL_UI = "http://127.0.0.1:5000"  # where `make ui` serves the local database

# MLflow by itself tries for minutes before it says that a server is away; retrying is the flow's work, which also shows it.
CLIENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout belongs to the one JSON document of `bevj6 --json`
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
DISK_FULL = ("database or disk is full", "disk I/O error", "No space left on device", "File too large")
UNREACHABLE = ("Max retries exceeded", "Connection refused", "timed out", "Connection aborted", "unable to open database", "could not connect")


@dataclass(frozen=True)
class Service:
    """An MLflow tracking server and registry, or the SQLite file that stands in for one."""

    uri: str
    artifact_root: str | None  # where a new experiment keeps its files; None: the server decides

    def run_url(self, experiment_id: str, run_id: str) -> str:
        """Address of a run in the web page."""
        base = self.uri if self.uri.startswith("http") else LOCAL_UI
        return f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"

    def artifact_url(self, run_id: str, relative: str) -> str:
        """Address of a file kept with a run, for a browser."""
        base = self.uri if self.uri.startswith("http") else LOCAL_UI
        return f"{base.rstrip('/')}/get-artifact?{urlencode({'path': relative, 'run_uuid': run_id})}"


def find_service(root: Path) -> Service:
    """MLFLOW_TRACKING_URI where it is set, else `<root>/mlflow.db` (absolute: DVC experiments run elsewhere). A server decides where files go;
    with a database that is opened directly they go to `<root>/mlartifacts`.
    """
    root = root.resolve()
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"
    return Service(uri, None if uri.startswith("http") else (root / "mlartifacts").as_uri())


def check_reachable(uri: str, service: str) -> None:
    """Open and close a connection to an http or Dask address; other kinds are left to their client.

    Raises:
        ServiceError: naming the address and the variable that holds it.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https", "tcp", "tls"):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ServiceError(f"{service} at {uri}: cannot connect ({error}). Start it (`make ui` on this machine) or correct the address") from error


ADDRESS_VARIABLES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")


@contextmanager
def mlflow_session(service: Service) -> Iterator[MlflowClient]:
    """A client for `service`, with the module-level functions of mlflow set to it as well.

    Raises:
        ServiceError: from the start or from within the block, when the server is away, refuses this host name or has an internal error.
    """
    check_reachable(service.uri, "MLflow (MLFLOW_TRACKING_URI)")
    for name, value in CLIENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    import mlflow
    from mlflow.exceptions import MlflowException

    _quieten()
    # mlflow hands the addresses on to child processes through the environment; left there, they would redirect the next project of this process.
    outside = {name: os.environ.get(name) for name in ADDRESS_VARIABLES}
    mlflow.set_tracking_uri(service.uri)
    mlflow.set_registry_uri(service.uri)
    try:
        yield mlflow.MlflowClient(service.uri, service.uri)
    except MlflowException as error:
        raise _service_error(service, error) from error
    except OSError as error:  # requests' errors are OSErrors; a local database's disk can be full
        raise ServiceError(f"MLflow at {service.uri}: {error}") from error
    finally:
        for name, address in outside.items():
            os.environ.pop(name, None)
            if address is not None:
                os.environ[name] = address


def _service_error(service: Service, error: Exception) -> Exception:
    """A `ServiceError` where the server is the cause, else the error itself (a defect of this program)."""
    text = str(error)
    status: Any = getattr(error, "get_http_status_code", lambda: None)()
    if "DNS rebinding" in text or "Invalid Host header" in text:
        hint = "The server was started without this host name in --allowed-hosts"
    elif any(sign in text for sign in UNREACHABLE):
        hint = "The server is away"
    elif any(sign in text for sign in DISK_FULL):
        hint = "The disk is full; what was written so far does not count, register again when there is room"
    elif status in (401, 403):
        hint = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or ask for the permission"
    elif service.uri.startswith("http") and isinstance(status, int) and status >= 500:
        hint = "The server has an internal error; see its log"
    else:
        return error
    return ServiceError(f"MLflow at {service.uri}: {text.splitlines()[0][:300]}. {hint}")


def _quieten() -> None:
    """Only warnings: not the dozens of lines of a database's first creation, nor what becomes our own message."""
    import logging

    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it logs a traceback of what it raises as well
