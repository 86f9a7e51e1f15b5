"""The services of docker-compose.yml started natively: Postgres from Debian's packages, an S3 server, MLflow, Prefect and a worker, each by the
command that the compose file gives. Between MLflow and S3 stands a proxy that can answer 500 or wait.
"""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

HOST = "127.0.0.1"
START_LIMIT_S = 300.0
BIN = str(Path(sys.executable).parent)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until(what: str, condition: Any, limit_s: float = START_LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.1)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401  # up, and asks who is there
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------------------ Postgres
def postgres_programs() -> Path:
    """Directory of initdb and pg_ctl; installed from Debian's packages in CI, else the test is skipped."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found and os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "postgresql"]):
            subprocess.run(command, check=False, env=environment, capture_output=True, timeout=300)
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("needs a Postgres server: install Debian's package postgresql (initdb not found under /usr/lib/postgresql)")
    return found[-1].parent


@dataclass
class Postgres:
    """A server with the two databases of services/postgres-init.sh."""

    programs: Path
    folder: Path
    port: int
    passwords: dict[str, str]

    def url(self, user: str, like: str) -> str:
        """Address of the user's database here, with the driver of `like`, the compose file's address."""
        return f"{like.partition('://')[0]}://{user}:{self.passwords[user]}@{HOST}:{self.port}/{user}"

    def control(self, *arguments: str) -> None:
        command = [str(self.programs / "pg_ctl"), "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", *arguments]
        as_user = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}  # Postgres refuses to run as root
        subprocess.run(command, check=True, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, **as_user)  # type: ignore[call-overload]

    def restart(self) -> None:
        """As an update of the package would do it: connections are cut, what was committed stays."""
        self.control("restart", "-m", "fast")


@contextmanager
def postgres(project_root: Path) -> Iterator[Postgres]:
    programs = postgres_programs()
    # Not under pytest's folder, which only its owner may enter.
    folder = Path("/tmp") / f"bevj6-postgres-{secrets.token_hex(4)}"
    folder.mkdir()
    as_user = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    if as_user:
        shutil.chown(folder, "postgres", "postgres")
    server = Postgres(programs, folder, free_port(), {name: secrets.token_hex(8) for name in ("postgres", "mlflow", "prefect")})
    secret = folder / "password"
    secret.write_text(server.passwords["postgres"])
    secret.chmod(0o644)
    try:
        init = [str(programs / "initdb"), "-D", str(folder / "data"), "-U", "postgres", "-A", "scram-sha-256", f"--pwfile={secret}", "-E", "UTF8"]
        subprocess.run(init, check=True, cwd=folder, capture_output=True, timeout=120, **as_user)  # type: ignore[call-overload]
        server.control("-o", f"-p {server.port} -h {HOST} -k {folder} -c fsync=off", "start")
        environment = os.environ | {
            "PGHOST": HOST, "PGPORT": str(server.port), "PGPASSWORD": server.passwords["postgres"], "POSTGRES_USER": "postgres",
            "MLFLOW_DB_PASSWORD": server.passwords["mlflow"], "PREFECT_DB_PASSWORD": server.passwords["prefect"],
        }  # fmt: skip
        script = ["sh", str(project_root / "services" / "postgres-init.sh")]
        subprocess.run(script, check=True, env=environment, capture_output=True, text=True, timeout=60)
        yield server
    finally:
        with suppress(subprocess.CalledProcessError):
            server.control("stop", "-m", "immediate")
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------------------ S3
@dataclass
class Faults:
    """What the proxy does to requests: the next `errors` that write get status 500, each waits `delay_s`. `served`: errors given so far;
    `writes`: requests that wrote, so far."""

    errors: int = 0
    delay_s: float = 0.0
    served: int = 0
    writes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_error(self) -> bool:
        with self.lock:
            self.writes += 1
            if self.errors <= 0:
                return False
            self.errors -= 1
            self.served += 1
            return True


def faulty_proxy(target_port: int, faults: Faults) -> ThreadingHTTPServer:
    """An HTTP proxy in front of the S3 server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(faults.delay_s)
            if self.command in ("PUT", "POST") and faults.take_error():
                self.reply(500, {}, b"<Error><Code>InternalError</Code><Message>try again</Message></Error>")
                return
            upstream = http.client.HTTPConnection(HOST, target_port, timeout=60)
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            answer = upstream.getresponse()
            content = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in ("content-length", "transfer-encoding", "connection")}
            self.reply(answer.status, kept, content, answer.getheader("Content-Length"))
            upstream.close()

        def reply(self, status: int, headers: dict[str, str], content: bytes, length: str | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


# ------------------------------------------------------------------------------------------------------------------- the rest
@dataclass
class Stack:
    """All servers, and the environment in which commands use them."""

    postgres: Postgres
    faults: Faults
    mlflow: str
    prefect_api: str
    s3: str
    environment: dict[str, str]
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]]
    worker_command: list[str]
    started: dict[str, tuple[list[str], Path, dict[str, str]]] = field(default_factory=dict)

    def start(self, name: str, command: list[str], cwd: Path, extra: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        self.started[name] = (command, cwd, extra or {})
        with (self.folder / f"{name}.log").open("ab") as log:
            environment = self.environment | (extra or {})
            process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.processes[name] = process
        return process

    def start_worker(self, project: Path) -> int:
        """The compose file's worker: makes the pool, deploys prefect.yaml, takes runs. Returns the port of its health check."""
        health = free_port()
        self.start("worker", self.worker_command, project, {"PREFECT_WORKER_WEBSERVER_PORT": str(health), "PREFECT_WORKER_QUERY_SECONDS": "1"})
        wait_until(f"worker ({self.log('worker')})", lambda: answers(f"http://{HOST}:{health}/health"))
        return health

    def start_mlflow_again(self) -> None:
        self.start("mlflow", *self.started["mlflow"])
        wait_until(f"mlflow ({self.log('mlflow')})", lambda: answers(f"{self.mlflow}/health"))

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        if process.poll() is None:
            os.killpg(process.pid, how)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, project: Path, *command: str) -> str:
        done = subprocess.run([sys.executable, "-m", *command], cwd=project, env=self.environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr + self.log("worker")
        return done.stdout + done.stderr

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace")[-4000:] if file.is_file() else ""


@contextmanager
def stack(project_root: Path, folder: Path) -> Iterator[Stack]:
    """Everything up, except for the worker, which needs a project."""
    for module in ("moto", "boto3", "psycopg2", "flask_wtf"):
        pytest.importorskip(module, reason=f"the servers need the package {module} (pip install bevj6[dev])")
    compose = yaml.safe_load((project_root / "docker-compose.yml").read_text())["services"]
    with_login = yaml.safe_load((project_root / "docker-compose.auth.yml").read_text())["services"]["mlflow"]["command"]
    with ExitStack() as exits:
        database = exits.enter_context(postgres(project_root))
        ports = {name: free_port() for name in ("s3", "mlflow", "prefect")}
        faults = Faults()
        proxy = faulty_proxy(ports["s3"], faults)
        exits.callback(proxy.shutdown)
        s3 = f"http://{HOST}:{proxy.server_port}"
        api = f"http://{HOST}:{ports['prefect']}/api"
        login = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": secrets.token_hex(10)}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "PREFECT_", "AWS_"))}
        own = {"PATH": os.pathsep.join([BIN, os.environ["PATH"]]), "PYTHONPATH": str(project_root), "HOME": str(folder)}
        addresses = {"PREFECT_API_URL": api, "MLFLOW_TRACKING_URI": f"http://{HOST}:{ports['mlflow']}", "PREFECT_HOME": str(folder / "prefect")}
        environment = clean | login | own | addresses | {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        up = Stack(database, faults, environment["MLFLOW_TRACKING_URI"], api, s3, environment, folder, {}, compose["worker"]["command"])
        exits.callback(lambda: [up.stop(name) for name in reversed(list(up.processes))])
        start_servers(up, project_root, compose, with_login, ports)
        yield up


def start_servers(up: Stack, project_root: Path, compose: dict[str, Any], mlflow_command: list[str], ports: dict[str, int]) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "bevj6", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(8), "AWS_DEFAULT_REGION": "us-east-1"}
    up.start("s3", [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(ports["s3"])], up.folder)
    prefect_command = [native(part, ports["prefect"]) for part in compose["prefect"]["command"]]
    database = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
    up.start("prefect", prefect_command, up.folder, {database: up.postgres.url("prefect", compose["prefect"]["environment"][database])})
    wait_until(f"s3 ({up.log('s3')})", lambda: answers(f"http://{HOST}:{ports['s3']}/moto-api/"))
    make_bucket(up.s3, keys)
    users = up.folder / "mlflow-auth.ini"
    users.write_text((project_root / "services/mlflow-auth.ini").read_text().replace("/auth/users.db", f"{up.folder}/users.db"))
    extra = keys | {
        "MLFLOW_BACKEND_STORE_URI": up.postgres.url("mlflow", compose["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"]),
        "MLFLOW_S3_ENDPOINT_URL": up.s3, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_AUTH_CONFIG_PATH": str(users), "MLFLOW_AUTH_ADMIN_USERNAME": up.environment["MLFLOW_TRACKING_USERNAME"],
        "MLFLOW_AUTH_ADMIN_PASSWORD": up.environment["MLFLOW_TRACKING_PASSWORD"], "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(16),
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required", "AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "3",
    }  # fmt: skip
    up.start("mlflow", [native(part, ports["mlflow"]) for part in mlflow_command], up.folder, extra)
    wait_until(f"mlflow ({up.log('mlflow')})", lambda: alive(up, "mlflow") and answers(f"{up.mlflow}/health"))
    wait_until(f"prefect ({up.log('prefect')})", lambda: alive(up, "prefect") and answers(f"{up.prefect_api}/health"))


def alive(up: Stack, name: str) -> bool:
    assert up.processes[name].poll() is None, up.log(name)
    return True


def native(part: str, port: int) -> str:
    """A part of a compose command with this machine's address."""
    if part.startswith("--port="):
        return f"--port={port}"
    return part.replace("--host=0.0.0.0", f"--host={HOST}")


def make_bucket(endpoint: str, keys: dict[str, str]) -> None:
    import boto3

    access = {"aws_access_key_id": keys["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": keys["AWS_SECRET_ACCESS_KEY"]}
    client = boto3.client("s3", endpoint_url=endpoint, region_name=keys["AWS_DEFAULT_REGION"], **access)
    client.create_bucket(Bucket="mlflow")
