"""Stage dataset: make or find the data set and describe it.

    python -m pipeline.stages.dataset

Reads the section `dataset` of params.yaml. Source synthetic: writes data/nuscenes. Source nuscenes: checks the tables of
`dataset.dataroot`. Both: writes data/dataset.json (counts, content fingerprint, what the data set provides, splits).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.dataset.source import describe
from pipeline.io import write_json
from pipeline.paths import Paths
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """What the stage did; printed as one line."""

    scenes: int
    samples: int
    boxes: int
    fingerprint: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        counts = f"{self.scenes} scenes, {self.samples} samples, {self.boxes} boxes, fingerprint {self.fingerprint[:12]}"
        return " ".join([f"{counts}.", *self.notes])


def run(config: Config, paths: Paths) -> Result:
    """Generate or check the data set and describe it.

    Raises:
        DataError: the data set cannot be used.
        ConfigError: `dataset.val_scenes` does not fit the data set.
    """
    if config.dataset.source == "synthetic":
        from pipeline.dataset.synthetic import generate

        generate(config.dataset.synthetic, paths.synthetic_dataroot, config.execution.workers)
    # An output of the stage in dvc.yaml, so it exists for every source. It is never emptied: a user's own data may lie there.
    paths.synthetic_dataroot.mkdir(parents=True, exist_ok=True)
    description = describe(config.dataset, paths)
    write_json(paths.dataset_json, description)
    counts = description["counts"]
    return Result(counts["scene"], counts["sample"], counts["sample_annotation"], description["fingerprint"], tuple(description["notes"]))


def main() -> int:
    """Entry point of `python -m pipeline.stages.dataset`."""
    return stage_main("dataset", run)


if __name__ == "__main__":
    sys.exit(main())
