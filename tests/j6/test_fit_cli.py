from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.j6 import cli
from pipeline.j6.__main__ import main
from pipeline.j6.chip import load_chip
from pipeline.j6.compiler import CompileOptions, compile_model
from pipeline.j6.cost import rates_of
from pipeline.j6.fit import PARAMETERS, Simulator, features_of, fit_values, levenberg_marquardt, simulate_features
from pipeline.j6.measured import Row, family_of, read_measured
from pipeline.j6.profile import latency_ms
from pipeline.j6.validate import error_document, leave_family_out, spearman, summary_csv, validate
from tests.j6.conftest import Net


def test_levenberg_marquardt_finds_a_known_minimum_inside_its_box():
    x = np.linspace(0, 1, 20)
    truth = np.array([1.5, -0.7])

    def residuals(p):
        return np.exp(p[0] * x) + p[1] * x - np.exp(truth[0] * x) - truth[1] * x

    low, high = np.full(2, -5.0), np.full(2, 5.0)
    assert levenberg_marquardt(residuals, np.zeros(2), low, high) == pytest.approx(truth, abs=1e-5)
    assert levenberg_marquardt(residuals, np.zeros(2), low, np.array([1.0, 5.0]))[0] <= 1.0


def test_spearman_against_hand_computed_ranks():
    assert spearman(np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 30.0, 20.0, 40.0])) == pytest.approx(0.8)
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([5.0, 5.0, 9.0])) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("YOLO11n-seg", "YOLO11"),
        ("YOLOv5nu", "YOLO5"),
        ("YOLOv10l", "YOLO10"),
        ("DINOv2 ViT-S/14", "DINOv2"),
        ("MobileNetV4 conv small", "MobileNetV4"),
    ],
)
def test_families(model, family):
    assert family_of(model) == family


def test_vectorised_model_equals_the_compiled_plan(tmp_path: Path, multitask: Path):
    net = Net()
    odd = net.op("Hardmax", [net.conv(net.input("x", (1, 8, 32, 32)), "c", 8, 8)], "odd")
    net.conv(odd, "c2", 8, 8)
    for path in (multitask, net.save(tmp_path / "cpu.onnx", "c2")):
        for name in ("j6e", "j6m"):
            chip = load_chip(name)
            plan = compile_model(path, chip, CompileOptions())
            features = features_of(path, "int8", True, chip)
            for threads in (1, 2):
                assert simulate_features(features, rates_of(chip), threads, False) == pytest.approx(latency_ms(plan, threads), rel=1e-6)


def synthetic_rows(folder: Path) -> list[Row]:
    rows = []
    for number, (width, size) in enumerate([(16, 64), (64, 64), (64, 128), (128, 96), (256, 64), (512, 32), (32, 256)]):
        net = Net()
        x = net.conv(net.input("x", (1, 3, size, size)), "c0", 3, width, stride=2)
        for layer in range(number % 3 + 1):
            y = net.op("Mul", [x, net.op("Sigmoid", [x], f"s{layer}")], f"m{layer}")
            x = net.conv(net.op("Concat", [y, x], f"cat{layer}", axis=1), f"c{layer + 1}", 2 * width, width)
        path = net.save(folder / f"net{number}.onnx", x)
        rows += [
            Row(f"net{number}", f"family{number % 2}", path, march, threads, 1.0, "int8", True, False)
            for march in ("nash-e", "nash-m")
            for threads in (1, 2)
        ]
    return rows


def test_fit_recovers_the_latencies_of_known_rates(tmp_path: Path):
    """Rows made by the model with changed rates: the fit must reproduce them, whatever combination of rates it finds."""
    rows = synthetic_rows(tmp_path)
    truth = {"tae_utilization": 0.2, "element_gbytes_per_tops": 0.6, "host_us_ghz": 700.0, "launch_us_tops": 200.0}
    made = Simulator(rows).simulated_ms(truth)
    simulator = Simulator([Row(**{**row.__dict__, "measured_ms": float(value)}) for row, value in zip(rows, made, strict=True)])
    values = fit_values(simulator)
    assert np.abs(simulator.simulated_ms(values) / made - 1).max() < 0.01
    assert values["host_us_ghz"] == pytest.approx(700.0, rel=0.05)
    for parameter in PARAMETERS:
        assert parameter.low <= values[parameter.key] <= parameter.high
    assert np.abs(leave_family_out(simulator) / made - 1).max() < 0.25


