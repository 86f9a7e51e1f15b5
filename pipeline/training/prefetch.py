"""Prepare the next items of an iterator in a thread while the current one is used. Order and content do not change."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterator[T], ahead: int = 2) -> Generator[T, None, None]:
    """Items in order, at most `ahead` of them prepared in advance; an error in the thread is raised here. Closing the iterator waits for the
    thread's end: one that still computes when Python exits takes the process down with it.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=ahead)
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, ready, stop), daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                if isinstance(error, StopIteration):
                    return
                raise error
            yield item  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()


def _fill(items: Iterator[T], ready: queue.Queue[tuple[T | None, BaseException | None]], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            entry: tuple[T | None, BaseException | None] = (next(items), None)
        except BaseException as error:  # including StopIteration: the reader decides what it means
            entry = (None, error)
        while not stop.is_set():
            try:
                ready.put(entry, timeout=0.2)
                break
            except queue.Full:
                continue
        if entry[1] is not None:
            return
