"""Prefect flows: when and where the DVC stages run. They hold no second implementation of a stage."""

import os

import pipeline  # noqa: F401  (switches telemetry off before prefect is imported)

# A flow without PREFECT_API_URL starts a temporary server; Prefect's default limit of 20 s is too short on a busy machine.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
