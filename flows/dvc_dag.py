"""The DVC pipeline as a flow sees it: a graph of stage names and a way to bring one stage up to date.

Nothing here knows Prefect. A stage runs as `python -m dvc --wait-for-lock repro -s <stage>`, the same command a person would use:
`--wait-for-lock` because DVC gives up its repository lock after 3 s, and a stage that ran beside another one would lose its result;
`-s` because the caller follows the graph.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import BevError, ConfigError
from pipeline.execution import stage_environment
from pipeline.tracking.revision import read_lock

Result = Literal["Completed", "Unchanged", "Restored"]
LineSink = Callable[[str], None]

# What DVC prints when the cause lies outside the stage, so that trying again can help.
OUTSIDE_CAUSES = ("Unable to acquire lock", "is busy, it is being blocked by", "Could not connect to", "Connection refused", "timed out")
COMMAND_FAILED = re.compile(r"failed to run: .*exited with (-?\d+)$")
TEMPORARY_EXIT_STATUS = os.EX_TEMPFAIL  # a stage that cannot reach a service may end with this status to be tried again
TERMINATE_GRACE_S = 10.0
SUPERVISOR = Path(__file__).with_name("supervise.py")


class StageError(BevError):
    """A stage failed for a reason that lies in its input, parameters or code: running it again gives the same result."""


class StageInterruptedError(BevError):
    """A stage could not run for an outside cause (lock, remote storage, service): worth another try."""


@dataclass(frozen=True)
class StageNode:
    """A stage of dvc.yaml and the stages whose outputs it reads."""

    name: str
    upstream: tuple[str, ...]


@dataclass(frozen=True)
class StageOutcome:
    """What DVC did: ran the command, found it unchanged, or restored the outputs of an equal earlier run from its cache."""

    name: str
    result: Result
    seconds: float | None


def read_dag(root: Path) -> tuple[StageNode, ...]:
    """Stages of the DVC project at `root`, each after the stages it depends on.

    Raises:
        ConfigError: `root` is not a DVC project, or its dvc.yaml is missing, malformed or has a cycle.
    """
    import networkx
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(root)) as repo:
            graph = repo.index.graph  # an edge points from a stage to a stage it depends on
            address = {stage: _address(root, stage) for stage in graph if stage.cmd}  # without a command: data added to DVC
            order = reversed(list(networkx.lexicographical_topological_sort(graph, key=lambda stage: stage.addressing)))
            nodes = tuple(
                StageNode(address[stage], tuple(sorted(address[up] for up in graph.successors(stage) if up in address)))
                for stage in order
                if stage in address
            )
    except DvcException as error:
        raise ConfigError(f"{root / 'dvc.yaml'}: {error}") from error
    if not nodes:
        raise ConfigError(f"{root / 'dvc.yaml'}: no stage found")
    return nodes


def _address(root: Path, stage: Any) -> str:
    """How `dvc repro`, run in `root`, is told about a stage: its name, with the file before it when that is not dvc.yaml."""
    file = os.path.relpath(stage.path, root)
    return str(stage.name) if file == "dvc.yaml" else f"{file}:{stage.name}"


def reproduce_stage(root: Path, name: str, on_line: LineSink, keep_open: Sequence[int] = ()) -> StageOutcome:
    """Bring one stage up to date; its output goes line by line to `on_line`.

    When the stage fails, its last good outputs are put back (DVC removes them before it starts a command). `keep_open`: file descriptors of locks
    that must stay held until the stage has ended, whatever becomes of this process.

    Raises:
        StageError: the stage's command failed.
        StageInterruptedError: an outside cause; the stage did not fail by itself.
    """
    start = time.perf_counter()
    status, lines = run_dvc(root, ["repro", "--single-item", name], on_line, keep_open)
    if status != 0:
        run_dvc(root, ["checkout", "--force", name], on_line)
        raise stage_failure(name, status, lines)
    return StageOutcome(name, stage_result(name, lines), time.perf_counter() - start)


def reproduce_all(root: Path, on_line: LineSink, keep_open: Sequence[int] = ()) -> tuple[StageOutcome, ...]:
    """Bring the whole pipeline up to date with one `dvc repro`. Outcomes are in the order of `read_dag` and carry no seconds.

    Raises:
        StageError, StageInterruptedError: as in `reproduce_stage`.
    """
    nodes = read_dag(root)
    status, lines = run_dvc(root, ["repro"], on_line, keep_open)
    if status != 0:
        run_dvc(root, ["checkout", "--force"], on_line)
        raise stage_failure("dvc repro", status, lines)
    return tuple(StageOutcome(node.name, stage_result(node.name, lines), None) for node in nodes)


def is_up_to_date(root: Path, name: str, on_line: LineSink) -> bool:
    """Whether DVC finds nothing new in what a stage reads, and its outputs in place.

    Raises:
        ConfigError: DVC cannot tell (no such stage, dvc.yaml is broken).
    """
    status, lines = run_dvc(root, ["status", name], on_line)
    if status != 0:
        raise ConfigError(f"{root / 'dvc.yaml'}: cannot tell whether {name!r} is up to date: {'; '.join(lines[-2:])}")
    return not any(line.startswith(f"{name}:") for line in lines)


def is_unfinished(root: Path) -> bool:
    """Whether a run ended before the pipeline did: a stage never ran, or has not seen what an earlier one made since. Parameters do not count.

    Raises:
        ConfigError: as `read_dag`.
        DataError: dvc.lock is not a DVC lock file.
    """
    names = {node.name for node in read_dag(root)}
    if not (root / "dvc.lock").exists():
        return True
    stages = read_lock(root)
    made = {output["path"]: output["md5"] for stage in stages.values() for output in stage.get("outs", [])}
    read = [(entry["path"], entry["md5"]) for stage in stages.values() for entry in stage.get("deps", []) if entry["path"] in made]
    return not names <= stages.keys() or any(made[path] != md5 for path, md5 in read)


def stage_result(name: str, lines: list[str]) -> Result:
    """What DVC's output says about a stage that succeeded."""
    if f"Running stage '{name}':" in lines:
        return "Completed"
    if any(line.startswith(f"Stage '{name}' is cached - skipping run") for line in lines):
        return "Restored"
    return "Unchanged"


