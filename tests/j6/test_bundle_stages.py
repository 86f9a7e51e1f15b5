"""The two stages and the bundle, on a small multi-task model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from pipeline.config import Config
from pipeline.errors import ChipError, ConfigError, DataError, ModelError
from pipeline.io import sha256_file
from pipeline.j6.bundle import check_calibration, quant_config
from pipeline.j6.graph import import_onnx
from pipeline.j6.hb_schema import check_hb_compile, check_quant_config
from pipeline.paths import Paths
from pipeline.stages import compile as compile_stage
from pipeline.stages import profile as profile_stage
from tests.j6.conftest import Net, add_qdq

HEADS = {"detection": ["det_head"], "map": ["map_head"], "occupancy": ["occ_head"], "shared": ["backbone"]}


@pytest.fixture
def project(tmp_path: Path, multitask: Path) -> Paths:
    paths = Paths(tmp_path / "project")
    paths.onnx.parent.mkdir(parents=True)
    shutil.copy(multitask, paths.int8_onnx)
    shutil.copy(multitask, paths.onnx)
    paths.contract.write_text(json.dumps({"heads": HEADS}))
    batches = {f"analysis/{i}/images": np.full((2, 3, 32, 64), 0.5, np.float32) for i in range(2)}
    np.savez(paths.calibration, **batches)
    return paths


def config(**j6: object) -> Config:
    return Config.model_validate({"j6": {"chip": "j6m", **j6}})


def test_compile_then_profile_write_the_contract(project: Paths):
    compiled = compile_stage.run(config(), project)
    result = profile_stage.run(config(), project)
    document = json.loads(project.report("profile.json").read_text())
    assert {"plan.json", "memory.json", "schedule.json", "bundle"} == {path.name for path in project.build_dir("j6m").iterdir()}
    assert document["by_head_ms"].keys() == {*HEADS, "host"}
    assert document["latency_ms"] == result.latency_ms > 0
    assert document["profile_hash"] == compiled.profile_hash
    assert "simulated" in str(result)
    assert json.loads(project.report("trace.json").read_text())["traceEvents"]
    assert "<svg" in project.report("profile.html").read_text()


def test_same_input_gives_the_same_bytes(project: Paths):
    def digests() -> dict[str, str]:
        compile_stage.run(config(), project)
        profile_stage.run(config(), project)
        files = [*project.build_dir("j6m").rglob("*"), *project.reports.iterdir()]
        return {str(path.relative_to(project.root)): sha256_file(path) for path in files if path.is_file()}

    assert digests() == digests()


def test_bundle_is_complete_and_follows_the_documented_fields(project: Paths):
    compile_stage.run(config(), project)
    bundle = project.build_dir("j6m") / "bundle"
    document = yaml.safe_load((bundle / "hb_compile.yaml").read_text())
    assert set(document) == {"model_parameters", "input_parameters", "calibration_parameters", "compiler_parameters"}
    assert document["model_parameters"]["march"] == "nash-m"
    names = document["input_parameters"]["input_name"].split(";")
    folders = document["calibration_parameters"]["cal_data_dir"].split(";")
    assert names == ["images"] and len(folders) == len(names)
    samples = sorted((bundle / folders[0]).glob("*.npy"))
    assert len(samples) == 2
    assert np.load(samples[0], allow_pickle=False).shape == (2, 3, 32, 64)
    assert (bundle / document["calibration_parameters"]["quant_config"]).is_file()
    model = onnx.load(bundle / document["model_parameters"]["onnx_model"])
    assert model.ir_version <= 9
    assert "hb_compile -c hb_compile.yaml" in (bundle / "commands.sh").read_text()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full((1, 2, 3, 32, 64), 255.0, np.float32), "reaches 255; images must be normalised"),
        (np.zeros((1, 2, 3, 32, 32), np.float32), "has shape"),
        (np.full((1, 2, 3, 32, 64), np.nan, np.float32), "NaN"),
    ],
)
def test_calibration_data_that_the_toolchain_would_swallow_is_refused(multitask: Path, array, message):
    with pytest.raises(DataError, match=message):
        check_calibration(import_onnx(multitask), {"images": array})
    with pytest.raises(DataError, match="input 'images' is missing"):
        check_calibration(import_onnx(multitask), {})


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda p: p.int8_onnx.write_bytes(p.int8_onnx.read_bytes()[:300]), ModelError, "multitask_int8.onnx"),
        (lambda p: p.contract.write_text("{}"), DataError, "field 'heads'"),
        (lambda p: p.calibration.write_bytes(b"PK"), DataError, "calibration.npz"),
        (lambda p: p.calibration.unlink(), DataError, "run the stage calibrate"),
    ],
)
def test_bad_input_is_named_and_the_last_build_stays(project: Paths, damage, error, message):
    compile_stage.run(config(), project)
    before = (project.build_dir("j6m") / "plan.json").read_bytes()
    damage(project)
    with pytest.raises(error, match=message):
        compile_stage.run(config(), project)
    assert (project.build_dir("j6m") / "plan.json").read_bytes() == before
    assert [path.name for path in (project.root / "build").iterdir()] == ["j6m"]


def test_unknown_chip_and_missing_plan(project: Paths):
    with pytest.raises(ChipError, match="'j6x' is unknown; known: j6b"):
        compile_stage.run(config(chip="j6x"), project)
    with pytest.raises(DataError, match="file not found"):
        profile_stage.run(config(), project)


def test_overrides_reach_the_plan(project: Paths):
    base = compile_stage.run(config(), project)
    changed = compile_stage.run(config(chip_overrides={"ddr_efficiency": 0.3}), project)
    assert base.profile_hash != changed.profile_hash


def test_bundle_passes_the_documented_schema_and_carries_the_options(project: Paths):
    compile_stage.run(config(compile_mode="balance", balance_factor=30, max_time_per_fc_us=2000), project)
    bundle = project.build_dir("j6m") / "bundle"
    document = yaml.safe_load((bundle / "hb_compile.yaml").read_text())
    check_hb_compile(document)
    compiler = document["compiler_parameters"]
    assert (compiler["compile_mode"], compiler["balance_factor"], compiler["max_time_per_fc"]) == ("balance", 30, 2000)
    nodes = {node.name: len(node.input) for node in onnx.load(bundle / "multitask.onnx").graph.node}
    check_quant_config(json.loads((bundle / "quant_config.json").read_text()), nodes)


@pytest.mark.parametrize(
    ("group", "field", "value", "message"),
    [
        ("compiler_parameters", "compile_mode", "fast", "compile_mode is 'fast'; rule: one of latency, bandwidth, balance"),
        ("compiler_parameters", "max_time_per_fc", 500, "max_time_per_fc is 500; rule: 0, or 1000..10000000 us"),
        ("compiler_parameters", "core_num", 2, "core_num is 2; nash-m has one core"),
        ("compiler_parameters", "max_l2m_size", 1024, "max_l2m_size is set; nash-m has no L2M"),
        ("calibration_parameters", "calibration_type", "mix", "calibration_type is 'mix'"),
        ("input_parameters", "input_shape", "1x?x3", "input_shape is '1x?x3'"),
        ("input_parameters", "input_shape", "1x3x8x8;1x3x8x8", "input_shape has 2 entries; rule: one for each of the 1 inputs"),
        ("input_parameters", "mean_value", "0 0 0", "a featuremap input takes no mean"),
        ("model_parameters", "norm_type", "x", "norm_type is no documented field"),
    ],
)
def test_schema_refuses_what_is_not_documented(project: Paths, group, field, value, message):
    compile_stage.run(config(), project)
    document = yaml.safe_load((project.build_dir("j6m") / "bundle" / "hb_compile.yaml").read_text())
    document[group][field] = value
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        check_hb_compile(document)


def test_quant_config_names_inputs_of_nodes_in_the_float_model(tmp_path: Path):
    net = Net(opset=21)
    first = net.conv(add_qdq(net, net.input("x", (1, 4, 8, 8)), "a"), "c1", 4, 4)
    net.op("Add", [add_qdq(net, first, "b", np.int16), net.conv(add_qdq(net, first, "c"), "c2", 4, 4)], "sum")
    quantized = import_onnx(net.save(tmp_path / "q.onnx", "sum"))
    plain = Net(opset=21)
    first = plain.conv(plain.input("x", (1, 4, 8, 8)), "c1", 4, 4)
    plain.op("Add", [first, plain.conv(first, "c2", 4, 4)], "sum")
    document = quant_config(quantized, import_onnx(plain.save(tmp_path / "f.onnx", "sum")))
    assert document == {"model_config": {"all_node_type": "int8"}, "node_config": {"sum": {"input0": "int16"}}}
    check_quant_config(document, {"c1": 2, "c2": 2, "sum": 2})
    wrong = (({"x": {"qtype": "int8"}}, "names 'x'"), ({"sum": {"input2": "int16"}}, "rule: qtype, or input0"), ({"sum": {"qtype": "int4"}}, "int4"))
    for entry, message in wrong:
        with pytest.raises(ConfigError, match=message):
            check_quant_config({"node_config": entry}, {"sum": 2})
    with pytest.raises(ConfigError, match="'nodes' is no documented key"):
        check_quant_config({"nodes": {}}, {})
