"""What is worth another try: a lock that was held or a service that was away, never bad data or a defect. And Prefect itself being away."""

from __future__ import annotations

from typing import Any

import httpx
from prefect import State
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import get_current_settings

from flows.dvc_dag import StageInterruptedError
from pipeline.errors import ServiceError

DELAYS_S: list[float] = [10, 60]


def is_outside_cause(_task: Any, _task_run: Any, state: State[Any]) -> bool:
    """Whether a failed task is worth another try."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageInterruptedError | ServiceError)


def prefect_away(error: Exception) -> str | None:
    """What to say when `error` means that the Prefect server cannot be reached or fails; None where it means something else."""
    lost = isinstance(error, httpx.TransportError | PrefectHTTPStatusError) or "Failed to reach API" in str(error)
    if not lost:
        return None
    address = get_current_settings().api.url or "the temporary server of this flow"
    advice = "Stages that have finished are kept: run the flow again, or go on without Prefect with `dvc repro` and `bevj6 register`"
    return f"Prefect at {address} (PREFECT_API_URL): {str(error).splitlines()[0] if str(error) else type(error).__name__}. {advice}"


# For `@task(**RETRY)`.
RETRY: dict[str, Any] = {"retries": len(DELAYS_S), "retry_delay_seconds": DELAYS_S, "retry_condition_fn": is_outside_cause}
