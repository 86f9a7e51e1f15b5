"""Compile the INT8 model for the chip: execution plan, memory map, schedule, and a bundle for the vendor's toolchain.

    python -m pipeline.stages.compile

Reads models/multitask_int8.onnx and models/contract.json; for the bundle also models/multitask.onnx and the normalised batches in
models/calibration.npz. Writes build/<chip>/{plan,memory,schedule}.json and build/<chip>/bundle/.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.io import atomic_dir
from pipeline.j6.build import build_chip
from pipeline.j6.chip import load_chip
from pipeline.paths import Paths
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """What the stage did; printed as one line."""

    chip: str
    blocks: int
    cpu_blocks: int
    profile_hash: str

    def __str__(self) -> str:
        return f"{self.blocks} blocks for {self.chip}, {self.cpu_blocks} on the CPU, chip profile {self.profile_hash[:12]}"


def run(config: Config, paths: Paths) -> Result:
    """Compile for `config.j6.chip`.

    Raises:
        ChipError: the chip is unknown or lacks a number.
        ModelError: the ONNX file is broken or has no static cost.
    """
    chip = load_chip(config.j6.chip, config.j6.chip_overrides)
    with atomic_dir(paths.build_dir(chip.name)) as folder:
        plan = build_chip(folder, chip, config.j6, paths)
    return Result(chip.name, len(plan.blocks), sum(block.unit == "CPU" for block in plan.blocks), plan.profile_hash)


def main() -> int:
    """Entry point of `python -m pipeline.stages.compile`."""
    return stage_main("compile", run)


if __name__ == "__main__":
    sys.exit(main())