def stage_failure(name: str, status: int, lines: list[str]) -> StageError | StageInterruptedError:
    """The error for a DVC command that ended with `status` after printing `lines`."""
    reasons = [line.strip() for line in lines if "error:" in line.lower()] or [line.strip() for line in lines[-3:]]
    message = f"stage {name}: {'; '.join(reasons[-4:]) or f'dvc ended with status {status}'}"
    command_status = next((match[1] for line in lines if (match := COMMAND_FAILED.search(line))), None)
    if command_status is None:
        outside = any(cause in line for cause in OUTSIDE_CAUSES for line in lines)
    else:
        outside = int(command_status) == TEMPORARY_EXIT_STATUS
    return StageInterruptedError(message) if outside else StageError(message)


def run_dvc(root: Path, arguments: list[str], on_line: LineSink, keep_open: Sequence[int] = ()) -> tuple[int, list[str]]:
    """Run a DVC command in the project at `root`. Returns its exit status and the lines it printed on both streams."""
    command = [sys.executable, str(SUPERVISOR), sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
    # Own session: the stage is a grandchild (dvc -> shell -> python), and ending the group ends all of them. The supervisor reads a pipe that closes
    # with this process, so not even SIGKILL leaves a stage behind.
    child = subprocess.Popen(
        command, cwd=root, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, pass_fds=tuple(keep_open),
    )  # fmt: skip
    lines: list[str] = []
    with _running_lock:
        _running.add(child)
    try:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip("\n"))
            on_line(lines[-1])
        return child.wait(), lines
    finally:
        _end(child)
        assert child.stdin is not None
        child.stdin.close()
        with _running_lock:
            _running.discard(child)


def stop_running() -> None:
    """End every DVC command this process still runs, with the stages they started: for a cancelled flow, whose threads would wait for them."""
    with _running_lock:
        children = list(_running)
    for child in children:
        _end(child)


_running: set[subprocess.Popen[str]] = set()
_running_lock = threading.Lock()


def _end(child: subprocess.Popen[str]) -> None:
    """Ask the child's process group to end, then insist. Nothing to do when it has ended already."""
    if child.poll() is not None:
        return
    try:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(TERMINATE_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    except ProcessLookupError:
        child.wait()


def _environment() -> dict[str, str]:
    """Of a stage, with its output unbuffered."""
    return {**stage_environment(), "PYTHONUNBUFFERED": "1"}
