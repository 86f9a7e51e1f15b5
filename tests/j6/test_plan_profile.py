from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from onnx import numpy_helper

from pipeline.errors import ConfigError, DataError, ModelError
from pipeline.j6.assign import operator_table
from pipeline.j6.chip import known_chips, load_chip
from pipeline.j6.compiler import CompileOptions, compile_model
from pipeline.j6.conditions import Corunner, Scenario, load_scenario, simulate
from pipeline.j6.heads import head_of
from pipeline.j6.layer_errors import add_layer_errors
from pipeline.j6.plan import read_plan, write_plan
from pipeline.j6.profile import compare, fps_all_cores, latency_ms, layers_csv, profile
from pipeline.j6.report import html_report
from pipeline.j6.suggest import findings, findings_in_words, suggestions
from pipeline.j6.trace import trace_document
from tests.j6.conftest import Net, add_qdq

HEADS = {"detection": ("det_head",), "map": ("map_head",), "occupancy": ("occ_head",)}


@pytest.fixture
def plan(multitask: Path, j6m):
    return compile_model(multitask, j6m, CompileOptions(heads=HEADS))


def test_one_convolution_by_hand(tmp_path: Path, j6m):
    """64 -> 64 channels, 3x3, 32x32: no padding, so every term can be written down."""
    net = Net()
    net.conv(net.input("x", (1, 64, 32, 32)), "c", 64, 64)
    plan = compile_model(net.save(tmp_path / "m.onnx", "c"), j6m)
    (block,) = plan.blocks
    macs, gbps = 32 * 32 * 64 * 64 * 9, 76.8 * 0.62
    assert (block.macs, block.padded_macs, block.padding_waste) == (macs, macs, 0.0)
    assert block.compute_ms == pytest.approx(2e3 * macs / (128e12 * j6m.number("tae_utilization")), rel=1e-6)
    assert block.load_ms == pytest.approx((64 * 64 * 9 + 64 * 32 * 32) / gbps / 1e6, rel=1e-6)
    assert block.store_ms == pytest.approx(4 * 64 * 32 * 32 / gbps / 1e6, rel=1e-6)
    total = block.launch_ms + block.load_ms + block.compute_ms + block.store_ms
    assert plan.schedule.makespan_ms == pytest.approx(total, rel=1e-6)


def test_units_of_a_block_work_beside_each_other(tmp_path: Path, j6m):
    """A table on the VAE behind a convolution hides behind its multiplications, or they behind it: the longer of the two counts."""
    for kernel, busiest in ((3, "TAE"), (1, "VAE")):
        net = Net()
        net.op("Sigmoid", [net.conv(net.input("x", (1, 64, 32, 32)), "c", 64, 64, kernel=kernel)], "s")
        plan = compile_model(net.save(tmp_path / f"{kernel}.onnx", "s"), j6m)
        (block,) = plan.blocks
        tae = 2e3 * block.macs / (128e12 * j6m.number("tae_utilization"))
        vae = 64 * 32 * 32 * 1e3 / (128e9 * j6m.number("element_gbytes_per_tops"))
        assert dict(block.units) == pytest.approx({"TAE": tae, "VAE": vae}, rel=1e-5)
        assert block.compute_ms == pytest.approx(max(tae, vae), rel=1e-5) == dict(block.units)[busiest]
        assert plan.schedule.makespan_ms == pytest.approx(block.launch_ms + block.load_ms + max(tae, vae) + block.store_ms, rel=1e-5)


def test_padding_to_lanes_is_counted(tmp_path: Path, j6m):
    net = Net()
    net.conv(net.input("x", (1, 48, 8, 8)), "c", 48, 48, kernel=1)
    (block,) = compile_model(net.save(tmp_path / "m.onnx", "c"), j6m).blocks
    assert block.padded_macs == 64 * 64 * 64
    assert block.padding_waste == pytest.approx(1 - 48 * 48 / (64 * 64), abs=1e-4)


