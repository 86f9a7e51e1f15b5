"""Prefect flows: when and where the DVC stages run. They hold no second implementation of a stage."""

import logging
import os

import pipeline  # noqa: F401  (switches telemetry off before prefect is imported)
from pipeline.errors import BevError

# A flow without PREFECT_API_URL starts a temporary server; Prefect's default limit of 20 s is too short on a busy machine.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")


def _without_traceback(record: logging.LogRecord) -> bool:
    """Prefect logs a traceback of every error. That of a `BevError` says nothing: its message names file, field, value and rule."""
    if record.exc_info and isinstance(record.exc_info[1], BevError):
        record.exc_info = None
    return True


for _name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(_without_traceback)
