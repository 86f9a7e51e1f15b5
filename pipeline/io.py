"""Reading and writing files so that nothing is half-written and every bad file is named."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import file_error


def print_answer(text: str) -> None:
    """Print the answer of a command; a reader that closed the pipe early (`| head`) has had enough and is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail again


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary file path beside `target`; rename it over `target` on success, remove it on failure."""
    temporary = _temporary_sibling(target)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_dir(target: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `target`; swap it in on success, so readers see the old or the new one, never a mix."""
    temporary = _temporary_sibling(target)
    temporary.mkdir()
    retired = temporary.with_name(temporary.name + ".old")
    try:
        yield temporary
        if target.exists():
            os.replace(target, retired)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def _temporary_sibling(target: Path) -> Path:
    """A fresh hidden path beside `target`, named by this process; what killed processes left there is removed first.

    The suffix of `target` is kept because some writers (numpy, pyarrow) choose the format by it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):
        process = leftover.name.removeprefix(f".{target.name}.tmp-").split("-")[0]
        if not process.isdigit() or not Path(f"/proc/{process}").exists():
            remove(leftover)
    return target.parent / f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}{target.suffix}"


def remove(path: Path) -> None:
    """Delete a file or a directory tree; absent is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(target: Path, value: Any) -> None:
    """Write canonical JSON (sorted keys, two spaces, NaN refused) atomically, so that equal content is equal bytes."""
    write_text(target, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; raise `DataError` naming the file when it is missing, cut or malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise file_error(path, "file not found") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise file_error(path, f"not valid JSON ({error})") from error


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def canonical_hash(value: Any) -> str:
    """Hex sha256 of a JSON-serialisable value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def inside(root: Path, relative: str) -> Path:
    """Join `relative` to `root`; raise `DataError` if the result escapes `root` (absolute paths, "..", links)."""
    path = (root / relative).resolve()
    if not path.is_relative_to(root.resolve()):
        raise file_error(relative, f"path leaves its root {root}")
    return path
