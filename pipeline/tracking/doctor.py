"""What this installation can reach: `bevj6 doctor`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config import load_config
from pipeline.errors import BevError
from pipeline.paths import Paths
from pipeline.tracking.outbox import parked_folders
from pipeline.tracking.service import check_reachable, find_service

MIN_FREE_BYTES = 5e9  # the default run writes about 1 GB, the environment is installed already


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `ok` None: not configured, which is no fault."""

    name: str
    ok: bool | None
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def examine(root: Path) -> list[Check]:
    """All checks, in the order in which a fault would matter. Never raises for a fault it looks for."""
    checks: list[tuple[str, Callable[[], str | None]]] = [
        ("python", _python),
        ("params.yaml", lambda: _params(root)),
        ("disk", lambda: _disk(root)),
        ("git", lambda: _command(root, "git", "rev-parse", "--short", "HEAD")),
        ("dvc", lambda: _command(root, sys.executable, "-m", "dvc", "root")),
        ("dvc remote", lambda: _command(root, sys.executable, "-m", "dvc", "remote", "list")),
        ("mlflow", lambda: _mlflow(root)),
        ("s3 (MLFLOW_S3_ENDPOINT_URL)", lambda: _address("MLFLOW_S3_ENDPOINT_URL", "")),
        ("prefect (PREFECT_API_URL)", lambda: _address("PREFECT_API_URL", "/health")),
        ("dask (execution.dask_address)", lambda: _dask(root)),
        ("outbox", lambda: _outbox(root)),
    ]
    return [_check(name, look) for name, look in checks]


def _check(name: str, look: Callable[[], str | None]) -> Check:
    try:
        detail = look()
    except BevError as error:
        return Check(name, False, str(error))
    return Check(name, None, "not configured") if detail is None else Check(name, True, detail)


def _python() -> str:
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        raise BevError(f"Python {sys.version.split()[0]}: 3.11 or 3.12 is needed")
    return sys.version.split()[0]


def _params(root: Path) -> str:
    config = load_config(root / "params.yaml")
    return f"valid; source {config.dataset.source}, chip {config.j6.chip}"


def _disk(root: Path) -> str:
    free = shutil.disk_usage(root).free
    if free < MIN_FREE_BYTES:
        raise BevError(f"{free / 1e9:.1f} GB free in {root}: at least {MIN_FREE_BYTES / 1e9:.0f} GB are needed")
    return f"{free / 1e9:.0f} GB free"


def _command(root: Path, *command: str) -> str | None:
    """First line of a command's output; None where it prints nothing."""
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=60)
    except FileNotFoundError:
        raise BevError(f"{command[0]}: not installed") from None
    except subprocess.CalledProcessError as error:
        raise BevError((error.stderr.strip() or f"ended with status {error.returncode}").splitlines()[-1]) from None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _mlflow(root: Path) -> str:
    uri = find_service(root).uri
    if not uri.startswith("http"):
        return f"{uri} (embedded; set MLFLOW_TRACKING_URI for a server)"
    check_reachable(uri, "MLflow (MLFLOW_TRACKING_URI)")
    return _get(f"{uri.rstrip('/')}/health")


def _dask(root: Path) -> str | None:
    address = load_config(root / "params.yaml").execution.dask_address
    if address is None:
        return None
    check_reachable(address, "Dask scheduler (execution.dask_address)")
    return f"{address} answers"


def _outbox(root: Path) -> str:
    """Versions that could not be sent yet: no fault, but somebody should know."""
    count = len(parked_folders(Paths(root)))
    return f"{count} versions wait for MLflow; `bevj6 register` sends them" if count else "empty"


def _address(variable: str, health: str) -> str | None:
    uri = os.environ.get(variable)
    if not uri:
        return None
    check_reachable(uri, variable)
    return _get(f"{uri.rstrip('/')}{health}") if health else f"{uri} answers"


def _get(address: str) -> str:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return f"{address} answers {answer.status}"
    except urllib.error.HTTPError as error:
        raise BevError(f"{address}: answers {error.code} ({error.read(200).decode(errors='replace').strip()})") from None
    except OSError as error:
        raise BevError(f"{address}: {error}") from None
