"""Files that other tools read: compose file, deployments, telemetry settings."""

from __future__ import annotations

import json
import logging
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import ConfigError
from pipeline.telemetry import OFF

LONG_RUNNING = {"postgres", "s3", "mlflow", "prefect", "worker"}


@pytest.fixture(scope="module")
def compose(project_root: Path) -> dict[str, Any]:
    return yaml.safe_load((project_root / "docker-compose.yml").read_text())


def test_services_are_complete_healthy_and_without_root(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == LONG_RUNNING | {"s3-volume"}
    for name in LONG_RUNNING:
        service = services[name]
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["user"].split(":")[0] not in ("0", "root"), name
        assert service["restart"] == "unless-stopped", name
        assert "no-new-privileges:true" in service["security_opt"], name
    # The one job that is root has no network and ends.
    assert services["s3-volume"]["network_mode"] == "none"
    assert "restart" not in services["s3-volume"]


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-compose.auth.yml"])
def test_compose_files_follow_the_compose_specification(name: str, project_root: Path) -> None:
    checker = pytest.importorskip("check_jsonschema", reason="the schema of compose files comes with check-jsonschema (pip install bevj6[dev])")
    import jsonschema

    schema = json.loads((Path(checker.__file__).parent / "builtin_schemas/vendor/compose-spec.json").read_text())
    document = yaml.safe_load((project_root / name).read_text())
    jsonschema.validate(document, schema)
    document["services"]["mlflow"]["comand"] = []
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        jsonschema.validate(document, schema)


def test_image_gets_the_versions_that_are_tested(project_root: Path) -> None:
    """pip refuses the second install of the Dockerfile where the two files name different versions."""
    locked = pins(project_root / "requirements.lock")
    wanted = pins(project_root / "services/requirements.txt")
    assert {name: locked.get(name, version) for name, version in wanted.items()} == wanted


def pins(path: Path) -> dict[str, str]:
    """{package, lower case: version}."""
    found = re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def test_ports_are_on_loopback_and_images_are_pinned(compose: dict[str, Any], project_root: Path) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name}: {port}"
        tag = service["image"].partition(":")[2]
        assert re.search(r"\d+\.\d+", tag), f"{name}: {service['image']}"
    base = re.search(r"^FROM (\S+)$", (project_root / "Dockerfile").read_text(), re.MULTILINE)
    assert base is not None
    assert re.fullmatch(r"python:3\.1[12]\.\d+-slim-\w+", base[1])
    for line in (project_root / "services/requirements.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[\w-]+==[\d.]+", line), line


def test_passwords_come_from_env_and_have_no_default(compose: dict[str, Any], project_root: Path) -> None:
    example = dict(line.split("=", 1) for line in (project_root / ".env.example").read_text().splitlines() if line and not line.startswith("#"))
    text = (project_root / "docker-compose.yml").read_text()
    used = set(re.findall(r"\$\{(\w+)", text))
    assert used <= set(example)
    for secret in (name for name in used if name.endswith(("PASSWORD", "SECRET_KEY"))):
        assert example[secret] == "", secret
        assert all(rest.startswith(":?") for rest in re.findall(rf"\$\{{{secret}([^}}]*)\}}", text)), secret
    assert ".env" in (project_root / ".gitignore").read_text().splitlines()


