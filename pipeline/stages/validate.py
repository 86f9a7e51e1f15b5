"""Stage validate: check the data set and build the columnar index from it.

    python -m pipeline.stages.validate

Reads data/dataset.json and the data set. Writes reports/validation.json and reports/data_docs (also when it fails), then data/index (only when the
data set passes `validation.fail_on`, so the last good index stays).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.dataset.index import write_index
from pipeline.dataset.source import Description
from pipeline.errors import DataError
from pipeline.io import write_json
from pipeline.paths import Paths
from pipeline.stages.main import stage_main
from pipeline.validation.command import validate
from pipeline.validation.data_docs import write_data_docs


@dataclass(frozen=True)
class Result:
    """What the stage did; printed as one line."""

    kept: int
    total: int
    warnings: int

    def __str__(self) -> str:
        return f"{self.kept} of {self.total} samples kept, {self.warnings} warnings (reports/validation.json, reports/data_docs/index.html)"


def run(config: Config, paths: Paths) -> Result:
    """Validate the data set and write its index.

    Raises:
        DataError: the tables cannot be read, a finding reaches `validation.fail_on`, or no sample is left.
    """
    data = Description.read(paths.dataset_json)
    root = paths.root / data.dataroot
    result = validate(root, data.version, data.splits, data.provides, config.validation, config.execution.workers)
    write_json(paths.report("validation.json"), result.report)
    write_data_docs(result.outcomes, result.tidy, paths.report("data_docs"), data.fingerprint)
    _stop_if_unusable(result.report)
    write_index(result.index, paths.index_dir, data.dataroot, data.version, data.fingerprint, data.pairs)
    samples = result.report["samples"]
    return Result(samples["kept"], samples["total"], result.report["counts"]["warning"])


def _stop_if_unusable(report: dict[str, Any]) -> None:
    if not report["passed"]:
        failed = [rule for rule in report["rules"] if rule["failed"] and (rule["severity"] == "error" or report["fail_on"] == "warning")]
        lines = [f"  {rule['name']}: {rule['failed']} of {rule['checked']} {_example(rule)}" for rule in failed]
        raise DataError("the data set breaks rules (reports/validation.json has all of them):\n" + "\n".join(lines))
    if not report["samples"]["kept"]:
        raise DataError(f"no usable sample is left; dropped: {report['samples']['dropped']} (reports/validation.json)")


def _example(rule: dict[str, Any]) -> str:
    return f"in {rule['table']}.{rule['field']}, for example {rule['examples'][0]!r}: {rule['example_values'][0]} (rule: {rule['limit']})"


def main() -> int:
    """Entry point of `python -m pipeline.stages.validate`."""
    return stage_main("validate", run)


if __name__ == "__main__":
    sys.exit(main())
