"""Time and peak memory of every stage, and of a second run in which nothing is out of date.

    python benchmarks/chain.py            # runs each stage by force, about as long as `make pipeline`
    python benchmarks/chain.py --second   # only the second, unchanged run

Prints one JSON document: seconds and peak resident MB of each stage (the largest process under it), their total, and the second run's seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml


def run_measured(command: list[str]) -> tuple[float, float]:
    """Run a command; return its wall seconds and the peak resident MB of the largest process it started."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status != 0:
        raise SystemExit(f"{' '.join(command)} failed with status {os.waitstatus_to_exitcode(status)}")
    return seconds, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--second", action="store_true", help="measure only the unchanged second run")
    options = parser.parse_args()
    dvc = [sys.executable, "-m", "dvc", "repro"]
    report: dict[str, object] = {}
    if not options.second:
        stages = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
        measured = {name: run_measured([*dvc, "--force", "--single-item", name]) for name in stages}
        report["stages"] = {name: {"seconds": round(s, 1), "peak_mb": round(mb)} for name, (s, mb) in measured.items()}
        report["total_seconds"] = round(sum(s for s, _ in measured.values()), 1)
        report["peak_mb"] = round(max(mb for _, mb in measured.values()))
    report["second_run_seconds"] = round(run_measured(dvc)[0], 1)
    json.dump(report, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
