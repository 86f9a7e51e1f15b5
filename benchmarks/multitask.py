"""What the heads cost each other: the three-task model against three single-task models, and balanced against fixed weights.

    python benchmarks/multitask.py [--only NAME ...] [--out DIR]      # in a project whose stages up to topology have run

Trains every variant with the parameters of params.yaml (same seed, same steps) on the project's training scenes, evaluates it on the held-out
ones and prints one JSON document: headline metric of each head by variant, what the balanced three-task model has of the single-task one, and of
the fixed weights. A single-task model has the labels of its own task alone: the dense companion losses of the others are off. A variant that
has its result in DIR is not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from pipeline.config import Config, load_config
from pipeline.io import read_json, write_json
from pipeline.paths import Paths
from pipeline.taxonomy import TASKS

# Dense companion losses of each task; the depth loss belongs to all.
COMPANIONS = {"detection": ("image_boxes", "bev_boxes"), "map": ("image_lines", "bev_lines"), "occupancy": ("image_surface",)}


def variants() -> dict[str, dict[str, Any]]:
    """Overrides of params.yaml by variant."""
    overrides: dict[str, dict[str, Any]] = {"balanced": {}, "fixed": {"train": {"balance": {"method": "fixed"}}}}
    for task in TASKS:
        overrides[task] = {"model": {"tasks": [task]}, "train": {"auxiliary": _off_but(task)}}
    return overrides


def _off_but(task: str) -> dict[str, float]:
    return {name: 0.0 for other, names in COMPANIONS.items() if other != task for name in names}


def run_variant(config: Config, project: Paths, folder: Path) -> dict[str, Any]:
    """Train in `folder` on the project's data and evaluate: headline by head, and seconds of training."""
    from pipeline.dataset.images import ImageStore
    from pipeline.dataset.index import Index
    from pipeline.evaluation.runner import evaluate, headlines
    from pipeline.maps.store import MapStore
    from pipeline.models.predictor import torch_predictor
    from pipeline.training.trainer import train

    paths = Paths(folder)
    for link, target in ((paths.index_dir, project.index_dir), (paths.maps_dir, project.maps_dir), (paths.image_cache_dir, project.image_cache_dir)):
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(target.resolve())
    start = time.perf_counter()
    train(config, paths)
    seconds = time.perf_counter() - start
    index = Index.open(paths.index_dir)
    images = ImageStore(index, config.model.image_size, paths.image_cache_dir).images
    predictor = torch_predictor(paths.float_dir / "model.pt", config, images)
    report = evaluate(predictor, index, MapStore.open(paths.maps_dir), config.evaluate).report
    return {"metrics": headlines(report), "train_seconds": round(seconds, 1)}


def compare(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The shares that the module's text names, as far as their variants were run."""
    metrics = {name: result["metrics"] for name, result in results.items()}
    table: dict[str, Any] = {"variants": results}
    if "balanced" in metrics:
        balanced = metrics["balanced"]
        table["of_single_task"] = {task: balanced[task] / metrics[task][task] for task in TASKS if metrics.get(task, {}).get(task)}
        table["of_fixed_weights"] = {task: balanced[task] / value for task, value in metrics.get("fixed", {}).items() if value}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(variants()), default=list(variants()))
    parser.add_argument("--out", type=Path, default=Path("build/multitask"), help="where models and results are kept")
    options = parser.parse_args()
    project, results = Paths(Path.cwd()), {}
    for name in options.only:
        result = options.out / name / "result.json"
        if not result.is_file():
            config = load_config(project.params, variants()[name])
            write_json(result, run_variant(config, project, options.out / name))
        results[name] = read_json(result)
    print(json.dumps(compare(results), indent=2))


if __name__ == "__main__":
    main()
