"""The one seam for work over scenes: local processes, or a Dask cluster. And how such a process treats its memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from pipeline.errors import ServiceError

Item = TypeVar("Item")
Result = TypeVar("Result")

# mallopt(3) of glibc: parameter numbers of malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> None:
    """Let this process reuse the memory of freed arrays instead of returning it to the system. Without glibc it does nothing.

    By default glibc maps every array over 32 MiB (and at first over 128 KiB) anew, and the kernel zeroes each page again at its first touch; a
    training step frees and takes back hundreds of such arrays. Measured there: a fifth of the time. The peak does not change.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 * 2**20)):
        mallopt(parameter, value)


def one_blas_thread() -> None:
    """Let matrix products of numpy run on the calling thread alone.

    Products of labels are small. OpenBLAS gives each to all cores, and its threads then spin for the next one, while another process of ours or torch
    has work for that core: measured, half of the processor time of loading a training sample.
    """
    import numpy as np  # noqa: F401  the limit holds for libraries that are loaded
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")


def prepare_worker() -> None:
    """What every process does that shares the cores with its peers: workers over scenes and ranks of a training."""
    keep_freed_memory()
    one_blas_thread()


def stage_environment() -> dict[str, str]:
    """This environment for a DVC child, with `python` in its stage commands being this interpreter."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}


CONNECT_TIMEOUT_S = 20
# The cluster of this process's stage. Set once at the top, so that no domain function carries an address through its arguments.
_dask_address: ContextVar[str | None] = ContextVar("dask_address", default=None)


@contextmanager
def on_cluster(dask_address: str | None) -> Iterator[None]:
    """Within the block, `map_ordered` runs on the Dask cluster whose scheduler is at `dask_address`; None: local processes."""
    token = _dask_address.set(dask_address)
    try:
        yield
    finally:
        _dask_address.reset(token)


def map_ordered(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Results of `function` over `items`, in order. One worker runs in this process; more run in spawned processes.

    On a cluster (`on_cluster`) `workers` has no meaning: all of the cluster's take part. An item whose worker dies runs again on another one.
    `function` must be importable (a module-level function or a partial of one). The first error stops the work and is raised here.

    Raises:
        ServiceError: the cluster cannot be reached, or an item has outlived no worker.
    """
    address = _dask_address.get()
    if address is not None:
        yield from _map_on_cluster(address, function, list(items))
        return
    if workers == 1:
        yield from map(function, items)
        return
    # "spawn": forked children of a process that already started threads (torch, OpenCV) can dead-lock.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=prepare_worker) as pool:
        yield from pool.map(function, items)


def _map_on_cluster(address: str, function: Callable[[Item], Result], items: list[Item]) -> Iterator[Result]:
    """`map_ordered` on a cluster. Results are fetched one by one, so that this process never holds them all."""
    from distributed import Client, KilledWorker

    try:
        client = Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ServiceError(f"Dask scheduler at {address} (execution.dask_address): cannot connect ({error or type(error).__name__})") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise ServiceError(f"Dask cluster at {address}: has no worker (`dask worker {address}` starts one)") from None
        futures = client.map(function, items, pure=False)  # equal items are still work of their own
        try:
            while futures:
                yield futures[0].result()
                futures.pop(0).release()
        except KilledWorker as error:
            raise ServiceError(f"Dask cluster at {address}: {error}") from None
        finally:
            client.cancel(futures)
