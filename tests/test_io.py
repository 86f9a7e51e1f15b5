"""Files are whole or absent, and bad ones are named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.errors import DataError
from pipeline.io import atomic_dir, atomic_path, canonical_hash, inside, read_json, write_json


def test_failed_write_keeps_the_last_good_file(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    write_json(target, {"a": 1})
    with pytest.raises(ValueError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise ValueError
    assert read_json(target) == {"a": 1}
    assert os.listdir(tmp_path) == ["report.json"]


def test_failed_directory_keeps_the_last_good_one(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with atomic_dir(target) as temporary:
        (temporary / "a").write_text("1")
    with pytest.raises(ValueError), atomic_dir(target) as temporary:
        (temporary / "b").write_text("2")
        raise ValueError
    assert os.listdir(target) == ["a"]
    assert os.listdir(tmp_path) == ["out"]


def test_directory_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for name in ("a", "b"):
        with atomic_dir(target) as temporary:
            (temporary / name).write_text("1")
    assert os.listdir(target) == ["b"]


@pytest.mark.parametrize("content", [b'{"a": 1', b"\xff\xfe\x00", b""])
def test_broken_json_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "sample.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"sample\.json: not valid JSON"):
        read_json(path)


def test_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})


def test_hash_ignores_key_order() -> None:
    assert canonical_hash({"a": 1, "b": 2}) == canonical_hash({"b": 2, "a": 1})


@pytest.mark.parametrize("relative", ["../x", "/etc/passwd", "a/../../x"])
def test_paths_cannot_leave_their_root(tmp_path: Path, relative: str) -> None:
    with pytest.raises(DataError, match="leaves its root"):
        inside(tmp_path, relative)


def test_links_cannot_leave_their_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(DataError, match="leaves its root"):
        inside(root, "link/secret")


def test_leftovers_of_killed_processes_are_removed_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    dead = tmp_path / ".out.json.tmp-999999999-aa.json"
    alive = tmp_path / f".out.json.tmp-{os.getpid()}-bb.json"
    dead.write_text("half")
    alive.write_text("half")
    write_json(target, 1)
    assert not dead.exists()
    assert alive.exists()