def test_plan_file_is_canonical_and_round_trips(plan, multitask: Path, j6m, tmp_path: Path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    write_plan(plan, first)
    write_plan(compile_model(multitask, j6m, CompileOptions(heads=HEADS)), second)
    assert first.read_bytes() == second.read_bytes()
    assert read_plan(first) == plan


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{", DataError, "not valid JSON"),
        ("[]", ModelError, "this is not a plan"),
        ('{"schema": "bevj6.plan", "schema_version": 99}', ModelError, "version 99"),
    ],
)
def test_broken_plan_files(tmp_path: Path, content, error, message):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(error, match=message):
        read_plan(path)


def test_plan_without_a_field_is_refused(plan, tmp_path: Path):
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    document = json.loads(path.read_text())
    del document["blocks"][0]["unit"]
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match="not a complete plan"):
        read_plan(path)


def test_profile_has_the_contract_and_its_parts_add_up(plan):
    document = profile(plan, design_fps=10.0)
    assert {"chip", "latency_ms", "fps", "ddr_bytes_per_frame", "by_head_ms", "profile_hash"} <= document.keys()
    assert document["simulated"] is True
    assert document["profile_hash"] == load_chip("j6m").hash
    assert set(document["by_head_ms"]) == {"detection", "map", "occupancy", "shared", "host"}
    assert sum(document["by_head_ms"].values()) == pytest.approx(document["latency_ms"], abs=1e-5)
    assert sum(row["ms"] for row in document["layers"]) == pytest.approx(document["bpu_ms"], abs=1e-4)
    assert sum(row["ddr_bytes"] for row in document["layers"]) == document["ddr_bytes_per_frame"]
    assert document["ddr_gbps_at_design_fps"] == pytest.approx(document["ddr_bytes_per_frame"] * 10 / 1e9, abs=1e-6)
    assert document["fps"] == pytest.approx(1e3 / document["latency_ms"], rel=1e-5)


def test_head_attribution_by_module_node_or_tensor_name():
    heads = {"detection": ("heads.detection",), "map": ("map_head",), "empty": ("",)}
    assert head_of(("heads.detection.decoder.0", "", ""), heads) == "detection"
    assert head_of(("", "/map_head/decoder/MatMul"), heads) == "map"
    assert head_of(("", "", "map_head.out"), heads) == "map"
    assert head_of(("map_header.out",), heads) == "shared"


def test_two_in_flight_is_bound_by_the_bpu_or_by_the_host(plan):
    assert latency_ms(plan, 2) >= max(2 * plan.schedule.makespan_ms, latency_ms(plan))


def test_unsupported_operator_goes_to_the_cpu_and_says_so(tmp_path: Path, j6m):
    net = Net()
    conv = net.conv(net.input("x", (1, 8, 16, 16)), "c", 8, 8)
    net.op("Hardmax", [conv], "odd")
    plan = compile_model(net.save(tmp_path / "m.onnx", "odd"), j6m)
    document = profile(plan)
    (entry,) = document["cpu_blocks"]
    assert entry["kind"] == "Hardmax" and "no BPU implementation" in entry["reason"] and entry["ms"] > 0


def test_spu_work_falls_back_on_a_chip_without_spu(tmp_path: Path, j6m):
    net = Net()
    x = net.input("x", (1, 1000))
    net.weights.append(numpy_helper.from_array(np.array([10], np.int64), "k"))
    net.op("TopK", [x, "k"], "top", outputs=2)
    path = net.save(tmp_path / "m.onnx", "top_0")
    assert [block.unit for block in compile_model(path, j6m).blocks] == ["SPU"]
    assert [block.unit for block in compile_model(path, load_chip("j6b", {"ddr_peak_gbps": 25.6})).blocks] == ["CPU"]


def test_int16_costs_more_and_an_island_pays_for_requantization(tmp_path: Path, j6m):
    net = Net()
    net.conv(net.conv(net.input("x", (1, 64, 64, 64)), "c1", 64, 64), "c2", 64, 64)
    path = net.save(tmp_path / "m.onnx", "c2")
    int8, int16 = (compile_model(path, j6m, CompileOptions(assume_dtype=dtype)) for dtype in ("int8", "int16"))
    assert int16.schedule.makespan_ms > 1.5 * int8.schedule.makespan_ms


