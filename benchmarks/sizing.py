"""What 850 scenes cost, from what single scenes cost on this machine: CPU hours, storage, workers.

    python benchmarks/sizing.py [--project DIR] [--scenes N] [--steps M]

Runs the stages that work scene by scene (synthetic data set, validation, map labels) in a copy of a project (default: this one), with N and with 8 N
scenes, and the training with M and with 3 M steps of each of its two parts: the cost of a scene or a step is the difference, so start-up does not
count. Prints CPU time and stored bytes of a sample (in training: of one pass over it), and both extrapolated to 850 scenes of 40 samples, with 8 and
32 worker processes on the assumption that the work spreads evenly.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SCENES, SAMPLES_PER_SCENE = 850, 40  # v1.0-trainval
LARGER = 8  # times as many scenes in the second run: start-up takes longer than a few scenes do
LONGER = 3  # times as many steps
SPREAD = ("validate", "topology")  # over scenes, by pipeline.execution
PARTS = ("image_steps", "steps")  # of a training
OUTPUTS = {"validate": ("data/index",), "topology": ("data/maps",), "dataset": ("data/nuscenes",)}


@dataclass(frozen=True)
class Cost:
    """CPU seconds and bytes of one sample in one stage, or in one part of the training."""

    stage: str
    cpu_s: float
    stored_bytes: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--scenes", type=int, default=4, help="scenes of the smaller of the two runs")
    parser.add_argument("--steps", type=int, default=8, help="steps of each part of the shorter of the two trainings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        small, large = (measure(options.project, Path(name) / str(count), count) for count in (options.scenes, LARGER * options.scenes))
        samples = (LARGER - 1) * options.scenes * samples_per_scene(options.project)
        training = measure_training(Path(name) / str(LARGER * options.scenes), options.steps)
    costs = [Cost(stage, *((large[stage][part] - small[stage][part]) / samples for part in (0, 1))) for stage in small] + training
    print_table(costs)
    return 0


def samples_per_scene(project: Path) -> int:
    return int(yaml.safe_load((project / "params.yaml").read_text())["dataset"]["synthetic"]["samples_per_scene"])


def measure(project: Path, folder: Path, scenes: int) -> dict[str, tuple[float, int]]:
    """{stage: (CPU seconds, bytes of its outputs)} for a data set of `scenes` scenes, a quarter of them held out."""
    folder.mkdir()
    shutil.copytree(project / "pipeline", folder / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    values = yaml.safe_load((project / "params.yaml").read_text())
    held_out = max(1, scenes // 4)
    values["dataset"]["synthetic"] |= {"train_scenes": scenes - held_out, "val_scenes": held_out}
    values["execution"]["workers"] = 1
    (folder / "params.yaml").write_text(yaml.safe_dump(values))
    found = {}
    for stage in ("dataset", *SPREAD):
        cpu_s = run_stage(folder, stage)
        stored = sum(file.stat().st_size for output in OUTPUTS[stage] for file in (folder / output).rglob("*") if file.is_file())
        found[stage] = (cpu_s, stored)
    return found


def measure_training(folder: Path, steps: int) -> list[Cost]:
    """What one pass over a sample costs in each part of the training, in a folder that `measure` has left."""
    values = yaml.safe_load((folder / "params.yaml").read_text())
    costs = []
    shorter = dict.fromkeys(PARTS, steps)
    run_training(folder, values, shorter)  # fills the image cache, which later passes read
    base = run_training(folder, values, shorter)
    for part in PARTS:
        more = run_training(folder, values, shorter | {part: LONGER * steps}) - base
        costs.append(Cost(f"train.{part}", more / ((LONGER - 1) * steps * values["train"]["batch_scenes"]), 0.0))
    return costs


def run_training(folder: Path, values: dict[str, Any], steps: dict[str, int]) -> float:
    values["train"] |= steps | {"checkpoint_every": 10**6}
    (folder / "params.yaml").write_text(yaml.safe_dump(values))
    return run_stage(folder, "train")


def run_stage(folder: Path, stage: str) -> float:
    """CPU seconds of a stage."""
    before = children_cpu_s()
    subprocess.run([sys.executable, "-m", f"pipeline.stages.{stage}"], cwd=folder, check=True, stdout=subprocess.DEVNULL, env=os.environ)
    return children_cpu_s() - before


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def print_table(costs: list[Cost]) -> None:
    samples = SCENES * SAMPLES_PER_SCENE
    print(f"{'':17s} {'one sample':>24s}   {SCENES} scenes of {SAMPLES_PER_SCENE} samples")
    print(f"{'stage':17s} {'CPU s':>12s} {'KB':>11s} {'CPU h':>10s} {'8 workers h':>12s} {'32 workers h':>13s} {'GB':>8s}")
    for cost in costs:
        hours, stored = cost.cpu_s * samples / 3600, cost.stored_bytes * samples / 1e9
        print(f"{cost.stage:17s} {cost.cpu_s:12.4f} {cost.stored_bytes / 1e3:11.1f} {hours:10.2f} {hours / 8:12.2f} {hours / 32:13.2f} {stored:8.1f}")


if __name__ == "__main__":
    sys.exit(main())
