"""The one seam for work over scenes: local processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_ordered(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Results of `function` over `items`, in order. One worker runs in this process; more run in spawned processes.

    `function` must be importable (a module-level function or a partial of one). The first error stops the work and is raised here.
    """
    if workers == 1:
        yield from map(function, items)
        return
    # "spawn": forked children of a process that already started threads (torch, OpenCV) can dead-lock.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, items)
