"""Work over scenes: the same results from this process, local processes and a Dask cluster, of which a worker may die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from pipeline.errors import DataError, ServiceError
from pipeline.execution import map_ordered, on_cluster

START_LIMIT_S = 120.0


def square(item: int) -> int:
    if item == 13:
        raise DataError("scene-0013: lidar sweep is cut")
    return item * item


def slow_square(folder: Path, item: int) -> int:
    (folder / f"{item}-{os.getpid()}").touch()
    time.sleep(0.3)
    return item * item


def blas_threads(_: int) -> int:
    from threadpoolctl import threadpool_info

    return max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")


@dataclass(frozen=True)
class Cluster:
    address: str
    workers: list[subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, project_root: Path) -> Iterator[Cluster]:
    """A scheduler and two workers, each a process."""
    pytest.importorskip("distributed", reason="the Dask cluster needs the package distributed (pip install bevj6[cluster])")
    folder = tmp_path_factory.mktemp("dask")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {"PYTHONPATH": str(project_root)}
    log = (folder / "dask.log").open("wb")

    def start(*command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", *command], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)

    scheduler = start("distributed.cli.dask_scheduler", "--host", address, "--no-dashboard")
    workers = [start("distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard") for _ in range(2)]
    try:
        wait_for_workers(address, 2, folder)
        yield Cluster(address, workers)
    finally:
        for process in (*workers, scheduler):
            process.kill()
            process.wait()


def wait_for_workers(address: str, count: int, folder: Path) -> None:
    from distributed import Client

    deadline = time.monotonic() + START_LIMIT_S
    while True:
        assert time.monotonic() < deadline, (folder / "dask.log").read_text()
        try:
            with Client(address, timeout=5, set_as_default=False) as client:
                client.wait_for_workers(count, timeout=START_LIMIT_S)
                return
        except OSError:
            time.sleep(0.2)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_the_first_error_is_raised(workers: int) -> None:
    assert list(map_ordered(square, range(6), workers)) == [0, 1, 4, 9, 16, 25]
    with pytest.raises(DataError, match="scene-0013"):
        list(map_ordered(square, [1, 13, 2], workers))


def test_cluster_gives_the_same_results_and_errors(cluster: Cluster) -> None:
    with on_cluster(cluster.address):
        assert list(map_ordered(square, [2, 3, 3, 1], workers=1)) == [4, 9, 9, 1]
        with pytest.raises(DataError, match="scene-0013"):
            list(map_ordered(square, [1, 13, 2], workers=1))
        assert list(map_ordered(square, [], workers=1)) == []
    assert list(map_ordered(os.getpgid, [0], workers=1)) == [os.getpgid(0)]  # outside the block: this process


def test_worker_killed_mid_way_costs_no_result(cluster: Cluster, tmp_path: Path) -> None:
    victim = cluster.workers[0]
    with on_cluster(cluster.address):
        results = map_ordered(partial(slow_square, tmp_path), range(8), workers=1)
        assert next(results) == 0
        deadline = time.monotonic() + START_LIMIT_S
        while not list(tmp_path.glob(f"*-{victim.pid}")):
            assert time.monotonic() < deadline, "the worker got no work"
            time.sleep(0.02)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        assert list(results) == [item * item for item in range(1, 8)]
    started = {path.name.split("-")[0] for path in tmp_path.iterdir()}
    assert started == {str(item) for item in range(8)}


def test_cluster_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("pipeline.execution.CONNECT_TIMEOUT_S", 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        with on_cluster(address), pytest.raises(ServiceError, match=rf"{address} \(execution\.dask_address\): cannot connect"):
            list(map_ordered(square, [1], workers=1))


def test_workers_compute_products_on_one_thread() -> None:
    """More workers than cores times their threads would only spin."""
    assert list(map_ordered(blas_threads, range(2), workers=2)) == [1, 1]
