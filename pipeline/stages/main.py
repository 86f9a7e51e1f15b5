"""The command line shared by all stages: load params.yaml, run, print one line, turn user errors into a message and an exit status."""

from __future__ import annotations

import argparse
import errno
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config import Config, load_config
from pipeline.errors import BevError
from pipeline.execution import on_cluster
from pipeline.paths import Paths

StageRun = Callable[[Config, Paths], Any]
STORAGE_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, file size limit


def stage_main(name: str, run: StageRun, argv: list[str] | None = None) -> int:
    """Run one stage in the current directory. Returns 0, or 1 after printing a `BevError` or a full disk's message to stderr."""
    parser = argparse.ArgumentParser(prog=f"python -m pipeline.stages.{name}", description=f"Run the stage '{name}' of dvc.yaml.")
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="parameter file (default: params.yaml)")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    try:
        config = load_config(options.params)
        with on_cluster(config.execution.dask_address):
            result = run(config, Paths(Path.cwd()))
    except BevError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in STORAGE_FULL:
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"{name}: error: cannot write{where}: {error.strerror}; earlier outputs are kept", file=sys.stderr)
        return 1
    print(f"{name}: {result} in {time.perf_counter() - start:.1f} s", flush=True)
    return 0
