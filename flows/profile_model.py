"""Simulate a registered version on any chip.

python -m flows.profile_model --version champion --chip j6e
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from flows.command import run_once
from flows.retries import RETRY
from pipeline.config import load_config
from pipeline.paths import Paths
from pipeline.tracking.chips import profile_registered

SHOWN = ("latency_ms", "fps", "ddr_bytes_per_frame", "ddr_gbps_at_design_fps", "logged_latency_ms")


@task(name="profile", cache_policy=NO_CACHE, **RETRY)
def profile_task(root: Path, version: int | str, chip: str) -> dict[str, Any]:
    """The simulated profile; tried again only where MLflow is away."""
    paths = Paths(root)
    return profile_registered(paths, load_config(paths.params), version, chip)


@flow(name="profile-model")
def profile_model(version: int | str = "champion", chip: str = "j6m", root: str | None = None) -> dict[str, Any]:
    """Simulated latency, bandwidth and memory of a registered version on a chip.

    Args:
        version: number or alias of a version of the registered model that params.yaml names.
        chip: name of a chip profile, or a path to one.
        root: directory of params.yaml; the current directory where it is not given.

    Raises:
        BevError: no such version or chip, something stored with the version was changed, or MLflow is away.
    """
    number = int(version) if str(version).isdigit() else version  # a form sends text
    document = profile_task(Path(root or Path.cwd()).resolve(), number, chip)
    rows = [{"figure": name, "simulated": document[name]} for name in SHOWN]
    rows += [{"figure": f"latency_ms of {head}", "simulated": value} for head, value in document["by_head_ms"].items()]
    model = f"{document['registered_model']} version {document['registered_version']}"
    note = f"{model} on {document['chip']}, chip profile {document['profile_hash'][:12]}"
    create_table_artifact(rows, key=f"profile-{document['chip'].lower().replace('_', '-')}", description=note)
    get_run_logger().info(f"{note}: simulated {document['latency_ms']:.3f} ms")
    return {name: document[name] for name in (*SHOWN, "chip", "profile_hash", "registered_version")}


def main(argv: list[str] | None = None) -> int:
    """Run the flow once, in this process. Returns 0, or 1 after printing what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.profile_model", description="Simulate a registered version on any chip."
    )
    parser.add_argument("--version", default="champion", help="number or alias (default: champion)")
    parser.add_argument("--chip", default="j6m", help="chip profile (default: j6m)")
    options = parser.parse_args(argv)
    return run_once("profile-model", lambda: profile_model(options.version, options.chip))


if __name__ == "__main__":
    sys.exit(main())
