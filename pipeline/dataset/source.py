"""Where the data set is and what it provides: the content of data/dataset.json."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import DatasetConfig
from pipeline.dataset.build import timestamps_us
from pipeline.dataset.occupancy import labels_path
from pipeline.dataset.splits import resolve_splits
from pipeline.dataset.tables import TABLE_NAMES, Tables, check_references, positions, read_tables, reference
from pipeline.errors import file_error
from pipeline.io import read_json, sha256_file
from pipeline.paths import Paths
from pipeline.taxonomy import LIDAR

# Contents of the sensor files count in the fingerprint up to this sum; beyond it their names and sizes do, because hashing would take
# hours.
CONTENT_HASH_LIMIT_BYTES = 512 << 20


def dataroot(config: DatasetConfig, paths: Paths) -> Path:
    """The directory of the data set: data/nuscenes for source synthetic, else `dataset.dataroot` (relative to the project root)."""
    return paths.synthetic_dataroot if config.dataroot is None else paths.root / config.dataroot


@dataclass(frozen=True)
class Description:
    """data/dataset.json, for the stages that read it."""

    dataroot: str
    version: str
    fingerprint: str
    splits: dict[str, list[str]]
    provides: dict[str, Any]
    pairs: str

    @classmethod
    def read(cls, path: Path) -> Description:
        """Read data/dataset.json. Raises `DataError` when it is missing or damaged."""
        stored = read_json(path)
        try:
            return cls(**{name: stored[name] for name in ("dataroot", "version", "fingerprint", "splits", "provides", "pairs")})
        except (KeyError, TypeError):
            raise file_error(path, "not a description of a data set", "Run the stage 'dataset' again") from None


def describe(config: DatasetConfig, paths: Paths) -> dict[str, Any]:
    """Check the tables of the data set and say what it holds.

    Raises:
        DataError: a table is missing, damaged or refers to an unknown token, or no scene has samples.
        ConfigError: the splits in params.yaml do not fit.
    """
    root = dataroot(config, paths)
    tables = read_tables(root, config.version)
    check_references(tables)
    scenes = _scenes_by_time(tables)
    if not scenes:
        raise file_error(tables.folder / "sample.json", "no scene has samples")
    splits = resolve_splits(scenes, config.val_scenes, root, config.version)
    files = _key_frame_files(tables)
    provides = _provides(tables, root, files)
    hashed_contents, fingerprint = _fingerprint(tables, root, files["filename"].to_pylist(), provides["map_expansion"])
    return {
        "source": config.source,
        "dataroot": _recorded_root(root, paths),
        "version": config.version,
        "counts": tables.counts(),
        "fingerprint": fingerprint,
        "fingerprint_covers": "contents" if hashed_contents else "names and sizes of sensor files, contents of tables and maps",
        "provides": provides,
        "pairs": config.pairs,
        "splits": splits.as_dict(),
        "split_origin": splits.origin,
        "notes": [*splits.notes, *_notes(tables, provides, scenes)],
    }


def _recorded_root(root: Path, paths: Paths) -> str:
    """Relative to the project when inside it, so that a moved project still works."""
    absolute, project = root.resolve(), paths.root.resolve()
    return absolute.relative_to(project).as_posix() if absolute.is_relative_to(project) else absolute.as_posix()


def _scenes_by_time(tables: Tables) -> list[str]:
    scene = reference(tables, "sample", "scene_token", "scene")
    stamps = timestamps_us(tables.sample["timestamp"])
    first = np.full(tables.scene.num_rows, np.iinfo(np.int64).max)
    np.minimum.at(first, scene, stamps)
    names = tables.scene["name"].to_pylist()
    seen = np.unique(scene)
    return [names[row] for row in seen[np.lexsort((seen, first[seen]))]]


def _key_frame_files(tables: Tables) -> pa.Table:
    """Channel and file name of every key frame, sorted by name."""
    data = tables.sample_data.filter(tables.sample_data["is_key_frame"])
    calibration = tables.calibrated_sensor.take(pa.array(positions(data["calibrated_sensor_token"], tables.calibrated_sensor)))
    channel = tables.sensor["channel"].combine_chunks().take(pa.array(positions(calibration["sensor_token"], tables.sensor)))
    return pa.table({"channel": channel, "filename": data["filename"]}).sort_by("filename")


def _provides(tables: Tables, root: Path, files: pa.Table) -> dict[str, Any]:
    lidar = files.filter(pc.equal(files["channel"], LIDAR))["filename"].to_pylist()
    locations = sorted(set(tables.log["location"].to_pylist()))
    names = tables.scene["name"].to_pylist()
    scene = reference(tables, "sample", "scene_token", "scene")
    labels = (labels_path(root, names[row], token) for row, token in zip(scene, tables.sample["token"].to_pylist(), strict=True))
    return {
        "lidar": any((root / name).is_file() for name in lidar),
        "map_expansion": [name for name in locations if (root / "maps" / "expansion" / f"{name}.json").is_file()],
        "occupancy": sum(path.is_file() for path in labels) if (root / "gts").is_dir() else 0,
    }


def _notes(tables: Tables, provides: dict[str, Any], scenes: list[str]) -> list[str]:
    notes = []
    empty = [name for name in tables.scene["name"].to_pylist() if name not in set(scenes)]
    if empty:
        notes.append(f"{len(empty)} scenes have no samples and are not used: {', '.join(empty[:5])}.")
    lacking = sorted(set(tables.log["location"].to_pylist()) - set(provides["map_expansion"]))
    if lacking:
        notes.append(f"No map expansion for {', '.join(lacking)}: samples there have no vector map labels.")
    if not provides["lidar"]:
        notes.append("No lidar key frame file: depth is not supervised.")
    if not provides["occupancy"]:
        notes.append("No occupancy labels: the occupancy head is not trained.")
    return notes


def _fingerprint(tables: Tables, root: Path, sensor_files: list[str], locations: list[str]) -> tuple[bool, str]:
    """Whether sensor file contents are covered, and the sha256 over tables, maps and sensor files."""
    sizes = {name: path.stat().st_size if (path := root / name).is_file() else -1 for name in sensor_files}
    with_contents = sum(max(0, size) for size in sizes.values()) <= CONTENT_HASH_LIMIT_BYTES
    digest = hashlib.sha256()
    for name in TABLE_NAMES:
        digest.update(f"{name} {sha256_file(tables.folder / f'{name}.json')}\n".encode())
    for location in locations:
        digest.update(f"{location} {sha256_file(root / 'maps' / 'expansion' / f'{location}.json')}\n".encode())
    for name, size in sizes.items():
        content = sha256_file(root / name) if with_contents and size > 0 else ""
        digest.update(f"{name} {size} {content}\n".encode())
    for label in sorted((root / "gts").glob("*/*/labels.npz")):
        content = sha256_file(label) if with_contents else ""
        digest.update(f"{label.relative_to(root).as_posix()} {label.stat().st_size} {content}\n".encode())
    return with_contents, digest.hexdigest()
