"""The files kept with a version, and the proof that they are still the ones that were logged: a list of sha256 whose own sha256 is a tag."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import DataError
from pipeline.io import canonical_hash, inside, read_json, sha256_file

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

MANIFEST = "pipeline/sha256.json"
MANIFEST_TAG = "bevj6.artifacts_sha256"
RUN_TAG = "bevj6.run_id"


def log_files(client: MlflowClient, run_id: str, files: Mapping[str, Path], texts: Mapping[str, str] = {}) -> str:
    """Log files and texts, each at its artifact path, then the list of their hashes. Returns the list's own hash."""
    with tempfile.TemporaryDirectory() as folder:
        for relative, file in files.items():
            _place(Path(folder) / relative, file.read_bytes())
        for relative, text in texts.items():
            _place(Path(folder) / relative, text.encode(errors="surrogateescape"))
        manifest = {relative: sha256_file(Path(folder) / relative) for relative in (*files, *texts)}
        client.log_artifacts(run_id, folder)
        # Last, so that a list without its files cannot be.
        client.log_text(run_id, json.dumps(manifest, indent=2, sort_keys=True) + "\n", MANIFEST)
    return canonical_hash(manifest)


def files_hash(files: Mapping[str, Path]) -> str:
    """What `log_files` would return for these files."""
    return canonical_hash({relative: sha256_file(file) for relative, file in files.items()})


@contextmanager
def stored_files(client: MlflowClient, version: ModelVersion) -> Iterator[Path]:
    """A temporary folder with the files kept with a version, each checked.

    Raises:
        DataError: the version was not registered by this project, or a file is missing or was changed.
    """
    run_id, expected = version.tags.get(RUN_TAG), version.tags.get(MANIFEST_TAG)
    what = f"{version.name} version {version.version}"
    if run_id is None or expected is None:
        raise DataError(f"{what}: has no tags {RUN_TAG} and {MANIFEST_TAG}; it was not registered by this project")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        client.download_artifacts(run_id, "", name)
        _check(what, folder, expected)
        yield folder


def _check(what: str, folder: Path, expected: str) -> None:
    """Compare the list with its tag and each file with the list. Files beside the listed ones (the model has its own hash) are not looked at."""
    if not (folder / MANIFEST).is_file():
        raise DataError(f"{what}: {MANIFEST} is missing in the artifact store")
    manifest = read_json(folder / MANIFEST)
    if canonical_hash(manifest) != expected:
        raise DataError(f"{what}: {MANIFEST} is not the one that was logged (tag {MANIFEST_TAG})")
    for relative, digest in manifest.items():
        file = inside(folder, relative)
        if not file.is_file():
            raise DataError(f"{what}: {relative} is missing in the artifact store")
        if sha256_file(file) != digest:
            raise DataError(f"{what}: {relative} was changed after it was logged")


def _place(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