def test_mlflow_server_lets_in_every_name_it_is_called_by(compose: dict[str, Any]) -> None:
    """--allowed-hosts replaces MLflow's list: a name that is left out gets 403."""
    from mlflow.server.security_utils import is_allowed_host_header

    mlflow = compose["services"]["mlflow"]
    flags = dict(part.removeprefix("--").split("=", 1) for part in mlflow["command"] if part.startswith("--"))
    allowed = flags["allowed-hosts"].split(",")
    worker = compose["services"]["worker"]["environment"]["MLFLOW_TRACKING_URI"].removeprefix("http://")
    for host in (worker, "mlflow", "127.0.0.1:5000", "localhost:5000", "localhost:5001"):
        assert is_allowed_host_header(allowed, host), host
    assert not is_allowed_host_header(allowed, "evil.example.org")
    assert "*" not in allowed
    assert flags["workers"] == "1"
    assert mlflow["environment"]["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


def test_login_changes_nothing_but_the_login(compose: dict[str, Any], project_root: Path) -> None:
    """docker-compose.auth.yml repeats MLflow's command, because compose replaces lists: the copies must not drift apart."""
    added = yaml.safe_load((project_root / "docker-compose.auth.yml").read_text())["services"]
    command = added["mlflow"]["command"]
    assert [part for part in command if part != "--app-name=basic-auth"] == compose["services"]["mlflow"]["command"]
    assert "--app-name=basic-auth" in command
    example = dict(line.split("=", 1) for line in (project_root / ".env.example").read_text().splitlines() if line and not line.startswith("#"))
    used = set(re.findall(r"\$\{(\w+)", (project_root / "docker-compose.auth.yml").read_text()))
    assert used <= set(example)
    assert example["MLFLOW_TRACKING_PASSWORD"] == example["MLFLOW_FLASK_SERVER_SECRET_KEY"] == ""
    assert added["worker"]["environment"].keys() == {"MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"}


def test_deployments_load_as_prefect_models(project_root: Path) -> None:
    from prefect.cli.deploy._models import PrefectYamlModel
    from prefect.flows import load_flow_from_entrypoint

    document = PrefectYamlModel.model_validate(yaml.safe_load((project_root / "prefect.yaml").read_text()))
    by_name = {deployment.name: deployment for deployment in document.deployments}
    assert set(by_name) == {"nightly", "on-new-data", "new-data", "any-chip", "promote", "rollback"}
    assert by_name["nightly"].schedules[0].cron == "0 2 * * *"
    assert by_name["on-new-data"].parameters == {"only_on_new_data": True}
    for name, deployment in by_name.items():
        assert name in ("new-data", "any-chip") or deployment.concurrency_limit.limit == 1  # those two write nothing into the working tree
        flow = load_flow_from_entrypoint(str(project_root / deployment.entrypoint))
        assert set(deployment.parameters or {}) <= set(flow.parameters.properties)


def test_kubernetes_example_holds_together(compose: dict[str, Any], project_root: Path) -> None:
    """What one object of services/kubernetes.yaml, or a job of the work pool, refers to is there under that name. No cluster takes part."""
    objects = list(yaml.safe_load_all((project_root / "services/kubernetes.yaml").read_text()))
    template = json.loads((project_root / "services/kubernetes-pool.json").read_text())
    manifest = template["job_configuration"]["job_manifest"]
    named = {(item["kind"], item["metadata"]["name"]) for item in objects}
    pods = [item["spec"]["template"] for item in objects if item["kind"] == "Deployment"]
    labels = [pod["metadata"]["labels"] for pod in pods]
    for service in (item for item in objects if item["kind"] == "Service"):
        assert service["spec"]["selector"] in labels, service
    for spec in (*(pod["spec"] for pod in pods), manifest["spec"]["template"]["spec"]):
        assert spec["securityContext"]["runAsNonRoot"] is True
        claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in spec.get("volumes", [])}
        assert all(("PersistentVolumeClaim", claim) in named for claim in claims.values())
        assert ("ServiceAccount", spec.get("serviceAccountName", "bevj6-worker")) in named
        for container in spec["containers"]:
            assert container["image"] in ("{{ image }}", compose["services"]["worker"]["image"])
            assert all(mount["name"] in claims for mount in container.get("volumeMounts", []))
            sources = [source["configMapRef"]["name"] for source in container.get("envFrom", []) if "configMapRef" in source]
            assert all(("ConfigMap", name) in named for name in sources)
            for address in re.findall(r"tcp://([\w-]+):", " ".join(container.get("command", []))):
                assert ("Service", address) in named
    asked = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert asked == set(template["variables"]["properties"])
    assert template["variables"]["properties"]["image"]["default"] == compose["services"]["worker"]["image"]


