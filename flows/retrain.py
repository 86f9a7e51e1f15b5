"""Retraining: bring every DVC stage up to date, one Prefect task each, then register the result in MLflow.

    python -m flows.retrain [--mode stages|single] [--no-register] [--only-new-data] [ROOT]

Without PREFECT_API_URL a temporary server runs for the length of the flow. A flow run on an unchanged project runs no stage and makes no second model
version; one that failed or was killed goes on, the next time, at the first stage that is out of date. Two runs in one working tree, however they were
started, run one after the other. Where MLflow is away the result is kept and sent by the next run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from prefect import State, Task, flow, task
from prefect.artifacts import create_image_artifact, create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, wait
from prefect.logging import get_run_logger
from prefect.settings import get_current_settings
from prefect.states import Completed
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from flows.dvc_dag import StageOutcome, is_unfinished, is_up_to_date, read_dag, reproduce_all, reproduce_stage, stop_running
from flows.pages import checklist_rows, gate_rows, metric_rows, stage_table
from flows.pictures import stage_pictures
from flows.retries import RETRY, prefect_away
from pipeline.champion import Champion, read_champion, registered_name
from pipeline.config import load_config
from pipeline.errors import BevError, ServiceError
from pipeline.lock import exclusive
from pipeline.paths import Paths
from pipeline.tracking.outbox import park
from pipeline.tracking.registration import Registration, register_release
from pipeline.tracking.registry import fetch_champion

Mode = Literal["stages", "single"]
PARALLEL_STAGES = 2  # threads that wait for DVC; independent stages (evaluate beside export) overlap, and each uses all cores by itself
STAGE_RUNNER: TaskRunner[Any] = ThreadPoolTaskRunner(max_workers=PARALLEL_STAGES)
DATA_STAGE = "dataset"


# DVC decides what is up to date, so Prefect must not cache on its own.
@task(cache_policy=NO_CACHE, **RETRY)
def run_stage(root: Path, name: str, lock: int) -> Any:
    """One DVC stage. Returns a `StageOutcome` in a state that is called what DVC did: Completed, Unchanged or Restored."""
    outcome = reproduce_stage(root, name, get_run_logger().info, (lock,))
    show_results(root, outcome)
    return Completed(name=outcome.result, message=f"{outcome.seconds:.1f} s", data=outcome)


@task(name="dvc repro", cache_policy=NO_CACHE, **RETRY)
def run_all(root: Path, lock: int) -> tuple[StageOutcome, ...]:
    """The whole pipeline in one task."""
    return reproduce_all(root, get_run_logger().info, (lock,))


@task(name="champion", cache_policy=NO_CACHE)
def update_champion(root: Path) -> None:
    """Ask the registry who is champion, for the rules that compare with it. Where MLflow is away, what this checkout knows stays."""
    paths = Paths(root)
    try:
        fetch_champion(paths, load_config(paths.params))
    except ServiceError as error:
        get_run_logger().warning(f"compared with the champion that release/champion.json names: {error}")


@task(name="register", cache_policy=NO_CACHE, **RETRY)
def register(root: Path) -> Registration:
    """The MLflow run and model version of what dvc.lock describes, after those that had waited for the server."""
    paths = Paths(root)
    registration = register_release(paths, load_config(paths.params))
    what = "registered" if registration.created else "already registered"
    get_run_logger().info(f"{registration.name} version {registration.version}: {what}, gate {registration.gate}; {registration.run_url}")
    create_link_artifact(registration.run_url, link_text=f"MLflow run of {registration.name} version {registration.version}", key="mlflow-run")
    create_link_artifact(registration.report_url, link_text="Release report", key="release-report")
    return registration


@flow(name="retrain", task_runner=STAGE_RUNNER)
def retrain(root: str | None = None, mode: Mode = "stages", register_model: bool = True, only_on_new_data: bool = False) -> Any:
    """Run the DVC pipeline and register its result.

    Args:
        root: directory of dvc.yaml; the current directory where it is not given.
        mode: "stages": one task per stage; "single": one `dvc repro`.
        register_model: whether to log and register the result in MLflow.
        only_on_new_data: do nothing unless the data set has changed since the last run that came to its end.

    Returns:
        The `Registration`; None with `register_model` false. A state called NoNewData or Waiting where there was nothing to do, or where MLflow is
        away and the version waits for the next run.

    Raises:
        BevError: a stage failed; the message names each one that did.
    """
    project = Path(root or Path.cwd()).resolve()
    log = get_run_logger()
    try:
        with exclusive(project, "retrain", lambda: log.info("another retraining runs in this working tree: waiting for it")) as lock:
            if only_on_new_data and is_up_to_date(project, DATA_STAGE, log.info) and not is_unfinished(project):
                return Completed(name="NoNewData", message="the data set is the one of the last run", data=None)
            if register_model:
                update_champion(project)
            run_stages(project, lock) if mode == "stages" else run_in_one(project, lock)
            return register_or_park(project) if register_model else None
    finally:
        stop_running()  # a cancelled flow leaves no stage behind; a finished one has none


def register_or_park(root: Path) -> Any:
    """Register; where MLflow stays away, keep everything for the next run."""
    state = register(root, return_state=True)
    if not (state.is_failed() and isinstance(error := state.result(raise_on_failure=False), ServiceError)):
        return state.result()
    paths = Paths(root)
    folder = park(paths, load_config(paths.params))
    get_run_logger().warning(f"{error}\nthe version is kept in {folder}; the next run sends it")
    return Completed(name="Waiting", message="MLflow is away; the next run, or `bevj6 register`, sends this version", data=None)


def run_stages(root: Path, lock: int) -> None:
    """Submit every stage after the ones it depends on, wait for all, show one line each.

    Raises:
        BevError: at least one stage failed; stages that do not depend on it have run.
    """
    futures: dict[str, PrefectFuture[Any]] = {}
    for node in read_dag(root):
        upstream = [futures[name] for name in node.upstream]
        stage: Task[..., Any] = run_stage.with_options(name=node.name)
        futures[node.name] = stage.submit(root, node.name, lock, wait_for=upstream)
    wait(list(futures.values()))
    show_stages([_line(name, future.state) for name, future in futures.items()])
    failed = [str(future.state.result(raise_on_failure=False)) for future in futures.values() if future.state.is_failed()]
    if failed:
        raise BevError("\n".join(failed))


def run_in_one(root: Path, lock: int) -> None:
    """One `dvc repro`, then one line and the numbers of each stage."""
    outcomes = run_all(root, lock)
    show_stages([(outcome.name, outcome.result, outcome.seconds) for outcome in outcomes])
    for outcome in outcomes:
        show_results(root, outcome)


def show_stages(lines: list[tuple[str, str, float | None]]) -> None:
    """One line per stage (name, what happened, seconds) as an artifact of the flow run and in its log."""
    table = stage_table(lines)
    create_markdown_artifact(table, key="dvc-stages", description="What DVC did with each stage")
    get_run_logger().info("\n" + table)


def show_results(root: Path, outcome: StageOutcome) -> None:
    """The stage's numbers beside the champion's, what it has drawn, and the verdict of every rule, as artifacts of its task."""
    paths, stage = Paths(root), outcome.name
    config = load_config(paths.params)
    champion: Champion | None = read_champion(paths, registered_name(config, config.j6.chip))
    against = f"against the champion, version {champion.version}" if champion else "there is no champion yet"
    if stage == "gate":
        create_table_artifact(gate_rows(paths, champion), key="gate", description=f"Rules of the release and their verdicts, {against}")
        create_table_artifact(checklist_rows(paths), key="checklist", description="The release checklist: what decides each item")
    elif rows := metric_rows(paths, stage, champion):
        create_table_artifact(rows, key=_key("metrics", stage), description=f"{stage}: {against}")
    if outcome.result != "Unchanged":  # else the pictures of an earlier run are still the ones
        for name, uri in stage_pictures(paths, stage).items():
            create_image_artifact(uri, key=_key("picture", name), description=f"{stage}: {name.replace('_', ' ')}")


def _key(kind: str, name: str) -> str:
    """Prefect's keys hold lower case letters, digits and dashes."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', name.lower())}"


