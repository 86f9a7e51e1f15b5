"""Usage statistics of the tools underneath are off, in this process and in the processes it starts.

`switch_off` runs when `pipeline` or `flows` is imported, before any of those tools can be. A value the user has set is kept. Tools that are started
by hand are covered by prefect.toml, .dvc/config and the Makefile, compose file and .env.example; a test compares them with this table.
"""

from __future__ import annotations

import os

OFF: dict[str, str] = {
    "DO_NOT_TRACK": "true",
    "DVC_NO_ANALYTICS": "true",
    "GX_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}


def switch_off() -> None:
    """Set the variables of `OFF` that the environment does not hold yet."""
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
