"""One at a time, across processes of this machine: a lock that the system frees when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(root: Path, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Hold the lock `name` of the project at `root`; wait for whoever has it, after calling `on_wait` once.

    Yields the lock's file descriptor: a child process that inherits it keeps the lock until it has ended as well.
    """
    folder = root / ".services"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
