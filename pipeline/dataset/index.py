"""The columnar index on disk: written once by the validate stage, read by every later stage.

    index = Index.open(Path("data/index"))
    for token in index.tokens("train"):
        record = index.sample(token)      # SampleRecord: cameras, lidar, boxes in the BEV frame

Opening reads the samples table only. Frames and boxes are read by row group when a sample needs them, so memory stays small at any size.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.dataset.build import IndexTables, matrices
from pipeline.dataset.records import Boxes, CameraFrame, LidarFrame, SampleRecord
from pipeline.errors import DataError, file_error
from pipeline.io import atomic_dir, read_json
from pipeline.taxonomy import LIDAR

_ROW_GROUP = {"samples": 1 << 20, "frames": 1 << 11, "sweeps": 1 << 18, "calibrations": 1 << 20, "boxes": 1 << 12, "instances": 1 << 20}
_REPEATED = (
    "channel", "modality", "category", "attribute", "sample_token", "instance_token", "calibrated_sensor_token", "scene_token", "scene_name", "split",
    "location", "drop_reason", "problem",
)  # fmt: skip
_HELD_ROW_GROUPS = 16


def write_index(index: IndexTables, directory: Path, dataroot: str, version: str, fingerprint: str, pairs: str = "previous") -> None:
    """Write the tables as Parquet and `meta.json`; equal tables give equal bytes.

    Args:
        index: the tables.
        directory: replaced as a whole.
        dataroot: where the files of the frames are, relative to the project root or absolute (as in data/dataset.json).
        version: table directory under the dataroot.
        fingerprint: content fingerprint of the data set.
        pairs: "previous" where a sample may be paired with the one before in its scene, "none" where every sample stands alone.
    """
    with atomic_dir(directory) as temporary:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: _write(getattr(index, name), temporary / f"{name}.parquet", _ROW_GROUP[name]), _ROW_GROUP))
        meta = {"dataroot": dataroot, "version": version, "fingerprint": fingerprint, "pairs": pairs}
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write(table: pa.Table, path: Path, rows: int) -> None:
    """Parquet without what costs time and is of no use here: dictionaries of columns that hardly repeat, and statistics, which nobody filters by."""
    repeated = [name for name in _REPEATED if name in table.column_names]
    pq.write_table(table, path, compression="zstd", row_group_size=rows, use_dictionary=repeated, write_statistics=False)


class Index:
    """Read access to data/index. Build with `Index.open`."""

    def __init__(self, directory: Path, dataroot: Path, meta: dict[str, str], samples: pa.Table) -> None:
        self.directory = directory
        self.dataroot = dataroot
        self.version = meta["version"]
        self.fingerprint = meta["fingerprint"]
        self.paired = meta.get("pairs", "previous") == "previous"
        self.samples = samples
        self._row = {token: row for row, token in enumerate(samples["token"].to_pylist())}
        self._frames = _RowGroups(directory / "frames.parquet")
        self._boxes = _RowGroups(directory / "boxes.parquet")

    @classmethod
    def open(cls, directory: Path, dataroot: Path | None = None) -> Index:
        """Open an index.

        Args:
            directory: `<project>/data/index`.
            dataroot: overrides the recorded place of the data set (for an index that was moved).

        Raises:
            DataError: the index is missing or damaged.
        """
        meta = read_json(directory / "meta.json")
        root = dataroot or directory.resolve().parents[1] / meta["dataroot"]
        return cls(directory, root, meta, _read(directory / "samples.parquet"))

    def __len__(self) -> int:
        return self.samples.num_rows

    def tokens(self, split: str | None = None, kept_only: bool = True) -> list[str]:
        """Sample tokens scene by scene in time order, of one split or of all."""
        return [token for scene in self.scenes(split, kept_only).values() for token in scene]

    def scenes(self, split: str | None = None, kept_only: bool = True) -> dict[str, list[str]]:
        """Sample tokens in time order by scene name; scenes without samples are left out."""
        table = self.samples.select(["token", "scene_name", "split", "keep"])
        if split is not None:
            table = table.filter(pc.equal(table["split"], split))
        if kept_only:
            table = table.filter(table["keep"])
        scenes: dict[str, list[str]] = {}
        for token, name in zip(table["token"].to_pylist(), table["scene_name"].to_pylist(), strict=True):
            scenes.setdefault(name, []).append(token)
        return scenes

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """A whole table: samples, frames, sweeps, calibrations, boxes or instances."""
        return _read(self.directory / f"{name}.parquet", columns)

    def sample(self, token: str) -> SampleRecord:
        """The record of one sample. Raises `DataError` for an unknown token."""
        if token not in self._row:
            raise file_error(self.directory / "samples.parquet", f"sample token {token!r} is unknown")
        row = self.samples.slice(self._row[token], 1).to_pylist()[0]
        frames = self._frames.rows(row["first_frame"], row["frames"])
        cameras, lidar = self._sensors(frames)
        names = ("token", "scene_token", "scene_name", "index_in_scene", "timestamp_us", "prev", "next", "split", "location")
        return SampleRecord(
            **{name: row[name] for name in names},
            ego2global=np.array(row["ego2global"]).reshape(4, 4),
            cameras=cameras,
            lidar=lidar,
            boxes=_boxes(self._boxes.rows(row["first_box"], row["boxes"])),
        )

    def _sensors(self, frames: pa.Table) -> tuple[dict[str, CameraFrame], LidarFrame | None]:
        """Cameras by channel, and the LIDAR_TOP frame unless it is missing or its file cannot be used."""
        cameras: dict[str, CameraFrame] = {}
        lidar = None
        intrinsics = matrices(frames["intrinsics"], 3)
        sensor2ego, ego2global = matrices(frames["sensor2ego"], 4), matrices(frames["ego2global"], 4)
        plain = frames.select(["channel", "modality", "filename", "timestamp_us", "width", "height", "problem"]).to_pylist()
        for i, frame in enumerate(plain):
            path = self.dataroot / frame["filename"]
            if frame["modality"] == "camera":
                cameras[frame["channel"]] = CameraFrame(
                    path, frame["timestamp_us"], frame["width"], frame["height"], intrinsics[i], sensor2ego[i], ego2global[i]
                )
            elif frame["channel"] == LIDAR and not frame["problem"]:
                lidar = LidarFrame(path, frame["timestamp_us"], sensor2ego[i], ego2global[i])
        return cameras, lidar


def _boxes(table: pa.Table) -> Boxes:
    def column(name: str) -> Any:
        return table[name].to_numpy()

    return Boxes(
        tokens=tuple(table["token"].to_pylist()),
        instance_tokens=tuple(table["instance_token"].to_pylist()),
        center_m=np.stack([column("x"), column("y"), column("z")], axis=1),
        size_wlh_m=table["size_wlh"].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(-1, 3).copy(),
        yaw_rad=column("yaw").copy(),
        velocity_mps=np.stack([column("vx"), column("vy")], axis=1),
        class_id=column("class_id").astype(np.int64),
        num_lidar_pts=column("num_lidar_pts").astype(np.int64),
        visibility=column("visibility").astype(np.int64),
        attributes=tuple(table["attribute"].to_pylist()),
    )


class _RowGroups:
    """Rows of a Parquet file by position; the row groups used last stay in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: pq.ParquetFile | None = None
        self._starts: list[int] = []
        self._held: OrderedDict[int, pa.Table] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Worker processes open the file themselves."""
        return {"_path": self._path, "_file": None, "_starts": [], "_held": OrderedDict()}

    def rows(self, first: int, count: int) -> pa.Table:
        """`count` rows from `first`."""
        if self._file is None:
            self._file = _open(self._path)
            sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
            self._starts = [0, *np.cumsum(sizes).tolist()]
        group = max(0, int(np.searchsorted(self._starts, first, side="right")) - 1)
        parts = []
        while group < len(self._starts) - 1 and self._starts[group] < first + count:
            offset = max(0, first - self._starts[group])
            parts.append(self._group(group).slice(offset, first + count - self._starts[group] - offset))
            group += 1
        return pa.concat_tables(parts) if parts else self._file.schema_arrow.empty_table()

    def _group(self, number: int) -> pa.Table:
        assert self._file is not None
        if number not in self._held:
            self._held[number] = self._file.read_row_group(number, use_threads=False)
            if len(self._held) > _HELD_ROW_GROUPS:
                self._held.popitem(last=False)
        self._held.move_to_end(number)
        return self._held[number]


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except FileNotFoundError:
        raise file_error(path, "file not found", "Run the stage 'validate' first") from None
    except pa.ArrowInvalid as error:
        raise _damaged(path, error) from None


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    # Not pq.read_table: it imports Arrow's dataset layer, which takes longer than reading the samples of a large set.
    with _open(path) as file:
        try:
            return file.read(columns=columns)
        except pa.ArrowInvalid as error:
            raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> DataError:
    return file_error(path, f"not a valid Parquet file ({error})", "Run the stage 'validate' again")
