"""Retraining: bring every DVC stage up to date, one Prefect task each, then register the result in MLflow.

    python -m flows.retrain [--mode stages|single] [--no-register] [ROOT]

Without PREFECT_API_URL a temporary server runs for the length of the flow. A flow run on an unchanged project runs no stage and makes no second model
version; one that failed or was killed goes on, the next time, at the first stage that is out of date.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from prefect import State, Task, flow, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.states import Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.dvc_dag import StageInterruptedError, StageOutcome, read_dag, reproduce_all, reproduce_stage, stop_running
from flows.summary import stage_table
from pipeline.config import load_config
from pipeline.errors import BevError, ServiceError
from pipeline.paths import Paths
from pipeline.tracking.registration import Registration, register_release

Mode = Literal["stages", "single"]
PARALLEL_STAGES = 2  # threads that wait for DVC; independent stages (evaluate beside export) overlap, and each uses all cores by itself
STAGE_RUNNER: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=PARALLEL_STAGES)
RETRY_DELAYS_S: list[float] = [10, 60]


def is_outside_cause(_task: Any, _task_run: Any, state: State[Any]) -> bool:
    """Whether a failed task is worth another try: a lock that was held or a service that was away, never bad data or a defect."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageInterruptedError | ServiceError)


# DVC decides what is up to date, so Prefect must not cache on its own.
@task(cache_policy=NO_CACHE, retries=len(RETRY_DELAYS_S), retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=is_outside_cause)
def run_stage(root: Path, name: str) -> Any:
    """One DVC stage. Returns a `StageOutcome` in a state that is called what DVC did: Completed, Unchanged or Restored."""
    outcome = reproduce_stage(root, name, get_run_logger().info)
    return Completed(name=outcome.result, message=f"{outcome.seconds:.1f} s", data=outcome)


@task(name="dvc repro", cache_policy=NO_CACHE, retries=len(RETRY_DELAYS_S), retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=is_outside_cause)
def run_all(root: Path) -> tuple[StageOutcome, ...]:
    """The whole pipeline in one task."""
    return reproduce_all(root, get_run_logger().info)


@task(name="register", cache_policy=NO_CACHE, retries=len(RETRY_DELAYS_S), retry_delay_seconds=RETRY_DELAYS_S, retry_condition_fn=is_outside_cause)
def register(root: Path) -> Registration:
    """The MLflow run and model version of what dvc.lock describes."""
    paths = Paths(root)
    registration = register_release(paths, load_config(paths.params))
    what = "registered" if registration.created else "already registered"
    get_run_logger().info(f"{registration.name} version {registration.version}: {what}, gate {registration.gate}; {registration.run_url}")
    create_link_artifact(registration.run_url, link_text=f"MLflow run of {registration.name} version {registration.version}", key="mlflow-run")
    return registration


@flow(name="retrain", task_runner=STAGE_RUNNER)
def retrain(root: str | None = None, mode: Mode = "stages", register_model: bool = True) -> Registration | None:
    """Run the DVC pipeline and register its result.

    Args:
        root: directory of dvc.yaml; the current directory where it is not given.
        mode: "stages": one task per stage; "single": one `dvc repro`.
        register_model: whether to log and register the result in MLflow.

    Raises:
        BevError: a stage failed; the message names each one that did.
    """
    project = Path(root or Path.cwd()).resolve()
    try:
        if mode == "single":
            show_stages([(outcome.name, outcome.result, outcome.seconds) for outcome in run_all(project)])
        else:
            run_stages(project)
        return register(project) if register_model else None
    finally:
        stop_running()  # a cancelled flow leaves no stage behind; a finished one has none


def run_stages(root: Path) -> None:
    """Submit every stage after the ones it depends on, wait for all, show one line each.

    Raises:
        BevError: at least one stage failed; stages that do not depend on it have run.
    """
    futures: dict[str, PrefectFuture[Any]] = {}
    for node in read_dag(root):
        upstream = [futures[name] for name in node.upstream]
        stage: Task[..., Any] = run_stage.with_options(name=node.name)
        futures[node.name] = stage.submit(root, node.name, wait_for=upstream)
    wait(list(futures.values()))
    show_stages([_line(name, future.state) for name, future in futures.items()])
    failed = [str(future.state.result(raise_on_failure=False)) for future in futures.values() if future.state.is_failed()]
    if failed:
        raise BevError("\n".join(failed))


def show_stages(lines: list[tuple[str, str, float | None]]) -> None:
    """One line per stage (name, what happened, seconds) as an artifact of the flow run and in its log."""
    table = stage_table(lines)
    create_markdown_artifact(table, key="dvc-stages", description="What DVC did with each stage")
    get_run_logger().info("\n" + table)


def _line(name: str, state: State[Any]) -> tuple[str, str, float | None]:
    seconds = state.result().seconds if state.is_completed() else None  # failed, or never ready because an earlier stage failed
    return name, state.name or state.type.value, seconds


def main(argv: list[str] | None = None) -> int:
    """Run the flow once, in this process. Returns 0, or 1 after printing what failed."""
    parser = argparse.ArgumentParser(prog="python -m flows.retrain", description="Bring the pipeline up to date and register its model.")
    parser.add_argument("root", nargs="?", help="directory of dvc.yaml (default: the current one)")
    parser.add_argument("--mode", choices=("stages", "single"), default="stages", help="one task per stage, or one `dvc repro`")
    parser.add_argument("--no-register", action="store_true", help="do not log and register the result in MLflow")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    try:
        retrain(options.root, options.mode, not options.no_register)
    except BevError as error:
        print(f"retrain: error: {error}", file=sys.stderr)
        return 1
    return 0


def _end(signal_number: int, _frame: FrameType | None) -> None:
    """Leave through the flow's `finally`, which ends the running stages; 128 + signal is the shell's status for that."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main())
