"""Judge a new batch of data, and say so to whoever waits for it.

    python -m flows.data DATAROOT --version v1.0-trainval

A batch that passes emits the event `bevj6.data.validated`; the deployment `on-new-data` of prefect.yaml answers it with a retraining.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event
from prefect.logging import get_run_logger

from flows.command import run_once
from flows.pages import field_table, finding_rows
from pipeline.config import load_config
from pipeline.errors import DataError
from pipeline.paths import Paths
from pipeline.validation.command import validate_dataset

VALIDATED_EVENT = "bevj6.data.validated"


@task(name="validate", cache_policy=NO_CACHE)  # no retries: the same data give the same verdict
def validate_batch(root: Path, dataroot: Path, version: str) -> dict[str, Any]:
    """The validation report of a nuScenes-format data set, by the rules of the project's params.yaml."""
    config = load_config(Paths(root).params)
    return validate_dataset(dataroot, version, config.validation, config.execution.workers)


@flow(name="validate-data")
def validate_data(dataroot: str, version: str, root: str | None = None) -> dict[str, Any]:
    """Validate a new batch of data. Writes nothing; shows the verdict and every rule that found something.

    Args:
        dataroot: directory that holds the tables' directory and the sensor files.
        version: name of the tables' directory.
        root: directory of params.yaml; the current directory where it is not given.

    Returns:
        Verdict and counts.

    Raises:
        DataError: the tables cannot be read, or a rule of the severity named by `validation.fail_on` failed.
    """
    report = validate_batch(Path(root or Path.cwd()).resolve(), Path(dataroot).resolve(), version)
    verdict = {"passed": report["passed"], **report["counts"], "samples kept": report["samples"]["kept"], "samples": report["samples"]["total"]}
    create_markdown_artifact(field_table(verdict), key="validation", description=f"{dataroot}, {version}")
    findings = finding_rows(report)
    if findings:
        create_table_artifact(findings, key="validation-findings", description="Rules that found something")
    get_run_logger().info(f"{dataroot}: {'passed' if report['passed'] else 'NOT passed'}, {report['counts']}")
    if not report["passed"]:
        raise DataError(f"{dataroot}: did not pass: {'; '.join(row['name'] for row in findings if row['severity'] == 'error')}")
    emit_event(VALIDATED_EVENT, resource={"prefect.resource.id": f"bevj6.data.{version}", "dataroot": dataroot}, payload=verdict)
    return verdict


def main(argv: list[str] | None = None) -> int:
    """Run the flow once, in this process. Returns 0, or 1 after printing what is wrong with the data."""
    parser = argparse.ArgumentParser(prog="python -m flows.data", description="Judge a new batch of data, as a Prefect flow.")
    parser.add_argument("dataroot", help="directory that holds the tables' directory and the sensor files")
    parser.add_argument("--version", required=True, help="name of the tables' directory")
    options = parser.parse_args(argv)
    return run_once("validate-data", lambda: validate_data(options.dataroot, options.version))


if __name__ == "__main__":
    sys.exit(main())
