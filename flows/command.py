"""The command line shared by the flows: run once, in this process, and turn a user error into a message and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pipeline.errors import BevError


def run_once(name: str, call: Callable[[], Any]) -> int:
    """Run a flow. Returns 0, or 1 after printing a `BevError` to stderr."""
    try:
        call()
    except BevError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    return 0
