"""Laws that hold for every graph: memory, dependencies, exclusive units, lower bounds, monotonicity."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.j6.chip import ChipProfile, load_chip
from pipeline.j6.compiler import Compilation, CompileOptions, block_producers, compile_graph
from pipeline.j6.cost import BlockCost
from pipeline.j6.fuse import FusedGraph, fuse
from pipeline.j6.graph import import_onnx
from pipeline.j6.memory import Buffer, plan_arena
from pipeline.j6.plan import Plan
from pipeline.j6.schedule import BUS_LANES, Schedule, critical_path_ms, schedule
from pipeline.j6.tile import IN_PLACE_KINDS, block_traffic, lifetimes, output_bytes, tensor_bytes
from tests.j6.conftest import Net

TOLERANCE_MS = 1e-6  # plan times are rounded to 1e-9 ms, a sum of some hundred of them to far less than this


@cache
def chip(**changes: float) -> ChipProfile:
    return load_chip("j6m", changes)


@st.composite
def graphs(draw: st.DrawFn) -> FusedGraph:
    """A random network of convolutions, activations, sums, concatenations, transposes and matrix products."""
    net = Net()
    size = draw(st.sampled_from([8, 32, 96]))
    tensors = [(net.input("images", (1, 3, size, size)), 3)]
    for number in range(draw(st.integers(2, 12))):
        name = f"n{number}"
        source, channels = tensors[draw(st.integers(0, len(tensors) - 1))]
        kind = draw(st.sampled_from(["conv", "relu", "sigmoid", "add", "concat", "attention"]))
        if kind == "conv":
            width = draw(st.sampled_from([8, 24, 64, 200]))
            tensors.append((net.conv(source, name, channels, width, kernel=draw(st.sampled_from([1, 3]))), width))
        elif kind in ("relu", "sigmoid"):
            tensors.append((net.op(kind.capitalize(), [source], name), channels))
        elif kind == "attention":
            turned = net.op("Transpose", [source], f"{name}.t", perm=[0, 1, 3, 2])
            weights = net.op("Softmax", [net.op("MatMul", [source, turned], f"{name}.qk")], f"{name}.s", axis=-1)
            tensors.append((net.op("MatMul", [weights, source], name), channels))
        else:
            twins = [entry for entry in tensors if entry[1] == channels]
            other = twins[draw(st.integers(0, len(twins) - 1))][0]
            joined = kind == "concat"
            result = net.op("Concat", [source, other], name, axis=1) if joined else net.op("Add", [source, other], name)
            tensors.append((result, 2 * channels if joined else channels))
    outputs = sorted({tensors[-1][0], tensors[draw(st.integers(1, len(tensors) - 1))][0]})
    with tempfile.TemporaryDirectory() as folder:
        return fuse(import_onnx(net.save(Path(folder) / "m.onnx", *outputs)))


def compiled(fused: FusedGraph, prefetch: int = 0, **changes: float) -> Plan:
    return compile_graph(fused, chip(**changes), CompileOptions(prefetch=prefetch))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 12)), max_size=25), st.sampled_from([64, 256]))
def test_no_two_live_buffers_overlap(entries, alignment):
    buffers = [Buffer(f"b{i}", size, start, start + length) for i, (size, start, length) in enumerate(entries)]
    arena = plan_arena(buffers, alignment)
    assert len(arena.buffers) == len(buffers)
    for i, left in enumerate(arena.buffers):
        assert left.offset % alignment == 0
        for right in arena.buffers[i + 1 :]:
            together = left.start <= right.end and right.start <= left.end
            assert not together or left.offset + left.bytes <= right.offset or right.offset + right.bytes <= left.offset
    assert arena.lower_bound_bytes <= arena.peak_bytes <= arena.first_fit_bytes


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from([2e4, 1.5e6]))
def test_on_chip_residents_fit_and_live_long_enough(fused, capacity):
    plan = compiled(fused, l1m_bytes=capacity)
    assert plan.memory.onchip.peak_bytes <= capacity
    lives = lifetimes(fused)
    spaces = {f"chain {chain.blocks[0]}-{chain.blocks[-1]}" for chain in plan.chains}
    for placed in (*plan.memory.onchip.buffers, *plan.memory.temporary.buffers):
        if placed.name in spaces:
            continue
        readers = [block.index for block in fused.blocks if placed.name in block.inputs]
        assert placed.start <= min(readers, default=placed.start)
        assert placed.end >= max(readers, default=placed.start) and placed.end == lives[placed.name].end


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 3))
def test_dependencies_exclusive_lanes_and_lower_bounds(fused, prefetch):
    plan = compiled(fused, prefetch)
    compute_start = {}
    for task in plan.schedule.tasks:
        if task.lane not in (*BUS_LANES, "APM", "CPU") or task.lane == "STREAM":
            compute_start.setdefault(task.block, task.start_ms)
    for block in plan.blocks:
        for producer in block.producers:
            assert producer < block.index
            assert compute_start.get(block.index, plan.schedule.finish_ms[block.index]) >= plan.schedule.finish_ms[producer] - TOLERANCE_MS
    _assert_lanes_exclusive(plan.schedule)
    makespan = plan.schedule.makespan_ms
    assert all(busy <= makespan + TOLERANCE_MS for busy in plan.schedule.busy_ms().values())
    assert makespan >= critical_path_ms([block.cost() for block in plan.blocks], block_producers(fused)) - TOLERANCE_MS
    assert abs(sum(plan.schedule.increments_ms()) - makespan) < TOLERANCE_MS


def _assert_lanes_exclusive(result: Schedule) -> None:
    resources: dict[str, list[tuple[float, float]]] = {}
    for task in result.tasks:
        resources.setdefault("BUS" if task.lane in BUS_LANES else task.lane, []).append((task.start_ms, task.end_ms))
    for spans in resources.values():
        spans.sort()
        assert all(first[1] <= second[0] + TOLERANCE_MS for first, second in pairwise(spans))


@settings(max_examples=60, deadline=None)
@given(
    graphs(),
    st.sampled_from(["ddr_peak_gbps", "peak_tops_int8", "tae_utilization", "element_gbytes_per_tops", "warp_gbytes_per_tops"]),
    st.floats(1.0, 4.0),
    st.integers(0, 2),
)
def test_more_bandwidth_or_faster_units_are_never_slower(fused, key, factor, prefetch):
    base = compiled(fused, prefetch).schedule.makespan_ms
    faster = compiled(fused, prefetch, **{key: chip().number(key) * factor}).schedule.makespan_ms
    assert faster <= base + TOLERANCE_MS


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12), st.integers(0, 3), st.data())
def test_shortening_one_duration_never_lengthens_the_schedule(durations, prefetch, data):
    def cost(load: float, unit: float, stream: float, store: float) -> BlockCost:
        return BlockCost((("TAE" if unit < 0.5 else "VAE", unit),), 0.01, 0, 0, 0, 0, 0, load, stream, store, 0, 0)

    costs = [cost(*entry) for entry in durations]
    producers = [() if i == 0 else (data.draw(st.integers(0, i - 1)),) for i in range(len(costs))]
    victim = data.draw(st.integers(0, len(costs) - 1))
    field = data.draw(st.sampled_from(["load_ms", "stream_ms", "store_ms", "launch_ms"]))
    shorter = [replace(c, **{field: getattr(c, field) / 2}) if i == victim else c for i, c in enumerate(costs)]
    assert schedule(shorter, producers, prefetch).makespan_ms <= schedule(costs, producers, prefetch).makespan_ms + TOLERANCE_MS


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from([2e4, 1.5e6]))
def test_bytes_loaded_and_stored_are_what_the_tensors_need(fused, capacity):
    """Weights once, model outputs once, a spilled tensor once by its writer and once by each reader; data that lies in place does not move."""
    plan = compiled(fused, l1m_bytes=capacity)
    assert sum(block.weight_bytes for block in plan.blocks) == sum(sum(fused.tensors[n].bytes for n in block.weights) for block in fused.blocks)
    assert sum(block.output_bytes for block in plan.blocks) == sum(output_bytes(fused, fused.tensors[name], chip()) for name in fused.outputs)
    spilled = {placed.name for placed in plan.memory.temporary.buffers}
    for block, planned in zip(fused.blocks, plan.blocks, strict=True):
        reads = sum(tensor_bytes(fused.tensors[n], 16) for n in block.inputs if n in spilled or n in fused.outputs)
        writes = sum(tensor_bytes(fused.tensors[n], 16) for n in block.outputs if n in spilled)
        passes = plan.chains[planned.chain].weight_passes if planned.chain >= 0 else 1
        again = (passes - 1) * planned.weight_bytes
        if block.kind in IN_PLACE_KINDS:
            assert planned.stream_in_bytes <= reads + again and planned.stream_out_bytes <= writes
        else:
            assert (planned.stream_in_bytes, planned.stream_out_bytes) == (reads + again, writes)


def test_parts_of_a_tensor_in_ddr_are_not_padded_one_by_one(tmp_path):
    """200 channels are padded to 208 (channel alignment 16), but two of them side by side are 400 and need no padding."""
    net = Net()
    images = net.input("images", (1, 3, 8, 8))
    first = net.conv(images, "first", 3, 200)
    joined = net.op("Concat", [first, net.op("Relu", [first], "second")], "joined", axis=1)
    fused = fuse(import_onnx(net.save(tmp_path / "m.onnx", net.op("Sigmoid", [joined], "out"))))
    (concat,) = [block for block in fused.blocks if block.kind == "Concat"]
    placement = dict.fromkeys(concat.inputs, "l1m") | {"joined": "ddr"}
    assert block_traffic(fused, concat, placement, chip(), nv12=False).stream_out == 400 * 8 * 8


@settings(max_examples=40, deadline=None)
@given(graphs(), st.sampled_from([2e4, 2e5]), st.sampled_from([None, 2e4]))
def test_chains_fit_on_chip_and_hold_what_their_pieces_need(fused, capacity, weight_buffer):
    changes = {"l1m_bytes": capacity} | ({"weight_buffer_bytes": weight_buffer} if weight_buffer else {})
    plan = compiled(fused, **changes)
    for chain in plan.chains:
        weights = sum(plan.blocks[index].weight_bytes for index in chain.blocks)
        assert chain.halo_bytes <= chain.workspace_bytes <= capacity
        assert chain.pieces >= 1 and chain.weight_passes == (chain.pieces if weight_buffer and weights > weight_buffer else 1)
        largest = max(tensor_bytes(fused.tensors[name], 16) for name in chain.tensors)
        assert chain.workspace_bytes * chain.pieces >= largest


@settings(max_examples=40, deadline=None)
@given(graphs(), st.data(), st.sampled_from([2e4, 1.5e6]))
def test_halves_are_never_quicker_than_the_whole_by_more_than_the_boundary(fused, data, capacity):
    """Cut anywhere: both halves compiled for themselves, with what crosses the cut stored and loaded, against the whole."""
    work = Compilation(fused, chip(l1m_bytes=capacity), CompileOptions())
    cut = data.draw(st.integers(1, max(len(fused.blocks) - 1, 1)))
    whole, halves = work.best(), work.best(frozenset({cut}) if cut < len(fused.blocks) else frozenset())
    lives = lifetimes(fused)
    crossing = [name for name, life in lives.items() if 0 <= life.start < cut <= life.end and name not in fused.outputs]
    readers = {name: sum(name in block.inputs for block in fused.blocks) for name in crossing}
    boundary = sum((1 + readers[name]) * tensor_bytes(fused.tensors[name], 16) for name in crossing) * work.rates.ddr_ms
    assert whole.ms <= halves.ms + boundary + TOLERANCE_MS


@settings(max_examples=30, deadline=None)
@given(graphs(), st.integers(1, 3))
def test_more_cores_or_more_shared_memory_are_never_slower(fused, cores):
    big = load_chip("j6p")
    few, more = (compile_graph(fused, big, CompileOptions(core_num=count)) for count in (cores, cores + 1))
    assert more.schedule.makespan_ms <= few.schedule.makespan_ms + TOLERANCE_MS
    assert all(block.cores <= cores for block in few.blocks)


@settings(max_examples=30, deadline=None)
@given(graphs(), st.sampled_from([1000.0, 1500.0]))
def test_segments_keep_their_limit_unless_one_block_breaks_it(fused, limit_us):
    slow = chip(tae_utilization=0.002, element_gbytes_per_tops=0.02)
    plan = compile_graph(fused, slow, CompileOptions(max_time_per_fc_us=limit_us))
    assert [segment.first for segment in plan.segments] == [0, *(segment.last + 1 for segment in plan.segments[:-1])]
    assert plan.segments[-1].last == len(plan.blocks) - 1
    assert abs(sum(segment.ms for segment in plan.segments) - plan.schedule.makespan_ms) < TOLERANCE_MS
    assert all(segment.ms <= limit_us / 1e3 or segment.first == segment.last for segment in plan.segments)
    free = compile_graph(fused, slow, CompileOptions())
    assert plan.schedule.makespan_ms >= free.schedule.makespan_ms - TOLERANCE_MS


@settings(max_examples=30, deadline=None)
@given(graphs(), st.sampled_from([2e4, 2e5]))
def test_each_mode_is_best_at_what_it_is_for(fused, capacity):
    plans = {mode: compile_graph(fused, chip(l1m_bytes=capacity), CompileOptions(compile_mode=mode)) for mode in ("latency", "bandwidth", "balance")}
    times = {mode: plan.schedule.makespan_ms for mode, plan in plans.items()}
    moved = {mode: sum(block.ddr_bytes for block in plan.blocks) for mode, plan in plans.items()}
    assert times["latency"] <= min(times.values()) + TOLERANCE_MS
    assert moved["bandwidth"] <= min(moved.values())
