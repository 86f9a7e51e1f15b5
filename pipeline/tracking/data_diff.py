"""What changed in the data between two versions of the project: scenes, sensor frames, labels, maps. `bevj6 data diff REV1 REV2`.

Reads what the stages `validate` and `topology` made of the data (data/index, data/maps) as git and DVC hold it for each version, so it works for
the embedded data set, for one added with `dvc add` or `dvc import-url`, and for one that lies outside DVC. Contents of sensor files and occupancy
labels are compared where the data set is an output of DVC, by the hashes DVC keeps.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import DataError, file_error
from pipeline.tracking.revision import is_revision

if TYPE_CHECKING:
    import pyarrow as pa
    from dvc.api import DVCFileSystem

WORKING_TREE = "."
FRAME_COLUMNS = ("channel", "timestamp_us", "filename", "width", "height", "intrinsics", "sensor2ego", "ego2global", "problem")
BOX_COLUMNS = (
    "instance_token", "category", "global_center", "size_wlh", "global_quaternion", "global_velocity", "num_lidar_pts", "visibility", "attribute",
)  # fmt: skip
SAMPLE_COLUMNS = ("token", "timestamp_us", "split", "keep", "drop_reason")


@dataclass(frozen=True)
class SceneParts:
    """One scene of one version: counts for people, hashes for the comparison. A hash is "" where the version does not hold the part."""

    samples: int
    boxes: int
    location: str
    selection: str  # which samples there are, their split and whether they are kept
    frames: str  # sensor records with calibration and pose
    files: str  # contents of the sensor files
    labels: str  # boxes
    occupancy: str
    map: str


PARTS = ("selection", "frames", "files", "labels", "occupancy", "map")


@dataclass(frozen=True)
class DataDiff:
    """`changed`: for each scene that both have, the parts that differ. `maps`: base map files that differ."""

    a: str
    b: str
    fingerprints: tuple[str | None, str | None]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: dict[str, tuple[str, ...]]
    boxes: dict[str, tuple[int, int]]
    maps: tuple[str, ...]
    unchanged: int

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.added or self.removed or self.changed or self.maps) and self.fingerprints[0] == self.fingerprints[1]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "same": self.same}


@dataclass(frozen=True)
class DataVersion:
    """The data of one version of the project."""

    fingerprint: str | None
    scenes: dict[str, SceneParts]
    maps: dict[str, str]


def diff_data(root: Path, a: str, b: str) -> DataDiff:
    """Compare the data of two git revisions of the project at `root`; "." is the working tree.

    Raises:
        DataError: no such revision, or its data/index cannot be had.
    """
    old, new = read_data_version(root, a), read_data_version(root, b)
    both = sorted(old.scenes.keys() & new.scenes.keys())
    changed = {name: parts for name in both if (parts := _changed_parts(old.scenes[name], new.scenes[name]))}
    return DataDiff(
        a, b, (old.fingerprint, new.fingerprint),
        added=tuple(sorted(new.scenes.keys() - old.scenes.keys())),
        removed=tuple(sorted(old.scenes.keys() - new.scenes.keys())),
        changed=changed,
        boxes={name: (old.scenes[name].boxes, new.scenes[name].boxes) for name, parts in changed.items() if "labels" in parts},
        maps=tuple(sorted(name for name in old.maps.keys() | new.maps.keys() if old.maps.get(name) != new.maps.get(name))),
        unchanged=len(both) - len(changed),
    )  # fmt: skip


def read_data_version(root: Path, revision: str) -> DataVersion:
    """The data of one version.

    Raises:
        DataError: as in `diff_data`.
    """
    if revision != WORKING_TREE and not is_revision(root, revision):
        raise DataError(f"{revision}: not a git revision of {root.resolve()} (the working tree is '.')")
    from dvc.api import DVCFileSystem

    files = DVCFileSystem(str(root), rev=None if revision == WORKING_TREE else revision)
    samples, frames, boxes = (_table(files, revision, name) for name in ("samples", "frames", "boxes"))
    dataset = json.loads(files.read_text("data/dataset.json")) if files.exists("data/dataset.json") else {}
    hashes = _hashes(files, "data/nuscenes") | _hashes(files, "data/maps/scenes")
    contents = {path.removeprefix("data/nuscenes/"): digest for path, digest in hashes.items()}
    scenes = _scenes(samples, frames, boxes, contents)
    return DataVersion(dataset.get("fingerprint"), scenes, {path: digest for path, digest in contents.items() if path.startswith("maps/")})


def as_text(diff: DataDiff) -> str:
    """For a terminal: one line per scene that differs."""
    if diff.same:
        return f"the data of {diff.a} and {diff.b} are the same: {diff.unchanged} scenes, fingerprint {diff.fingerprints[0]}"
    lines = [f"fingerprint: {diff.fingerprints[0]} -> {diff.fingerprints[1]}"]
    lines += [f"+ {name}" for name in diff.added] + [f"- {name}" for name in diff.removed]
    for name, parts in diff.changed.items():
        counts = f" ({diff.boxes[name][0]} -> {diff.boxes[name][1]} boxes)" if name in diff.boxes else ""
        lines.append(f"~ {name}: {', '.join(parts)}{counts}")
    lines += [f"~ {name}" for name in diff.maps]
    totals = f"{len(diff.added)} scenes added, {len(diff.removed)} removed, {len(diff.changed)} changed, {diff.unchanged} unchanged"
    return "\n".join([*lines, f"{totals}; {len(diff.maps)} map files differ"])


def _table(files: DVCFileSystem, revision: str, name: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path = f"data/index/{name}.parquet"
    try:
        return parquet.read_table(io.BytesIO(files.read_bytes(path)))
    except FileNotFoundError:
        problem = "is not in this version, or neither in the DVC cache nor in a remote"
        raise file_error(f"{revision}: {path}", problem, "Run `dvc repro validate`") from None
    except pa.ArrowInvalid as error:
        raise file_error(f"{revision}: {path}", f"not a Parquet file ({error})") from error


def _hashes(files: DVCFileSystem, folder: str) -> dict[str, str]:
    """{path: md5} of the files under a DVC output; empty where the version has no such output."""
    if not files.exists(folder):
        return {}
    entries = files.find(folder, detail=True)
    return {path: str(info["dvc_info"].get("md5") or "") for path, info in entries.items() if info.get("dvc_info")}


def _scenes(samples: pa.Table, frames: pa.Table, boxes: pa.Table, contents: dict[str, str]) -> dict[str, SceneParts]:
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in samples.to_pylist():
        rows[row["scene_name"]].append(row)
    scene_of = {row["token"]: row["scene_name"] for group in rows.values() for row in group}
    frames_of, boxes_of = _by_scene(frames, scene_of), _by_scene(boxes, scene_of)
    occupancy: dict[str, list[str]] = defaultdict(list)
    for path in contents:
        if path.startswith("gts/"):
            occupancy[path.split("/")[1]].append(path)
    return {
        name: SceneParts(
            samples=len(group),
            boxes=len(boxes_of[name]),
            location=str(group[0]["location"]),
            selection=_hash_rows(group, SAMPLE_COLUMNS),
            frames=_hash_rows(frames_of[name], FRAME_COLUMNS),
            files=_hash_files((row["filename"] for row in frames_of[name]), contents),
            labels=_hash_rows(boxes_of[name], BOX_COLUMNS),
            occupancy=_hash_files(occupancy[name], contents),
            map=contents.get(f"data/maps/scenes/{name}.npz", ""),
        )
        for name, group in rows.items()
    }


def _by_scene(table: pa.Table, scene_of: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        found[scene_of[row["sample_token"]]].append(row)
    return found


def _hash_rows(rows: Iterable[dict[str, Any]], columns: tuple[str, ...]) -> str:
    """Hash of some columns, whatever the order of the rows."""
    return _digest(json.dumps([row.get(column) for column in columns], default=str) for row in rows)


def _hash_files(paths: Iterable[str], contents: dict[str, str]) -> str:
    """Hash of the contents of files; "" where DVC holds none of them."""
    known = [f"{path} {contents[path]}" for path in paths if contents.get(path)]
    return _digest(known) if known else ""


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _changed_parts(a: SceneParts, b: SceneParts) -> tuple[str, ...]:
    """Parts that differ; one that a version does not hold cannot be compared."""
    return tuple(part for part in PARTS if getattr(a, part) and getattr(b, part) and getattr(a, part) != getattr(b, part))
