"""Our reference-size networks under the hardware model beside the vendor's public J6M latencies; nothing is fitted to these.

    python benchmarks/j6_public_rows.py

Exports HENet TinyE (224x224 classifier) and the preset v1_j6m as multi-task and single-task networks with random weights, profiles them for the J6M
and prints simulated and public milliseconds. The networks are our own: docs/j6-model.md says where they differ from the vendor's.
"""

from __future__ import annotations

import tempfile
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


def main() -> None:
    chip = load_chip("j6m")
    config = load_config(ROOT / "params.yaml", preset_overrides("v1_j6m")).model
    variants = {
        "three tasks": (config, 28.38),
        "detection": (config.model_copy(update={"tasks": ("detection",)}), 10.44),
        "map": (config.model_copy(update={"tasks": ("map",)}), 11.46),
        "occupancy at 512x960": (config.model_copy(update={"tasks": ("occupancy",), "image_size": (512, 960)}), 7.65),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = classifier(Path(folder) / "tiny_e.onnx")
        print(f"HENet TinyE 224: simulated {latency_ms(compile_model(path, chip)):.2f} ms, public 0.50 ms")
        for name, (variant, public_ms) in variants.items():
            path = multitask(variant, Path(folder) / "model.onnx")
            int8, int16 = (latency_ms(compile_model(path, chip, CompileOptions(assume_dtype=dtype))) for dtype in ("int8", "int16"))
            print(f"v1_j6m {name}: simulated {int8:.2f} ms (all int8), {int16:.2f} ms (all int16), public {public_ms} ms")
    print(f"chip profile {chip.hash[:12]}")


if __name__ == "__main__":
    main()
