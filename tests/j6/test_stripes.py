"""Chains of blocks in pieces: halo rows by hand, weights held or loaded again, segments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from pipeline.errors import ChipError, ConfigError
from pipeline.j6.chip import load_chip
from pipeline.j6.compiler import CompileOptions, compile_model, cut_points
from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_onnx
from pipeline.j6.stripes import halo_rows
from tests.j6.conftest import Net


def kept(net: Net, tmp_path: Path, output: str) -> dict[str, int]:
    fused = fuse(import_onnx(net.save(tmp_path / "m.onnx", output)))
    inner = [name for block in fused.blocks for name in block.outputs if name != output]
    return halo_rows(fused, range(len(fused.blocks)), inner)


def test_halo_of_two_convolutions_is_kernel_minus_one(tmp_path: Path):
    net = Net()
    a = net.conv(net.input("x", (1, 8, 32, 32)), "a", 8, 8, kernel=1)
    net.conv(net.conv(a, "b", 8, 8, kernel=3), "c", 8, 8, kernel=5)
    assert kept(net, tmp_path, "c") == {"a": 2, "b": 4}


def test_a_shortcut_waits_for_the_longer_way(tmp_path: Path):
    """Two 3x3 convolutions lag two rows behind; the sum still needs these rows of the shortcut."""
    net = Net()
    a = net.conv(net.input("x", (1, 8, 32, 32)), "a", 8, 8, kernel=1)
    net.op("Max", [a, net.conv(net.conv(a, "b", 8, 8), "c", 8, 8)], "sum")
    assert kept(net, tmp_path, "sum") == {"a": 2, "b": 2}


def test_halo_counts_in_rows_of_the_tensor_after_a_stride(tmp_path: Path):
    """3x3 with stride 2 reads one row above and one below: a lag of one output row is two input rows, and one above."""
    net = Net()
    a = net.conv(net.input("x", (1, 8, 32, 32)), "a", 8, 8, kernel=1)
    net.conv(a, "b", 8, 8, stride=2)
    assert kept(net, tmp_path, "b") == {"a": 3}


def test_a_chain_keeps_large_maps_off_the_bus(tmp_path: Path, j6m):
    """Each map is 4 MiB: beyond on-chip memory whole, easily in bands."""
    net = Net()
    a = net.conv(net.input("x", (1, 16, 256, 256)), "a", 16, 64)
    net.conv(net.conv(a, "b", 64, 64), "c", 64, 8)
    path = net.save(tmp_path / "m.onnx", "c")
    tiled, plain = (compile_model(path, j6m, CompileOptions(optimize_level=level)) for level in ("O2", "O1"))
    (chain,) = tiled.chains
    assert chain.blocks == (0, 1, 2) and chain.tensors == ("a", "b") and chain.kind == "rows"
    assert chain.halo_bytes == (2 + 2) * 64 * 256
    assert sum(block.stream_bytes for block in tiled.blocks) == 0
    assert sum(block.stream_bytes for block in plain.blocks) == 4 * 64 * 256 * 256
    assert tiled.schedule.makespan_ms < plain.schedule.makespan_ms


def test_weights_beyond_a_known_buffer_are_loaded_again_for_every_band(tmp_path: Path):
    net = Net()
    a = net.conv(net.input("x", (1, 16, 256, 256)), "a", 16, 64)
    net.conv(net.conv(a, "b", 64, 64), "c", 64, 8)
    path = net.save(tmp_path / "m.onnx", "c")
    plan = compile_model(path, load_chip("j6m", {"weight_buffer_bytes": 4096}), CompileOptions(compile_mode="bandwidth"))
    (chain,) = plan.chains
    weights = sum(block.weight_bytes for block in plan.blocks)
    assert chain.weight_passes == chain.pieces > 1
    assert sum(block.stream_bytes for block in plan.blocks) == (chain.pieces - 1) * weights


def test_joining_spilled_tensors_moves_only_what_comes_from_the_chip(tmp_path: Path):
    """Two inputs of a Concat and its result lie in DDR: the parts are written where they belong."""
    net = Net()
    x = net.conv(net.input("x", (1, 8, 64, 64)), "x0", 8, 64)
    a, b = net.conv(x, "a", 64, 64), net.conv(x, "b", 64, 64)
    joined = net.op("Concat", [a, b], "ab", axis=1)
    weight = net.weight("w", (64 * 64, 8))
    net.weights.append(numpy_helper.from_array(np.array([128, 4096], np.int64), "shape"))
    net.op("MatMul", [net.op("Reshape", [joined, "shape"], "flat"), weight], "mm")
    chip = load_chip("j6m", {"l1m_bytes": 65536})
    plan = compile_model(net.save(tmp_path / "m.onnx", "mm"), chip, CompileOptions(optimize_level="O1"))
    concat = next(block for block in plan.blocks if block.kind == "Concat")
    assert concat.stream_bytes == 0
    assert next(block for block in plan.blocks if block.name == "a").stream_out_bytes == 64 * 64 * 64


def test_cut_points_by_hand():
    """Limit 10: the cheapest place in the last 30 % of a segment; a block over the limit stays alone."""
    assert cut_points([4, 4, 2, 4, 4], [0, 9, 5, 9, 9], 10) == [2]
    assert cut_points([4, 4, 2, 4, 4], [0, 9, 9, 5, 9], 10) == [3]
    assert cut_points([20, 1, 1], [0, 0, 0], 10) == [1]
    assert cut_points([1, 1], [0, 0], 10) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CompileOptions(compile_mode="fast"), "compile_mode is 'fast'; rule: one of latency, bandwidth, balance"),
        (CompileOptions(max_time_per_fc_us=500), "max_time_per_fc is 500; rule: 0, or 1000"),
        (CompileOptions(optimize_level="O3"), "optimize_level is 'O3'"),
        (CompileOptions(balance_factor=101), "balance_factor is 101; rule: 0..100"),
    ],
)
def test_wrong_options_are_named(multitask: Path, j6m, options, message):
    with pytest.raises(ConfigError, match=message):
        compile_model(multitask, j6m, options)


def test_what_a_chip_does_not_have_is_refused(multitask: Path, j6m):
    with pytest.raises(ChipError, match="core_num is 2; the chip has 1"):
        compile_model(multitask, j6m, CompileOptions(core_num=2))
    with pytest.raises(ChipError, match="no float units"):
        compile_model(multitask, j6m, CompileOptions(assume_dtype="float16"))
    assert compile_model(multitask, load_chip("j6p"), CompileOptions(assume_dtype="float16", core_num=4)).schedule.makespan_ms > 0