def test_depthwise_and_grid_sample_have_units(tmp_path: Path, j6m):
    net = Net()
    x = net.input("x", (1, 32, 16, 16))
    depthwise = net.conv(x, "dw", 32, 32, group=32)
    net.op("GridSample", [depthwise, net.input("grid", (1, 8, 8, 2))], "warp")
    units = [block.unit for block in compile_model(net.save(tmp_path / "m.onnx", "warp"), j6m).blocks]
    assert units == ["TAE", "AAE"]


def test_conditions_move_latency_the_right_way(plan):
    alone = simulate(plan, Scenario(frames=500)).overall
    slow = simulate(plan, Scenario(frames=500, compute_scale=0.5)).overall
    capped = simulate(plan, Scenario(frames=500, bandwidth_cap_gbps=12.8)).overall
    crowded = simulate(plan, Scenario(frames=500, corunners=(Corunner("other", fps=20.0, gbps=30.0, active_ms=25.0),))).overall
    assert slow.p50_ms > alone.p50_ms and capped.p50_ms > alone.p50_ms
    assert crowded.p99_ms > alone.p99_ms and crowded.p50_ms >= alone.p50_ms
    assert alone == simulate(plan, Scenario(frames=500)).overall
    assert alone.p50_ms <= alone.p90_ms <= alone.p99_ms <= alone.max_ms


def test_scenario_files(tmp_path: Path):
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump({"name": "hot", "compute_scale": 0.8, "corunners": [{"name": "a", "fps": 10.0, "gbps": 5.0, "bpu_ms": 2.0}]}))
    assert load_scenario(path).corunners[0].gbps == 5.0
    path.write_text("compute_scale: 1.5\n")
    with pytest.raises(ConfigError, match=r"'compute_scale' is 1\.5; rule: 0 < value <= 1"):
        load_scenario(path)
    path.write_text("clock: 1.0\n")
    with pytest.raises(ConfigError, match="not a scenario"):
        load_scenario(path)


def test_html_is_self_contained_and_says_simulated(plan):
    page = html_report(plan, profile(plan))
    assert "simulated" in page and plan.profile_hash[:12] in page
    assert "http" not in page and "<script" not in page
    assert page.count("<svg") == page.count("</svg>") >= 4


def test_trace_has_one_slice_per_task_inside_the_makespan(plan):
    document = trace_document(plan)
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == len(plan.schedule.tasks)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(plan.schedule.makespan_ms * 1e3, abs=1e-3)
    assert document["metadata"]["profile_hash"] == plan.profile_hash


def test_comparison_of_a_profile_with_itself_and_with_another_chip(plan, multitask: Path):
    document = profile(plan)
    same = compare(document, document)
    assert same["latency_ms"] == 0 and same["layers"] == []
    other = profile(compile_model(multitask, load_chip("j6e"), CompileOptions(heads=HEADS)))
    difference = compare(other, document)
    assert difference["latency_ms"] == pytest.approx(other["latency_ms"] - document["latency_ms"], abs=1e-6)
    assert difference["latency_ms"] > 0 and difference["layers"]


def test_transposed_convolution_works_on_the_zero_stuffed_input(tmp_path: Path, j6m):
    net = Net()
    x = net.input("x", (1, 64, 16, 16))
    net.op("ConvTranspose", [x, net.weight("w", (64, 64, 2, 2))], "up", kernel_shape=[2, 2], strides=[2, 2])
    (block,) = compile_model(net.save(tmp_path / "m.onnx", "up"), j6m).blocks
    assert block.macs == 16 * 16 * 64 * 64 * 4
    assert block.padded_macs == 32 * 32 * 64 * 64 * 4


def test_attention_maps_stay_on_chip_head_by_head(tmp_path: Path, j6m):
    """24 heads of 400x400 do not fit in 1.5 MB together, one head does; a neighbour that runs in between does not change that."""
    net = Net()
    q, k, v = (net.input(name, (1, 24, 400, 64)) for name in "qkv")
    scores = net.op("MatMul", [q, net.op("Transpose", [k], "kt", perm=[0, 1, 3, 2])], "qk")
    weights = net.op("Softmax", [scores], "soft", axis=-1)
    net.op("Transpose", [v], "bystander", perm=[0, 2, 1, 3])
    net.op("MatMul", [weights, v], "out")
    plan = compile_model(net.save(tmp_path / "m.onnx", "out", "bystander"), j6m)
    softmax = next(block for block in plan.blocks if block.kind == "Softmax")
    assert softmax.stream_bytes == 0
    assert plan.memory.temporary.peak_bytes < 24 * 400 * 400


