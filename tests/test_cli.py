"""The console script: one JSON document on stdout, messages on stderr, exit status."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.cli import main
from pipeline.config import load_config, merge, preset_overrides
from pipeline.errors import ConfigError
from pipeline.preset import write_preset


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from pipeline.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nprint(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    verbs = "preset validate vectorize train quantize compile profile compare report gate register promote rollback history reproduce data doctor"
    for verb in verbs.split():
        assert f"\n    {verb}" in done.stdout
    heavy = {"numpy", "torch", "mlflow", "prefect", "dvc", "onnx", "pydantic", "great_expectations", "pandas"}
    assert not heavy & set(done.stderr.replace("'", "").strip("[]\n").split(", "))


@pytest.mark.parametrize("arguments", [[], ["fly"], ["promote", "two"], ["compare", "A"], ["data", "diff", "A"], ["reproduce", "1"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_summary_and_gate_of_a_finished_project(built_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "summary", "--json", "--project", str(built_copy))
    document = json.loads(out)
    assert (status, err) == (0, "")
    assert document["int8"] == {"detection mAP": 0.395, "map AP": 0.496, "occupancy mIoU": 0.299}
    assert document["latency_ms"] == 8.75
    assert Path(document["report"]).is_file()
    status, out, _ = run(capsys, "summary", "--project", str(built_copy))
    assert "8.75 ms simulated on j6m" in out
    status, out, _ = run(capsys, "gate", "--json", "--project", str(built_copy))
    assert (status, json.loads(out)["passed"]) == (0, True)


def test_gate_that_failed_is_status_1(built_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = built_copy / "reports/gate.json"
    gate.write_text(gate.read_text().replace("true", "false").replace('"passed"', '"failed"').replace('"failed":', '"passed":'))
    status, out, _ = run(capsys, "gate", "--project", str(built_copy))
    assert status == 1
    assert "FAILED    latency: 8.75 against 33.0" in out
    assert "undecided warm restart: needs the board" in out
    gate.write_text('{"passed": "yes"}')
    status, out, err = run(capsys, "gate", "--json", "--project", str(built_copy))
    assert (status, out) == (1, "")
    assert "gate.json: field passed must be true or false" in err


def test_missing_and_cut_reports_are_named_without_a_traceback(built_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = built_copy / "reports/gate.json"
    gate.write_text(gate.read_text()[:20])
    status, out, err = run(capsys, "gate", "--json", "--project", str(built_copy))
    assert (status, out) == (1, "")
    assert err.startswith("bevj6 gate: error: ")
    assert "gate.json: not valid JSON" in err
    gate.unlink()
    assert "gate.json: file not found" in run(capsys, "gate", "--project", str(built_copy))[2]


def test_compare_prints_one_document(built_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "compare", ".", ".", "--json", "--project", str(built_copy))
    assert status == 0
    assert {row["name"] for row in json.loads(out)["metrics"]} >= {"int8/detection.mAP", "latency_ms/shared"}


def test_stage_verbs_run_dvc_and_keep_stdout_clean(built_copy: Path) -> None:
    command = [sys.executable, "-m", "pipeline.cli", "train", "--json", "--project", str(built_copy)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(built_copy)})
    assert json.loads(done.stdout) == {"stage": "train", "up_to_date": True}
    assert "Stage 'train' didn't change" in done.stderr
    (built_copy / "work.py").write_text("raise SystemExit('train: error: broken')\n")
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(built_copy)})
    assert (done.returncode, json.loads(done.stdout)["up_to_date"]) == (1, False)


def test_register_promote_and_rollback_answer_in_json(built_copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    project = ["--json", "--project", str(built_copy)]
    status, out, _ = run(capsys, "register", *project)
    assert (status, json.loads(out)["version"], json.loads(out)["created"]) == (0, 1, True)
    assert (built_copy / "mlflow.db").is_file()
    status, out, _ = run(capsys, "promote", *project)
    assert (status, json.loads(out)["action"], json.loads(out)["version"]) == (0, "promote", 1)
    status, out, err = run(capsys, "rollback", *project)
    assert (status, out) == (1, "")
    assert "nothing to roll back to" in err
    status, out, _ = run(capsys, "history", *project)
    assert (status, [entry["version"] for entry in json.loads(out)]) == (0, [1])
    status, out, _ = run(capsys, "compare", "@champion", ".", *project)
    document = json.loads(out)
    assert (status, document["params"], document["identity"]) == (0, {}, {})
    assert {row["name"]: row["delta"] for row in document["metrics"]}["int8/map.AP"] == 0.0
    assert run(capsys, "compare", "@7", ".", *project)[0] == 1
    status, out, _ = run(capsys, "reproduce", "@champion", str(built_copy / "again"), *project)
    assert (status, json.loads(out)["same"]) == (0, True)


def test_version_that_cannot_be_registered_now_is_kept(built_copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{probe.getsockname()[1]}")
    status, out, err = run(capsys, "register", "--json", "--project", str(built_copy))
    assert (status, out) == (1, "")
    assert "cannot connect" in err and "the next `bevj6 register` sends it" in err
    assert len(list((built_copy / ".services/outbox").glob("0001-*/dvc.lock"))) == 1


def test_doctor_tells_faults_from_absent_services(built_copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_S3_ENDPOINT_URL", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    status, out, _ = run(capsys, "doctor", "--json", "--project", str(built_copy))
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert status == 0, out
    assert checks["prefect (PREFECT_API_URL)"]["ok"] is None
    assert "embedded" in checks["mlflow"]["detail"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{probe.getsockname()[1]}/api")
        with (built_copy / "params.yaml").open("a") as params:
            params.write(f"execution:\n  dask_address: tcp://127.0.0.1:{probe.getsockname()[1]}\n")
    status, out, _ = run(capsys, "doctor", "--project", str(built_copy))
    assert status == 1
    assert "FAULT  prefect (PREFECT_API_URL)" in out
    assert "FAULT  dask (execution.dask_address)" in out
    assert "cannot connect" in out


def test_preset_keeps_comments_and_can_be_undone(project_root: Path, tmp_path: Path) -> None:
    params = tmp_path / "params.yaml"
    original = (project_root / "params.yaml").read_text()
    params.write_text(original)
    changes = write_preset(params, "v1_j6m")
    assert changes["model.image_size"][1] == [256, 704]
    assert load_config(params) == load_config(project_root / "params.yaml", preset_overrides("v1_j6m"))
    comments = [line.split("#", 1)[1] for line in original.splitlines() if "#" in line]
    assert [line.split("#", 1)[1] for line in params.read_text().splitlines() if "#" in line] == comments
    write_preset(params, "mini")
    assert yaml.safe_load(params.read_text()) == merge(yaml.safe_load(original), preset_overrides("mini"))
    assert write_preset(params, "mini") == {}


def test_unknown_preset_and_broken_params_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = tmp_path / "params.yaml"
    params.write_text("train:\n  speed: 3\n")
    with pytest.raises(ConfigError, match=r"train\.speed.*unknown key"):
        write_preset(params, "mini")
    status, _, err = run(capsys, "preset", "huge", "--project", str(tmp_path))
    assert status == 1
    assert "preset 'huge': unknown; known presets: mini, v1_j6m" in err
    assert params.read_text() == "train:\n  speed: 3\n"


def test_own_model_and_data_verbs_name_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (["validate", str(tmp_path / "nuscenes"), "--version", "v1.0-mini", "--project", str(tmp_path)], "nuscenes"),
        (["vectorize", str(tmp_path / "mask.png"), "--resolution", "0.1", "--out", str(tmp_path / "out.geojson")], "mask.png"),
        (["quantize", str(tmp_path / "model.onnx"), "--calib", str(tmp_path), "--out", str(tmp_path / "q.onnx")], "model.onnx"),
        (["profile", str(tmp_path / "model.onnx"), "--json"], "model.onnx"),
        (["profile", str(tmp_path / "model.onnx"), "--chip", "j99"], "j99"),
    ]
    for arguments, named in cases:
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (1, ""), arguments
        assert named in err


def test_profile_of_a_model_is_one_json_document(built_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "profile", str(built_copy / "models/multitask_int8.onnx"), "--chip", "j6m", "--json")
    document = json.loads(out)
    assert status == 0
    assert document["chip"] == "j6m"
    assert document["latency_ms"] > 0
