"""Versions that wait for MLflow: when the server is away, everything a registration needs is set aside, because the next run overwrites it.

.services/outbox/<number>-<key>/ has the layout of a project, with the state of git in git.json. `register_release` sends what waits, oldest first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.config import Config, load_config
from pipeline.io import atomic_dir, read_json, remove, write_json, write_text
from pipeline.paths import Paths
from pipeline.tracking.release import Release, read_release
from pipeline.tracking.revision import GitState, locked_md5, read_lock

OUTBOX = ".services/outbox"
KEY_LENGTH = 16


@dataclass(frozen=True)
class Parked:
    """One version that waits."""

    folder: Path
    release: Release

    def remove(self) -> None:
        """Forget it, after it was sent."""
        remove(self.folder)


def park(paths: Paths, config: Config) -> Path:
    """Set the working tree's version aside. Returns its folder; the second time nothing is copied.

    Raises:
        DataError, ModelError: as `read_release`.
    """
    release = read_release(paths, config)
    folders = parked_folders(paths)
    for folder in folders:
        if folder.name.endswith(release.key[:KEY_LENGTH]):
            return folder
    number = int(folders[-1].name.split("-")[0]) + 1 if folders else 1  # counted, not dated: a clock can jump
    folder = paths.root / OUTBOX / f"{number:04d}-{release.key[:KEY_LENGTH]}"
    files = {file.relative_to(paths.root) for file in release.files.values()} | {Path(name) for name in locked_md5(read_lock(paths.root))}
    write_text(paths.root / OUTBOX / ".dvcignore", "*\n")  # the copies of dvc.yaml in there are no pipelines
    with atomic_dir(folder) as temporary:
        for relative in files:
            (temporary / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(paths.root / relative, temporary / relative)
        write_json(temporary / "git.json", asdict(release.git))
    return folder


def waiting(paths: Paths, config: Config) -> Iterator[Parked]:
    """Parked versions, oldest first. Names in MLflow come from `config`, everything else from the time at which they were parked."""
    for folder in parked_folders(paths):
        then = load_config(folder / "params.yaml").model_copy(update={"tracking": config.tracking})
        yield Parked(folder, read_release(Paths(folder), then, GitState(**read_json(folder / "git.json"))))


def parked_folders(paths: Paths) -> list[Path]:
    """Folders of the versions that wait, oldest first."""
    return sorted(folder for folder in (paths.root / OUTBOX).glob("[0-9]*-*") if folder.is_dir())
