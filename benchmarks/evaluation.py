"""What the accuracy of a trained model is worth, and what measuring it costs.

    python benchmarks/evaluation.py                                                  # in a project whose stage evaluate has run
    python benchmarks/evaluation.py --devkit DATAROOT VERSION RESULTS.json           # time against nuscenes-devkit

The first form evaluates the network before its first training step (anchors from the training labels, random weights) on the held-out scenes
and prints, by head, the headline metric of the trained model, the untrained one and the constant prior with their ratios. The second evaluates a
nuScenes results file over all samples of a version with the devkit's DetectionEval and with ours, and prints seconds and metrics of both. Each
prints one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.config import Config, load_config
from pipeline.paths import Paths


def against_untrained(config: Config, paths: Paths) -> dict[str, Any]:
    """Headline metrics of the trained model, the untrained one and the prior, by head."""
    import torch

    from pipeline.dataset.images import ImageStore
    from pipeline.dataset.index import Index
    from pipeline.evaluation.runner import evaluate, headlines
    from pipeline.io import read_json
    from pipeline.maps.store import MapStore
    from pipeline.models.predictor import torch_predictor
    from pipeline.models.weights import save_model
    from pipeline.training.batches import BatchLoader
    from pipeline.training.labels import LabelStore
    from pipeline.training.trainer import build_model

    report = read_json(paths.report("eval_float.json"))
    index, maps = Index.open(paths.index_dir), MapStore.open(paths.maps_dir)
    labels = LabelStore(index, maps)
    loader = BatchLoader(config, index, ImageStore(index, config.model.image_size, paths.image_cache_dir), labels)
    torch.manual_seed(config.train.seed)
    model = build_model(config, labels, [loader.record(token) for token in index.tokens("train")])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "untrained.pt"
        save_model(path, config.model, model.state_dict(), config.model.tasks)
        start = time.perf_counter()
        untrained = headlines(evaluate(torch_predictor(path, config), index, maps, config.evaluate).report)
        seconds = time.perf_counter() - start
    heads = {}
    for head, value in headlines(report).items():
        base = max(untrained.get(head, 0.0), headlines(report["prior"]).get(head, 0.0))
        heads[head] = {
            "trained": value,
            "untrained": untrained.get(head),
            "prior": headlines(report["prior"]).get(head),
            "times_the_better_of_both": value / base if base else None,
        }
    return {"heads": heads, "evaluation_seconds": seconds, "samples": report["samples"]}


def against_devkit(dataroot: Path, version: str, results: Path) -> dict[str, Any]:
    """Seconds and metrics of DetectionEval and of our evaluation on the same results file, tables already read by each."""
    import nuscenes.eval.detection.evaluate as devkit
    from nuscenes import NuScenes
    from nuscenes.eval.common.config import config_factory

    nusc = NuScenes(version, str(dataroot), verbose=False)
    tokens = [sample["token"] for sample in nusc.sample]
    # DetectionEval knows the official splits only; here every sample of the version is evaluated.
    devkit.load_gt = lambda nusc, split, box, verbose=False: devkit.load_gt_of_sample_tokens(nusc, tokens, box, verbose=verbose)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        official = devkit.DetectionEval(nusc, config_factory("detection_cvpr_2019"), str(results), "mini_val", folder, verbose=False)
        metrics, _ = official.evaluate()
    devkit_seconds = time.perf_counter() - start
    ours, our_seconds = ours_on_results(dataroot, version, results)
    return {
        "devkit": {"seconds": devkit_seconds, "mAP": metrics.mean_ap, "NDS": metrics.nd_score},
        "ours": {"seconds": our_seconds, "mAP": ours["mAP"], "NDS": ours["NDS"]},
        "ratio_of_seconds": our_seconds / devkit_seconds,
    }


def ours_on_results(dataroot: Path, version: str, results: Path) -> tuple[dict[str, Any], float]:
    """Our detection metrics (with the tables by range) of a results file, and the seconds from the index on."""
    from pipeline.dataset.build import build_index
    from pipeline.dataset.index import Index, write_index
    from pipeline.dataset.tables import read_tables
    from pipeline.evaluation.boxes import read_submission
    from pipeline.evaluation.detection import evaluate_detection
    from pipeline.evaluation.ground_truth import detection_truth, ego_origins_m

    tables = read_tables(dataroot, version)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "index"
        write_index(build_index(tables, {"val": tables.scene["name"].to_pylist()}), directory, str(dataroot), version, "")
        index = Index.open(directory)
        start = time.perf_counter()
        tokens = index.tokens("val")
        truth = detection_truth(index, tokens)
        predictions = read_submission(results, tokens, ego_origins_m(index, tokens))
        report = evaluate_detection(truth.boxes, predictions, truth.bike_racks, len(tokens))
        return report, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devkit", nargs=3, metavar=("DATAROOT", "VERSION", "RESULTS"), help="compare with nuscenes-devkit on a results file")
    options = parser.parse_args()
    if options.devkit:
        dataroot, version, results = options.devkit
        report = against_devkit(Path(dataroot), version, Path(results))
    else:
        report = against_untrained(load_config(Path("params.yaml")), Paths(Path.cwd()))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
