from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pipeline.errors import DataError
from pipeline.training.prefetch import prefetch


def test_items_come_in_order_and_end() -> None:
    assert list(prefetch(iter(range(50)), ahead=3)) == list(range(50))


def test_an_error_arrives_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise DataError("bad image")

    received = []
    with pytest.raises(DataError, match="bad image"):
        for item in prefetch(items()):
            received.append(item)
    assert received == [1]


def test_no_thread_is_left_behind_an_endless_source() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 0

    before = threading.active_count()
    stream = prefetch(endless())
    assert next(stream) == 0
    stream.close()
    assert threading.active_count() == before