def stereo(path: Path, dtypes: tuple[type, ...]) -> Path:
    """Two images through one encoder, their correlation refined: quantizers take the dtypes in turn, as explicit islands do."""
    net = Net(opset=21)
    turns = iter(range(1000))

    def at_border(name: str) -> str:
        turn = next(turns)
        first = add_qdq(net, name, f"q{turn}", dtypes[turn % len(dtypes)])
        return add_qdq(net, first, f"r{turn}", dtypes[(turn + 1) % len(dtypes)])

    def encoder(image: str) -> str:
        x = net.input(image, (1, 3, 480, 640))
        for level, (before, after) in enumerate(((3, 32), (32, 64), (64, 96))):
            x = net.op("Relu", [net.conv(at_border(x), f"{image}.c{level}", before, after, stride=2)], f"{image}.r{level}")
        return at_border(x)

    cost = net.op("Mul", [encoder("left"), encoder("right")], "correlation")
    for step in range(8):
        cost = net.op("Relu", [net.conv(at_border(cost), f"refine{step}", 96, 96)], f"relu{step}")
    return net.save(path, cost)


def test_islands_of_int16_are_slower_than_int16_throughout(tmp_path: Path, j6m):
    """The order that a stereo network shows on the board (LAS2 of bcdl-zoo): 174 FPS in int8, 71 in int16, 12 with islands."""
    kinds = {"int8": (np.int8,), "int16": (np.int16,), "islands": (np.int8, np.int16)}
    ms = {name: profile(compile_model(stereo(tmp_path / f"{name}.onnx", dtypes), j6m)) for name, dtypes in kinds.items()}
    assert ms["int8"]["latency_ms"] < ms["int16"]["latency_ms"] < ms["islands"]["latency_ms"]
    assert "VPU" in ms["islands"]["by_unit"] and "VPU" not in ms["int16"]["by_unit"]
    assert ms["islands"]["suggestions"][0]["change"].startswith("int16 islands")


def test_operator_table_of_the_docs_is_current(project_root: Path):
    assert operator_table([load_chip(name) for name in known_chips()]) in (project_root / "docs" / "j6-model.md").read_text()


def test_heads_follow_from_the_outputs_when_nobody_names_them(multitask: Path, j6m):
    """What serves one head only is that head's, what serves several is shared."""
    document = profile(compile_model(multitask, j6m))
    assert set(document["by_head_ms"]) == {"det_head", "map_head", "occ_head", "shared", "host"}
    assert {row["head"] for row in document["layers"] if row["module"].startswith("backbone")} == {"shared"}


def test_layer_figures_agree_with_each_other(plan):
    document = profile(plan)
    for row in document["layers"]:
        assert row["ddr_bytes"] == row["loaded_bytes"] + row["stored_bytes"]
        assert row["utilization"] == pytest.approx(2 * row["macs"] / row["ms"] / 1e9 / 128, rel=1e-3, abs=1e-6)
        assert max(row["units"].values()) == pytest.approx(row["computing cost (no DDR)"], abs=1e-5)
    for name in ("by_head_ms", "by_op_ms", "by_module_ms", "by_kind_ms"):
        extra = document["host_ms"] if name == "by_head_ms" else 0.0
        assert sum(document[name].values()) == pytest.approx(document["bpu_ms"] + extra, abs=1e-5)
    data = document["summary"]["DDR access data"]
    assert data["loaded bytes"] + data["stored bytes"] == document["ddr_bytes_per_frame"]
    intervals = document["summary"]["interval info"]
    moved = sum((e["ddr loading bandwidth (GB/s)"] + e["ddr storing bandwidth (GB/s)"]) * e["time (us)"] * 1e3 for e in intervals)
    assert moved == pytest.approx(document["ddr_bytes_per_frame"], rel=1e-3)
    assert all(0 <= e["computing unit utilization"] <= 1 + 1e-6 for e in intervals)