def test_kubernetes_objects_follow_the_schema_of_kubernetes(project_root: Path) -> None:
    """Also the job of the work pool, with its placeholders filled in."""
    checker = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate (pip install bevj6[dev])")
    pool = json.loads((project_root / "services/kubernetes-pool.json").read_text())
    values = {name: field.get("default", "a") for name, field in pool["variables"]["properties"].items()}
    values |= {"env": [{"name": "A", "value": "b"}], "labels": {"a": "b"}, "command": ["prefect", "flow-run", "execute"]}
    job = fill_in(pool["job_configuration"]["job_manifest"], values)
    for document in [*yaml.safe_load_all((project_root / "services/kubernetes.yaml").read_text()), job]:
        checker.validate(document, checker.latest_version(), strict=True)


def fill_in(template: Any, values: dict[str, Any]) -> Any:
    """A job manifest as Prefect makes it: a placeholder that stands alone becomes the value, within a text its text."""
    if isinstance(template, dict):
        return {key: fill_in(value, values) for key, value in template.items()}
    if isinstance(template, list):
        return [fill_in(value, values) for value in template]
    alone = re.fullmatch(r"\{\{ (\w+) \}\}", str(template))
    if alone:
        return values[alone[1]]
    return re.sub(r"\{\{ (\w+) \}\}", lambda match: str(values[match[1]]), template) if isinstance(template, str) else template


def test_telemetry_is_off_everywhere(compose: dict[str, Any], project_root: Path) -> None:
    places = {
        "worker": compose["services"]["worker"]["environment"],
        "mlflow": compose["services"]["mlflow"]["environment"],
        "prefect": compose["services"]["prefect"]["environment"],
        "prefect.yaml": yaml.safe_load((project_root / "prefect.yaml").read_text())["deployments"][0]["work_pool"]["job_variables"]["env"],
        ".env.example": dict(re.findall(r"^(\w+)=(.*)$", (project_root / ".env.example").read_text(), re.MULTILINE)),
        "Dockerfile": dict(re.findall(r"(\w+)=(\w+)", (project_root / "Dockerfile").read_text())),
        "Makefile": dict(re.findall(r"^export (\w+) := (\w+)$", (project_root / "Makefile").read_text(), re.MULTILINE)),
    }
    same = {"true": "true", "1": "true", "false": "false"}
    for place, settings in places.items():
        assert {name: same[settings[name]] for name in OFF} == OFF, place
    assert tomllib.loads((project_root / "prefect.toml").read_text())["server"]["analytics_enabled"] is False
    dvc = (project_root / ".dvc/config").read_text()
    assert "analytics = false" in dvc
    assert "check_update = false" in dvc


def test_importing_the_project_switches_telemetry_off() -> None:
    import subprocess

    code = "import os, {0}; print([os.environ[name] for name in {1!r}])"
    for package in ("pipeline", "flows"):
        done = subprocess.run([sys.executable, "-c", code.format(package, list(OFF))], capture_output=True, text=True, check=True, env={})
        assert done.stdout.strip() == str(list(OFF.values()))


@pytest.mark.parametrize(("error", "shown"), [(ConfigError("params.yaml: train.steps is -1"), False), (KeyError("defect"), True)])
def test_bad_input_is_logged_without_a_traceback_and_a_defect_with_one(error: Exception, shown: bool) -> None:
    import flows  # noqa: F401

    for logger in map(logging.getLogger, ("prefect.flow_runs", "prefect.task_runs")):
        record = logger.makeRecord(logger.name, logging.ERROR, __file__, 1, "run failed: %r", (error,), (type(error), error, None))
        assert logger.filter(record)
        assert bool(record.exc_info) is shown
        assert str(error) in record.getMessage()


@pytest.mark.parametrize("value", ["http", "0", "70000"])
def test_port_that_is_none_is_named(value: str, tmp_path: Path) -> None:
    from flows.ui import local_servers

    with pytest.raises(ConfigError, match=f"PREFECT_PORT = '{value}': must be a port number"):
        local_servers(tmp_path, {"MLFLOW_PORT": "59997", "PREFECT_PORT": value})


def test_port_that_is_taken_says_how_to_change_it(tmp_path: Path) -> None:
    import socket

    from flows.ui import local_servers

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"MLFLOW_PORT = {port}: cannot listen .* make ui MLFLOW_PORT="):
            local_servers(tmp_path, {"MLFLOW_PORT": port})
