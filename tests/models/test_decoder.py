from __future__ import annotations

import torch

from pipeline.models.heads.decoder import LinearNorm


def trained_layer(shared_part: float) -> tuple[LinearNorm, torch.Tensor]:
    """A layer that has seen instances (2, 30, 8) with a large common part, and these instances."""
    torch.manual_seed(0)
    layer = LinearNorm(8, 16)
    x = torch.randn(2, 30, 8) + shared_part
    for _ in range(200):
        layer(x)
    return layer, x


def test_the_part_that_all_instances_share_switches_no_unit_off() -> None:
    layer, x = trained_layer(shared_part=100.0)
    active = (layer(x) > 0).flatten(0, 1).float().mean(dim=0)
    assert float(active.min()) > 0.2 and float(active.max()) < 0.8


def test_as_one_linear_layer_it_gives_what_batch_norm_gives() -> None:
    layer, x = trained_layer(shared_part=3.0)
    layer.eval()
    expected = layer.norm(layer.linear(x).flatten(0, 1)).reshape(2, 30, 16)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