def test_csv_has_a_row_a_layer(plan):
    lines = layers_csv(profile(plan)).splitlines()
    assert len(lines) == 1 + len(plan.blocks)
    assert lines[0].startswith("model_hash,chip,profile_hash,block,layer,module,head,op,unit")


def test_comparison_says_what_changed_in_a_layer(multitask: Path, j6m):
    narrow, wide = (profile(compile_model(multitask, j6m, CompileOptions(optimize_level=level))) for level in ("O2", "O0"))
    difference = compare(narrow, wide)
    assert difference["latency_ms"] < 0
    entry = next(row for row in difference["layers"] if row["layer"] == "/backbone/stem/Conv")
    assert entry["changed"]["op"] == ["Conv", "Conv+Relu"]
    assert any(row["only_in"] == "other" for row in difference["layers"])


def test_suggestions_name_padding_head_dim_cpu_and_islands(tmp_path: Path, j6m):
    net = Net(opset=21)
    x = net.conv(net.input("x", (1, 64, 64, 64)), "narrow", 64, 24)
    odd = net.op("Hardmax", [x], "odd")
    net.conv(add_qdq(net, odd, "wide", np.int16), "after", 24, 64)
    q, k = net.input("q", (1, 8, 512, 48)), net.input("k", (1, 8, 48, 512))
    net.op("MatMul", [q, k], "scores")
    plan = compile_model(net.save(tmp_path / "m.onnx", "after", "scores"), j6m)
    changes = {entry["change"] for block in plan.blocks for entry in [finding.__dict__ for finding in findings(plan, block)]}
    assert any("64 -> 24 channels fill" in change for change in changes)
    assert any("multiple of 64" in change and "products of activations" in change for change in changes)
    assert any("Hardmax runs on the CPU" in change for change in changes)
    assert any("int16 activations" in change for change in changes)
    ranked = suggestions(plan)
    assert len(ranked) == 3 and [e["saves_ms"] for e in ranked] == sorted((e["saves_ms"] for e in ranked), reverse=True)
    words = " ".join(findings_in_words(plan))
    assert "largest: " in words and "on the CPU: Hardmax" in words and "no multiple of 16" in words


def test_cores_share_a_frame_or_run_frames_of_their_own(tmp_path: Path):
    net = Net()
    net.conv(net.conv(net.input("x", (1, 64, 256, 256)), "c1", 64, 64), "c2", 64, 64)
    path = net.save(tmp_path / "m.onnx", "c2")
    one, four = (compile_model(path, load_chip("j6p"), CompileOptions(core_num=cores)) for cores in (1, 4))
    (first, *_), (shared, *_) = one.blocks, four.blocks
    assert (first.cores, shared.cores) == (1, 4)
    assert shared.units[0][1] == pytest.approx(first.units[0][1] / 4, rel=1e-6)
    assert shared.launch_ms == pytest.approx(2 * first.launch_ms)
    assert fps_all_cores(one) > 1e3 / latency_ms(one)


def test_layer_errors_join_by_node(plan, tmp_path: Path):
    path = tmp_path / "errors.csv"
    path.write_text("node,sqnr_db,local_sqnr_db\n/backbone/stem/Conv,30.5,40\n/backbone/stem/Relu,28.5,\n")
    document = profile(plan)
    add_layer_errors(document, path)
    by_name = {row["layer"]: row for row in document["layers"]}
    stem = by_name["/backbone/stem/Conv"]
    assert (stem["accumulated_sqnr_db"], stem["own_sqnr_db"]) == (28.5, 40.0)
    assert by_name["/det_head/out/Conv"]["own_sqnr_db"] is None
    assert "SQNR own dB" in html_report(plan, document) and "own_sqnr_db" in layers_csv(document).splitlines()[0]
    path.write_text("node,sqnr_db\na,1\n")
    with pytest.raises(DataError, match="local_sqnr_db"):
        add_layer_errors(document, path)
