"""DVC over machines: a remote in an S3 store that fails half-way, and a cache that several checkouts share, by the commands of docs/operations.md."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.servers import HOST, Faults, answers, faulty_proxy, free_port, wait_until

pytestmark = pytest.mark.integration

OUTPUTS = ("models/multitask.onnx", "models/multitask_int8.onnx", "models/float/curves.csv", "reports/gate.json")
KEYS = {"AWS_ACCESS_KEY_ID": "bevj6", "AWS_SECRET_ACCESS_KEY": "not-checked-here", "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}


@dataclass(frozen=True)
class Store:
    """An S3 server behind a proxy that can refuse to write."""

    address: str
    faults: Faults

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.address, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b")

    def keys(self) -> list[str]:
        return sorted(item["Key"] for item in self.client().list_objects_v2(Bucket="bucket", Prefix="path/").get("Contents", []))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    for module in ("moto", "boto3", "dvc_s3"):
        pytest.importorskip(module, reason=f"needs the package {module} (pip install bevj6[dev])")

    port, faults = free_port(), Faults()
    with (tmp_path_factory.mktemp("s3") / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], stdout=log, stderr=subprocess.STDOUT)
    proxy = faulty_proxy(port, faults)
    found = Store(f"http://{HOST}:{proxy.server_port}", faults)
    try:
        wait_until("s3", lambda: answers(f"http://{HOST}:{port}/moto-api/"))
        found.client().create_bucket(Bucket="bucket")
        yield found
    finally:
        proxy.shutdown()
        server.kill()
        server.wait()


def dvc(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dvc", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | KEYS, capture_output=True, text=True, timeout=200, check=False)


def must(folder: Path, *arguments: str) -> None:
    done = dvc(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def checkout_with_shared_cache(source: Path, target: Path, cache: Path) -> Path:
    """Another machine's checkout, with the cache that the machines share."""
    subprocess.run(["git", "clone", "--quiet", str(source), str(target)], check=True)
    must(target, "cache", "dir", "--local", str(cache))
    must(target, "config", "--local", "cache.shared", "group")
    must(target, "config", "--local", "cache.type", "hardlink,copy")
    return target


def test_push_cut_short_is_repeated_and_machines_share_what_was_pulled_once(built_copy: Path, tmp_path: Path, store: Store) -> None:
    must(built_copy, "remote", "add", "--default", "store", "s3://bucket/path")
    must(built_copy, "remote", "modify", "store", "endpointurl", store.address)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "add", "--all"], cwd=built_copy, check=True)
    subprocess.run(["git", *identity, "commit", "--quiet", "--message", "run"], cwd=built_copy, check=True)

    store.faults.errors = 3
    pushed = dvc(built_copy, "push")
    assert pushed.returncode != 0
    assert "failed to push data to the cloud" in pushed.stderr, pushed.stderr
    half = store.keys()
    must(built_copy, "push")
    objects = sorted(str(path.relative_to(built_copy / ".dvc/cache")) for path in (built_copy / ".dvc/cache/files").rglob("*") if path.is_file())
    assert store.keys() == [f"path/{name}" for name in objects]  # nothing lost, nothing twice
    assert half
    assert set(half) < set(store.keys())

    shared = tmp_path / "shared-cache"
    first = checkout_with_shared_cache(built_copy, tmp_path / "first", shared)
    must(first, "pull")
    assert all((first / name).read_bytes() == (built_copy / name).read_bytes() for name in OUTPUTS)
    folders = [path for path in (shared / "files/md5").rglob("*") if path.is_dir()]
    assert all(path.stat().st_mode & stat.S_IWGRP for path in folders)  # others of the group may add to it

    shutil.rmtree(built_copy / ".dvc/cache")
    second = tmp_path / "second"
    subprocess.run(["git", "clone", "--quiet", str(first), str(second)], check=True)
    shutil.copy(first / ".dvc/config.local", second / ".dvc")
    must(second, "checkout")  # asks no remote
    for name in OUTPUTS:
        assert (second / name).stat().st_ino == (first / name).stat().st_ino, name  # one file on the disk, in three places


def test_data_delivered_to_the_store_come_in_and_are_updated(tmp_path: Path, store: Store) -> None:
    def deliver(name: str, content: str) -> None:
        store.client().put_object(Bucket="bucket", Key=f"delivered/{name}", Body=content.encode())

    deliver("v1.0/scene.json", "[]")
    deliver("samples/a.jpg", "picture")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    must(tmp_path, "init")
    must(tmp_path, "remote", "add", "delivery", "s3://bucket/delivered")
    must(tmp_path, "remote", "modify", "delivery", "endpointurl", store.address)
    must(tmp_path, "import-url", "remote://delivery/", "raw")
    assert (tmp_path / "raw/samples/a.jpg").read_text() == "picture"
    deliver("v1.0/scene.json", "[1]")
    must(tmp_path, "update", "raw.dvc")
    assert (tmp_path / "raw/v1.0/scene.json").read_text() == "[1]"
