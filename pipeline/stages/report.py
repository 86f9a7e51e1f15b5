"""One page for people: what was measured, whether it may be released, and what it was made from.

    python -m pipeline.stages.report

Reads data/dataset.json, the files in reports/ and models/. Writes reports/release.html, a single file that needs no network.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.io import write_text
from pipeline.paths import Paths
from pipeline.report.content import read_content
from pipeline.report.render import render
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """What was written; printed as one line."""

    size_bytes: int

    def __str__(self) -> str:
        return f"reports/release.html, {self.size_bytes / 1e6:.2f} MB"


def run(config: Config, paths: Paths) -> Result:
    """Write the report.

    Raises:
        DataError: an input is missing or damaged.
    """
    target = paths.report("release.html")
    write_text(target, render(read_content(config, paths)))
    return Result(target.stat().st_size)


def main() -> int:
    """Entry point of `python -m pipeline.stages.report`."""
    return stage_main("report", run)


if __name__ == "__main__":
    sys.exit(main())
