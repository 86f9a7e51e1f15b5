"""Our reference-size networks under the hardware model beside the vendor's public J6M latencies; nothing is fitted to these.

    python benchmarks/j6_public_rows.py

Exports HENet TinyE (224x224 classifier) and the preset v1_j6m as multi-task and single-task networks with random weights, profiles them for the J6M,
prints simulated and public milliseconds, what each task costs alone and what leaving it out of the three saves, and draws docs/j6-public.svg. The
networks are our own: docs/j6-model.md says where they differ from the vendor's.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pipeline.config import BackboneConfig, ModelConfig, load_config, preset_overrides
from pipeline.j6.chip import load_chip
from pipeline.j6.compiler import CompileOptions, compile_model
from pipeline.j6.profile import latency_ms
from pipeline.models.anchors import build_anchors
from pipeline.models.export import example_inputs, to_onnx
from pipeline.models.henet import HENetClassifier
from pipeline.models.multitask import MultitaskModel

ROOT = Path(__file__).resolve().parents[1]
TINY_E = BackboneConfig(depths=(3, 3, 8, 6), widths=(48, 96, 192, 384), blocks=("GroupDWCB", "GroupDWCB", "AltDWCB", "DWCB"))


def multitask(config: ModelConfig, path: Path) -> Path:
    random = np.random.default_rng(0)
    centers = random.uniform(-40, 40, (600, 3)).astype(np.float32)
    lines = [random.uniform(-15, 15, (20, 2)).astype(np.float32) for _ in range(200)]
    model = MultitaskModel(config, build_anchors(config, centers, lines, 0)).eval()
    to_onnx(model, example_inputs(model), path)
    return path


def classifier(path: Path) -> Path:
    torch.onnx.export(HENetClassifier(TINY_E).eval(), (torch.zeros(1, 3, 224, 224),), str(path), opset_version=17, dynamo=False)
    return path


@dataclass(frozen=True)
class Row:
    """A network: simulated ms with all activations int8 and all int16, and the vendor's public ms for an int8/int16 mix."""

    network: str
    int8_ms: float
    int16_ms: float
    public_ms: float


def row_of(name: str, path: Path, public_ms: float) -> Row:
    chip = load_chip("j6m")
    int8, int16 = (latency_ms(compile_model(path, chip, CompileOptions(assume_dtype=dtype))) for dtype in ("int8", "int16"))
    return Row(name, int8, int16, public_ms)


def print_tasks(config: ModelConfig, path: Path) -> None:
    """For every task, int8 ms: alone, and what the network of all tasks saves when it is left out; the tasks share backbone and neck."""
    chip = load_chip("j6m")

    def int8_ms(tasks: tuple[str, ...]) -> float:
        return latency_ms(compile_model(multitask(config.model_copy(update={"tasks": tasks}), path), chip))

    together = int8_ms(config.tasks)
    alone = {task: int8_ms((task,)) for task in config.tasks}
    print(f"together {together:.2f} ms, sum of the tasks alone {sum(alone.values()):.2f} ms")
    for task in config.tasks:
        others = tuple(other for other in config.tasks if other != task)
        print(f"| {task} | {alone[task]:.2f} ms | {together - int8_ms(others):.2f} ms |")


def draw(rows: list[Row], path: Path) -> None:
    """The range from all int8 to all int16 as a bar, the public figure as a point."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "j6-public"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3))
    for y, row in enumerate(rows):
        axes.barh(
            y,
            row.int16_ms - row.int8_ms,
            left=row.int8_ms,
            height=0.5,
            color="#2f6fb0",
            alpha=0.6,
            label="simulated, int8 to int16" if not y else None,
        )
        axes.plot(row.public_ms, y, "o", color="#b23b3b", label="public J6M" if not y else None)
    axes.set(xscale="log", xlabel="latency (ms)", yticks=range(len(rows)), yticklabels=[row.network for row in rows])
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    config = load_config(ROOT / "params.yaml", preset_overrides("v1_j6m")).model
    variants = {
        "three tasks": (config, 28.38),
        "detection": (config.model_copy(update={"tasks": ("detection",)}), 10.44),
        "map": (config.model_copy(update={"tasks": ("map",)}), 11.46),
        "occupancy, 512x960": (config.model_copy(update={"tasks": ("occupancy",), "image_size": (512, 960)}), 7.65),
    }
    with tempfile.TemporaryDirectory() as folder:
        print_tasks(config, Path(folder) / "model.onnx")
        rows = [row_of("HENet TinyE, 224x224 classifier", classifier(Path(folder) / "tiny_e.onnx"), 0.50)]
        rows += [row_of(name, multitask(variant, Path(folder) / "model.onnx"), public_ms) for name, (variant, public_ms) in variants.items()]
    for row in rows:
        print(f"| {row.network} | {row.int8_ms:.2f} ms | {row.int16_ms:.2f} ms | {row.public_ms:.2f} ms |")
    draw(rows, ROOT / "docs" / "j6-public.svg")
    print(f"chip profile {load_chip('j6m').hash[:12]}")


if __name__ == "__main__":
    main()
