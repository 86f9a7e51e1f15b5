"""Training with torchrun: two nodes, each an agent of its own with one rank, that find each other by rendezvous. Here both are on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.paths import Paths
from pipeline.training.ranks import run_ranks
from tests.integration.chain import indexed_data_set, project
from tests.models.tiny import TINY

pytestmark = pytest.mark.integration

LIMIT_S = 400.0
STEPS = 24
SMALL: dict[str, Any] = {
    "dataset": {"synthetic": {"train_scenes": 2, "val_scenes": 1, "samples_per_scene": 3, "image_width": 96, "image_height": 64}},
    "model": TINY,
    "train": {"image_steps": 2, "steps": STEPS - 2, "batch_scenes": 2, "processes": 2, "threads": 1, "log_every": 1, "checkpoint_every": 4},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Paths:
    """A project with data set and index. It has no map labels, so one of the three tasks is left out."""
    config, paths = project(tmp_path_factory.mktemp("ranks"), project_root / "params.yaml", SMALL)
    indexed_data_set(config, paths)
    return paths


@dataclass(frozen=True)
class Node:
    """What a machine runs: an agent of torchrun, in a working directory that all nodes share."""

    agent: subprocess.Popen[bytes]
    log: Path

    def ranks(self) -> list[int]:
        """Process ids of the ranks that the agent has started."""
        listed = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split()
        return [int(child) for child in listed]

    def __str__(self) -> str:
        return f"{self.agent.args}\n{self.log.read_text(errors='replace')[-3000:]}"


def start_node(paths: Paths, project_root: Path, name: str, port: int) -> Node:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "one-run", "--rdzv-conf", "last_call_timeout=2"]
    limits = ["--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2"]
    command = ["-m", "torch.distributed.run", "--nnodes", "2", *limits, *meeting]
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = os.environ | own_store | {"PYTHONPATH": str(project_root), "OMP_NUM_THREADS": "1"}
    log = paths.root / f"{name}.log"
    with log.open("wb") as stream:
        agent = subprocess.Popen(
            [sys.executable, *command, "-m", "pipeline.stages.train"], cwd=paths.root, env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
    return Node(agent, log)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], *nodes: Node) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "\n".join(map(str, nodes))
        time.sleep(0.01)


def steps_in_curves(paths: Paths) -> list[int]:
    rows = (paths.float_dir / "curves.csv").read_text().splitlines()[1:]
    return [int(row.split(",")[0]) for row in rows]


@contextmanager
def two_nodes(paths: Paths, project_root: Path) -> Iterator[list[Node]]:
    port = free_port()
    nodes = [start_node(paths, project_root, name, port) for name in ("first", "second")]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.agent.kill()
            node.agent.wait()


def test_killed_rank_restarts_both_nodes_which_end_with_the_weights_of_an_undisturbed_run(prepared: Paths, project_root: Path) -> None:
    paths = Paths(Path(shutil.copytree(prepared.root, prepared.root.with_name("torchrun"))))
    with two_nodes(paths, project_root) as nodes:
        wait_until(lambda: any(paths.checkpoint_dir.glob("*.pt")), *nodes)
        victims = nodes[1].ranks()
        assert len(victims) == 1, nodes[1]
        os.kill(victims[0], signal.SIGKILL)
        assert [node.agent.wait(LIMIT_S) for node in nodes] == [0, 0], "\n".join(map(str, nodes))
        assert f"exitcode: -{signal.SIGKILL.value}" in nodes[1].log.read_text()
    assert steps_in_curves(paths) == list(range(1, STEPS + 1))  # the steps after the checkpoint were done again, and stand there once
    assert list(paths.checkpoint_dir.iterdir()) == []

    undisturbed = subprocess.run(
        [sys.executable, "-m", "pipeline.stages.train"], cwd=prepared.root, env=os.environ | {"PYTHONPATH": str(project_root)}, timeout=LIMIT_S
    )
    assert undisturbed.returncode == 0
    for name in ("model.pt", "metrics.json", "curves.csv"):
        assert (paths.float_dir / name).read_bytes() == (prepared.float_dir / name).read_bytes(), name


def test_restarts_that_could_hang_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's default the ranks of all attempts share a store, where a restarted rank can find the address of a dead one."""
    for name, value in {"RUN_ID": "one-run", "USE_AGENT_STORE": "True", "MAX_RESTARTS": "3"}.items():
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    with pytest.raises(ConfigError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        run_ranks(lambda ranks: None, 1)