def _line(name: str, state: State[Any]) -> tuple[str, str, float | None]:
    seconds = state.result().seconds if state.is_completed() else None  # failed, or never ready because an earlier stage failed
    return name, state.name or state.type.value, seconds


def main(argv: list[str] | None = None) -> int:
    """Run the flow once, in this process. Returns 0, or 1 after printing what failed."""
    parser = argparse.ArgumentParser(prog="python -m flows.retrain", description="Bring the pipeline up to date and register its model.")
    parser.add_argument("root", nargs="?", help="directory of dvc.yaml (default: the current one)")
    parser.add_argument("--mode", choices=("stages", "single"), default="stages", help="one task per stage, or one `dvc repro`")
    parser.add_argument("--no-register", action="store_true", help="do not log and register the result in MLflow")
    parser.add_argument("--only-new-data", action="store_true", help="do nothing unless the data set has changed")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    try:
        retrain(options.root, options.mode, not options.no_register, options.only_new_data)
    except BevError as error:
        print(f"retrain: error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if (message := prefect_away(error)) is None:
            raise
        print(f"retrain: error: {message}", file=sys.stderr, flush=True)
        if get_current_settings().api.url:  # not a temporary server, which this process has to end
            os._exit(1)  # the stages have ended; Prefect's threads would try for a minute or more to send events to a server that is away
        return 1
    return 0


def _end(signal_number: int, _frame: FrameType | None) -> None:
    """Leave through the flow's `finally`, which ends the running stages; 128 + signal is the shell's status for that."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    sys.exit(main())
