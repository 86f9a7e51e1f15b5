"""Promotion and rollback as flows, so that they can be started, and seen, in Prefect. The work is `pipeline.tracking.registry`.

python -m flows.release promote [--version N] [--force REASON]
python -m flows.release rollback [--reason TEXT]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from flows.command import run_once
from flows.pages import field_table
from flows.retries import RETRY
from pipeline.config import load_config
from pipeline.paths import Paths
from pipeline.tracking.audit import AliasChange
from pipeline.tracking.registry import promote, rollback


@task(name="move champion", cache_policy=NO_CACHE, **RETRY)
def promote_task(root: Path, version: int | None, force_reason: str | None) -> AliasChange:
    """The promotion; tried again only where MLflow is away. One that was cut short is completed, not repeated."""
    paths = Paths(root)
    return promote(paths, load_config(paths.params), version, force_reason)


@task(name="restore champion", cache_policy=NO_CACHE, **RETRY)
def rollback_task(root: Path, reason: str | None) -> AliasChange:
    """The rollback; tried again only where MLflow is away."""
    paths = Paths(root)
    return rollback(paths, load_config(paths.params), reason)


@flow(name="promote")
def promote_model(root: str | None = None, version: int | None = None, force_reason: str | None = None) -> dict[str, Any]:
    """Make a model version champion: the candidate, or `version`. `force_reason` overrules gate and champion, and is recorded.

    Raises:
        BevError: the evidence does not allow it, or MLflow is away.
    """
    return _show(promote_task(Path(root or Path.cwd()).resolve(), version, force_reason))


@flow(name="rollback")
def rollback_model(root: str | None = None, reason: str | None = None) -> dict[str, Any]:
    """Make the previous champion champion again.

    Raises:
        BevError: there is none, or MLflow is away.
    """
    return _show(rollback_task(Path(root or Path.cwd()).resolve(), reason))


def _show(change: AliasChange) -> dict[str, Any]:
    fields = change.as_dict()
    create_markdown_artifact(field_table(fields), key="release", description="Who became champion, and on what evidence")
    get_run_logger().info(f"{change.model}: champion is version {change.version}, {change.before}")
    return fields


def main(argv: list[str] | None = None) -> int:
    """Run one of the two flows in this process. Prints the change as JSON; returns 1 after printing what forbids it."""
    parser = argparse.ArgumentParser(prog="python -m flows.release", description="Promote a model version or roll back, as a Prefect flow.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("promote")
    verb.add_argument("--version", type=int, help="model version (default: the candidate)")
    verb.add_argument("--force", metavar="REASON", help="overrule gate and champion; recorded")
    verbs.add_parser("rollback").add_argument("--reason", help="recorded")
    options = parser.parse_args(argv)

    def call() -> None:
        change = promote_model(None, options.version, options.force) if options.verb == "promote" else rollback_model(None, options.reason)
        print(json.dumps(change, indent=2, sort_keys=True))

    return run_once(options.verb, call)


if __name__ == "__main__":
    sys.exit(main())
