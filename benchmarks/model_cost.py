"""Parameters and arithmetic of each block of the model.

    python benchmarks/model_cost.py [mini] [v1_j6m]

Runs one sample through the untrained network of each preset and prints a Markdown table: millions of parameters and GFLOPs (two per
multiply-accumulate) of convolutions and matrix products, as torch counts them. What the exported graph needs on the chip is `bevj6 profile`'s.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import ModelConfig, load_config, preset_overrides
from pipeline.models.multitask import Inputs, MultitaskModel
from pipeline.models.weights import empty_anchors
from pipeline.taxonomy import CAMERAS

PARAMS = Path(__file__).parents[1] / "params.yaml"


def inputs(config: ModelConfig, model: MultitaskModel) -> Inputs:
    """One sample of zeros."""
    points = len(config.view.heights_m) * config.view.cameras_per_point
    point_map = torch.zeros(1, points, *config.view.cells, 2)
    anchors = model.box_anchors.unsqueeze(0)
    features = torch.zeros(1, len(model.box_anchors), config.neck.channels)
    ego2img = torch.eye(4).repeat(1, len(CAMERAS), 1, 1)
    return Inputs(torch.zeros(len(CAMERAS), 3, *config.image_size), ego2img, point_map, point_map, anchors, features)


def cost(config: ModelConfig) -> dict[str, tuple[float, float]]:
    """Millions of parameters and GFLOPs by block, and of the whole."""
    model = MultitaskModel(config, empty_anchors(config)).eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(inputs(config, model))
    flops = {name: sum(by_operator.values()) / 1e9 for name, by_operator in counter.get_flop_counts().items()}
    rows = {name: (parameters(block), block_flops(flops, f"MultitaskModel.{name}")) for name, block in model.named_children()}
    return {**rows, "all": (parameters(model), flops["Global"])}


def block_flops(flops: dict[str, float], name: str) -> float:
    """GFLOPs of a block; of its children where it is a collection that is not called itself."""
    return flops.get(name, sum(value for key, value in flops.items() if key.rpartition(".")[0] == name))


def parameters(block: torch.nn.Module) -> float:
    """Millions of parameters."""
    return sum(parameter.numel() for parameter in block.parameters()) / 1e6


def main() -> None:
    presets = sys.argv[1:] or ["mini", "v1_j6m"]
    costs = {name: cost(load_config(PARAMS, preset_overrides(name)).model) for name in presets}
    print("| block |" + "".join(f" {name}: parameters, M | GFLOPs |" for name in presets))
    print("|---|" + "---|---|" * len(presets))
    for block in costs[presets[0]]:
        print(f"| {block} |" + "".join(f" {costs[name][block][0]:.3f} | {costs[name][block][1]:.2f} |" for name in presets))


if __name__ == "__main__":
    main()