def test_too_few_rows_are_refused(tmp_path: Path):
    simulator = Simulator(synthetic_rows(tmp_path)[:4])
    with pytest.raises(DataError, match="4 rows cannot determine 7 rates"):
        fit_values(simulator)


def test_measured_csv_errors(tmp_path: Path):
    path = tmp_path / "m.csv"
    path.write_text("model,graph\n")
    with pytest.raises(DataError, match="column 'input' is missing"):
        read_measured(path, tmp_path)
    path.write_text("model,graph,input,precision,march,latency_1thread_ms,latency_2thread_ms,note\na,absent.onnx,x,int8,nash-m,1.0,,\n")
    with pytest.raises(DataError, match="graph of 'a' not found"):
        read_measured(path, tmp_path)


def test_shipped_rates_reach_the_accuracy_stated_in_the_docs(shared: Path):
    """Bounds of docs/j6-model.md, in sample; the cross-validated figures there come from the benchmark script."""
    document = validate(shared / "latency" / "measured.csv", shared / "zoo")
    assert document["median_pct"] <= 4.0
    assert document["p90_pct"] <= 12.0
    assert document["spearman"] >= 0.98
    for march in ("nash-e", "nash-m"):
        assert document["groups"][f"march {march}"]["median_pct"] <= 4.0
    assert {row["march"] for row in document["rows"]} == {"nash-e", "nash-m"}


def test_summary_of_a_validation_is_one_row(tmp_path: Path):
    """Two rows of one family, half and twice the measured latency: -50 % and +100 %."""
    rows = [row for row in synthetic_rows(tmp_path)[:3] if row.threads == 1]
    rows = [Row(**{**row.__dict__, "measured_ms": measured}) for row, measured in zip(rows, (2.0, 1.0), strict=True)]
    document = error_document(rows, np.array([1.0, 2.0]), []) | {"profile_hashes": {"nash-m": "a" * 64}}
    lines = [line.split(",") for line in summary_csv(document).splitlines()]
    row = dict(zip(*lines, strict=True))
    assert row["count"] == "2" and row["median_pct"] == "75.0" and row["bias_pct"] == "25.0" and row["max_pct"] == "100.0"
    assert row["held_out_median_pct"] == "" and row["profile_nash-m"] == "a" * 12


def test_shape_and_override_flags():
    assert cli.parse_shapes(["images=1x3x8x8"]) == {"images": (1, 3, 8, 8)}
    assert cli.parse_overrides(["ddr_peak_gbps=51.2", "has_spu=false"]) == {"ddr_peak_gbps": 51.2, "has_spu": False}
    for entry in ("images", "images=1x", "=1x2", "images=1x-3"):
        with pytest.raises(ConfigError, match="--shape"):
            cli.parse_shapes([entry])
    for entry in ("ddr", "ddr=fast", "=1"):
        with pytest.raises(ConfigError, match="--set"):
            cli.parse_overrides([entry])


def test_command_line_prints_one_json_document(multitask: Path, tmp_path: Path, capsys):
    html, trace, plan = tmp_path / "p.html", tmp_path / "t.json", tmp_path / "plan.json"
    assert main(["profile", str(multitask), "--chip", "j6m", "--json", "--html", str(html), "--trace", str(trace)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["simulated"] and html.is_file() and trace.is_file()
    assert main(["compile", str(multitask), "--out", str(plan)]) == 0
    capsys.readouterr()
    assert main(["profile", str(plan), "--json", "--against", str(multitask)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["latency_ms"] == document["latency_ms"] and again["comparison"]["latency_ms"] == 0
    assert main(["profile", str(multitask)]) == 0
    assert "simulated" in capsys.readouterr().out
    assert main(["chips", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["chips"]) == 5


def test_command_line_reports_user_errors_without_a_traceback(tmp_path: Path, capsys):
    assert main(["profile", str(tmp_path / "absent.onnx")]) == 1
    assert "absent.onnx" in capsys.readouterr().err
