"""A check of the geometry on real data: the model must be able to learn the complete real key frame by heart.

    python benchmarks/overfit_real.py --dataroot DATAROOT [--steps N]

DATAROOT holds nuScenes tables (v1.0-trainval) with the images and boxes of scene-0061. Trains on that scene alone, without augmentation, and scores
the same samples: a wrong sign, frame or intrinsic matrix after resize and crop puts the boxes where no image feature can tell them apart, and the
mean precision stays low. Prints one JSON document. (nuScenes data: CC BY-NC-SA 4.0.)
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import load_config, merge
from pipeline.dataset.images import ImageStore
from pipeline.dataset.index import Index
from pipeline.evaluation.runner import evaluate
from pipeline.maps.store import MapStore
from pipeline.models.predictor import torch_predictor
from pipeline.paths import Paths
from pipeline.stages import dataset, topology, train, validate

HELD_OUT = ["scene-0003", "scene-0103"]  # leaves one key frame to train on, of scene-0061
SHOWN = {"AP": "AP", "boxes": "ground_truth", "ATE_m": "ATE", "ASE": "ASE", "AOE_rad": "AOE"}


def overrides(dataroot: Path, steps: int) -> dict[str, Any]:
    """Changes to params.yaml.

    The radius of suppression is small: real pedestrians walk side by side. The weights are averaged over ten steps instead of a hundred, which in so
    short a training would reach back to where nothing was learned yet.
    """
    return {
        "dataset": {
            "source": "nuscenes", "dataroot": str(dataroot), "version": "v1.0-trainval", "watch": str(dataroot / "v1.0-trainval"),
            "val_scenes": HELD_OUT,
        },
        "validation": {"fail_on": "never"},
        "model": {"detection": {"nms_radius_m": [0.5] * 10}},
        "train": {
            "steps": steps, "image_steps": steps // 2, "batch_scenes": 1, "processes": 1, "threads": 2, "ema_decay": 0.9,
            "augmentation": {"rotation_deg": 0.0, "flip_probability": 0.0, "photometric": 0.0},
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataroot", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    shipped = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        paths = Paths(Path(folder))
        paths.params.write_text(yaml.safe_dump(merge(shipped, overrides(options.dataroot.resolve(), options.steps))), encoding="utf-8")
        config = load_config(paths.params)
        for stage in (dataset, validate, topology):
            stage.run(config, paths)
        start = time.perf_counter()
        train.run(config, paths)
        seconds = time.perf_counter() - start
        index = Index.open(paths.index_dir)
        images = ImageStore(index, config.model.image_size, paths.image_cache_dir).images
        predictor = torch_predictor(paths.float_dir / "model.pt", config, images)
        report = evaluate(predictor, index, MapStore.open(paths.maps_dir), config.evaluate, split="train").report
        found = report["detection"]
        classes = {name: {shown: row[key] for shown, key in SHOWN.items()} for name, row in found["per_class"].items() if row["ground_truth"]}
        result = {"samples": report["samples"], "seconds": round(seconds, 1), "mAP": found["mAP_occurring"], "map_AP": report["map"]["AP"]}
        print(json.dumps({**result, "per_class": classes}, indent=2))


if __name__ == "__main__":
    main()
