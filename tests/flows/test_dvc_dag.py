"""The DVC project as a graph, and one stage at a time. No Prefect needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows.dvc_dag import (
    StageError,
    StageInterruptedError,
    StageNode,
    is_unfinished,
    read_dag,
    reproduce_all,
    reproduce_stage,
    stage_failure,
    stop_running,
)
from pipeline.errors import ConfigError


def ignore(line: str) -> None:
    pass


def set_steps(project: Path, steps: int) -> None:
    params = project / "params.yaml"
    params.write_text("".join(f"  steps: {steps}\n" if "steps:" in line else line for line in params.read_text().splitlines(keepends=True)))


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "condition never became true"
        time.sleep(0.05)


def test_graph_comes_from_dvc_yaml_in_an_order_that_can_run(built_copy: Path) -> None:
    nodes = read_dag(built_copy)
    assert {node.name: node.upstream for node in nodes} == {
        "dataset": (),
        "train": ("dataset",),
        "evaluate": ("train",),
        "quantize": ("train",),
        "profile": ("quantize",),
        "gate": ("evaluate", "profile", "quantize"),
    }
    position = {node.name: index for index, node in enumerate(nodes)}
    assert all(position[up] < position[node.name] for node in nodes for up in node.upstream)


def test_data_added_to_dvc_is_no_stage(built_copy: Path) -> None:
    (built_copy / "raw.txt.dvc").write_text("outs:\n- md5: 0cc175b9c0f1b6a831c399e269772661\n  size: 1\n  hash: md5\n  path: raw.txt\n")
    text = (built_copy / "dvc.yaml").read_text().replace("deps: [work.py]\n    params: [dataset]", "deps: [work.py, raw.txt]\n    params: [dataset]")
    (built_copy / "dvc.yaml").write_text(text)
    assert read_dag(built_copy)[0] == StageNode("dataset", ())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("stages:\n  a:\n    cmd: 'true'\n    outs: [x]\n  b:\n    cmd: 'true'\n    outs: [x]\n", "x"),
        ("stages: [", "dvc.yaml"),
        ("stages:\n  a:\n    cmd: 'true'\n    deps: [y]\n    outs: [x]\n  b:\n    cmd: 'true'\n    deps: [x]\n    outs: [y]\n", "same item"),
        ("stages: {}\n", "no stage"),
    ],
)
def test_broken_dvc_yaml_is_named(built_copy: Path, content: str, expected: str) -> None:
    (built_copy / "dvc.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"dvc\.yaml") as caught:
        read_dag(built_copy)
    assert expected in str(caught.value).lower()


def test_directory_outside_dvc_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not"):
        read_dag(tmp_path)


def test_stage_runs_once_and_is_restored_when_a_parameter_goes_back(built_copy: Path) -> None:
    lines: list[str] = []
    assert reproduce_stage(built_copy, "train", ignore).result == "Unchanged"
    set_steps(built_copy, 7)
    changed = reproduce_stage(built_copy, "train", lines.append)
    assert changed.result == "Completed"
    assert changed.seconds is not None
    assert changed.seconds > 0
    assert "> python work.py train" in lines
    set_steps(built_copy, 20)
    assert reproduce_stage(built_copy, "train", ignore).result == "Restored"


def test_run_that_was_cut_short_is_known_until_the_last_stage_has_run(built_copy: Path) -> None:
    params = built_copy / "params.yaml"
    assert not is_unfinished(built_copy)
    set_steps(built_copy, 7)
    assert not is_unfinished(built_copy)  # other parameters are no new data
    params.write_text(params.read_text().replace("seed: 0", "seed: 1"))
    reproduce_stage(built_copy, "dataset", ignore)
    assert is_unfinished(built_copy)
    reproduce_stage(built_copy, "train", ignore)
    assert is_unfinished(built_copy)
    reproduce_all(built_copy, ignore)
    assert not is_unfinished(built_copy)
    lock = yaml.safe_load((built_copy / "dvc.lock").read_text())
    del lock["stages"]["gate"]
    (built_copy / "dvc.lock").write_text(yaml.safe_dump(lock))
    assert is_unfinished(built_copy)
    (built_copy / "dvc.lock").unlink()
    assert is_unfinished(built_copy)


def test_failed_stage_says_why_and_leaves_the_last_good_outputs(built_copy: Path) -> None:
    good = (built_copy / "models/multitask.onnx").read_bytes()
    set_steps(built_copy, 7)
    (built_copy / "fail-train").touch()
    with pytest.raises(StageError, match=r"train: error: data/broken\.json: not valid JSON"):
        reproduce_stage(built_copy, "train", ignore)
    assert (built_copy / "models/multitask.onnx").read_bytes() == good
    assert (built_copy / "models/float/curves.csv").is_file()


def test_failure_of_a_first_run_leaves_nothing_half_made(sample_project: Path) -> None:
    (sample_project / "fail-dataset").touch()
    with pytest.raises(StageError, match="dataset"):
        reproduce_stage(sample_project, "dataset", ignore)
    assert not (sample_project / "data/dataset.json").exists()


def test_whole_pipeline_in_one_command(built_copy: Path) -> None:
    set_steps(built_copy, 7)
    results = {outcome.name: outcome.result for outcome in reproduce_all(built_copy, ignore)}
    assert results["dataset"] == "Unchanged"
    assert results["train"] == results["quantize"] == "Completed"
    assert results["gate"] == "Unchanged"  # its inputs, the reports, came out the same


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (["ERROR: Unable to acquire lock. Most likely another DVC process is running"], StageInterruptedError),
        (["ERROR: failed to connect to s3 (bucket/files/md5) - Connection refused"], StageInterruptedError),
        (["ERROR: failed to reproduce 'a': failed to run: python a.py, exited with 75"], StageInterruptedError),
        (["ERROR: failed to reproduce 'a': failed to run: python a.py, exited with 1"], StageError),
        # The stage's own words do not decide: it met bad data and said so.
        (["a: error: scene 3: sweep timed out", "ERROR: failed to reproduce 'a': failed to run: python a.py, exited with 1"], StageError),
        (["ERROR: failed to reproduce 'a': output 'x' does not exist"], StageError),
        ([], StageError),
    ],
)
def test_only_outside_causes_are_worth_another_try(lines: list[str], kind: type[Exception]) -> None:
    error = stage_failure("a", 255, lines)
    assert type(error) is kind
    assert "a" in str(error)


def test_stopping_ends_dvc_and_the_stage_under_it(built_copy: Path) -> None:
    set_steps(built_copy, 7)
    (built_copy / "stop-train").touch()
    failures: list[Exception] = []

    def work() -> None:
        try:
            reproduce_stage(built_copy, "train", ignore)
        except StageError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until((built_copy / "stop-train.running").exists)
    stop_running()
    thread.join(30)
    assert not thread.is_alive()
    assert len(failures) == 1
    assert not any(str(built_copy) == cwd for cwd in working_directories("work.py"))


def working_directories(script: str) -> list[str]:
    """Working directories of the live processes that run `script`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if script in (process / "cmdline").read_text():
                found.append(str((process / "cwd").readlink()))
        except OSError:  # it ended while being looked at
            continue
    return found
