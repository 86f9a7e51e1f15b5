"""Map labels on disk: one file a scene, `data/maps/scenes/<scene>.npz`, and `data/maps/index.json` that says which sample is where.

Lists of different lengths are stored end to end with their offsets, so nothing needs pickle and equal labels give equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import DataError, file_error
from pipeline.io import atomic_path, inside, read_json, write_json

INDEX_NAME = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class MapLabel:
    """Map of one sample in the ego BEV frame (x forward, y left), m. Meaning and order of everything: docs/maps.md.

    N segments, M polygons with K corners, L polylines resampled to P points, R lanes, E lane edges.
    """

    line_segments: NDArray[np.float32]  # (N, 2, 2) segments of all polylines, in order
    polygons: NDArray[np.float32]  # (M, K, 2) closed polylines reduced to K corners, in order
    topology_matrix: NDArray[np.uint8]  # (N, M) 1: the segment touches the polygon
    polylines: list[NDArray[np.float32]]  # L of (P_i, 2); a closed one repeats its first point
    polyline_class: NDArray[np.int64]  # (L,) index into MAP_CLASSES
    resampled: NDArray[np.float32]  # (L, P, 2) equal arc length, both ends included
    closed: NDArray[np.bool_]  # (L,)
    lanes: NDArray[np.float32]  # (R, K, 2) lanes that reach into the range, not clipped, reduced to K corners
    lane_adjacency: NDArray[np.int32]  # (E, 2) from lane, to lane
    labelled: NDArray[np.bool_]  # (3,) for each of MAP_CLASSES: the map knows this class, so "none here" means none


class MapStore:
    """Read access to the labels. Scenes are loaded when first asked for and the last 64 are kept."""

    def __init__(self, directory: Path, index: dict[str, Any]) -> None:
        self._directory = directory
        self._samples: dict[str, list[Any] | None] = index["samples"]
        self._scene = lru_cache(maxsize=64)(self._load_scene)

    @classmethod
    def open(cls, directory: Path) -> MapStore:
        """Open the output of the topology stage.

        Raises:
            DataError: the index is missing, malformed or of another format.
        """
        path = directory / INDEX_NAME
        index = read_json(path)
        if not isinstance(index, dict) or index.get("format") != FORMAT or not isinstance(index.get("samples"), dict):
            raise file_error(path, f"not an index of map labels of format {FORMAT}", "Run the stage topology again")
        return cls(directory, index)

    def __len__(self) -> int:
        """Number of samples that have a label."""
        return len(self.tokens())

    def tokens(self) -> list[str]:
        """Samples that have a label, in the order in which they were written."""
        return [token for token, place in self._samples.items() if place is not None]

    def get(self, sample_token: str) -> MapLabel | None:
        """Label of a sample; None if its location has no map.

        Raises:
            DataError: the sample is unknown to the store, or the scene's file is missing or damaged.
        """
        if sample_token not in self._samples:
            raise file_error(self._directory / INDEX_NAME, f"sample {sample_token!r} is unknown", "Run the stage topology on this data set")
        place = self._samples[sample_token]
        if place is None:
            return None
        file_name, position = place
        return self._scene(file_name)[position]

    def _load_scene(self, file_name: str) -> list[MapLabel]:
        return read_labels(inside(self._directory, file_name))


def write_index(directory: Path, samples: dict[str, tuple[str, int] | None]) -> None:
    """Write the index: sample token -> (file name, position in it), or None where there is no label. Order is kept as given."""
    ordered = {"format": FORMAT, "samples": {token: None if place is None else list(place) for token, place in sorted(samples.items())}}
    write_json(directory / INDEX_NAME, ordered)


def write_labels(path: Path, labels: Sequence[MapLabel]) -> None:
    """Write the labels of one scene, at least one."""
    with atomic_path(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, **_pack(labels))


def read_labels(path: Path) -> list[MapLabel]:
    """Read what `write_labels` wrote.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as packed:
            return _unpack({name: packed[name] for name in packed.files})
    except FileNotFoundError:
        raise file_error(path, "file not found", "Run the stage topology again") from None
    except (BadZipFile, ValueError, KeyError, OSError, EOFError) as error:
        raise file_error(path, f"damaged map labels ({error})", "Run the stage topology again") from error


RAGGED = ("line_segments", "polygons", "polyline_class", "resampled", "closed", "lanes", "lane_adjacency")


def _pack(labels: Sequence[MapLabel]) -> dict[str, NDArray[Any]]:
    """Columns: every field end to end, and the number of rows of each label."""
    if not labels:
        raise DataError("write_labels: a scene file needs at least one label")
    packed: dict[str, NDArray[Any]] = {"labelled": np.stack([label.labelled for label in labels])}
    for name in RAGGED:
        packed[name] = np.concatenate([getattr(label, name) for label in labels])
        packed[f"{name}_count"] = np.array([len(getattr(label, name)) for label in labels], dtype=np.int32)
    packed["topology_matrix"] = np.concatenate([label.topology_matrix.ravel() for label in labels])
    lines = [line for label in labels for line in label.polylines]
    packed["polyline_points"] = np.concatenate(lines) if lines else np.empty((0, 2), dtype=np.float32)
    packed["polyline_points_count"] = np.array([len(line) for line in lines], dtype=np.int32)
    return packed


def _unpack(packed: dict[str, NDArray[Any]]) -> list[MapLabel]:
    columns = {name: _split(packed[name], packed[f"{name}_count"]) for name in RAGGED}
    lines = _split(packed["polyline_points"], packed["polyline_points_count"])
    sizes = packed["line_segments_count"].astype(np.int64) * packed["polygons_count"]
    matrices = _split(packed["topology_matrix"], sizes)
    line_of = np.concatenate([[0], np.cumsum(packed["polyline_class_count"])])
    labels = []
    for i in range(len(packed["labelled"])):
        fields = {name: column[i] for name, column in columns.items()}
        shape = len(fields["line_segments"]), len(fields["polygons"])
        labels.append(
            MapLabel(
                **fields,
                topology_matrix=matrices[i].reshape(shape),
                polylines=lines[line_of[i] : line_of[i + 1]],
                labelled=packed["labelled"][i],
            )
        )
    return labels


def _split(column: NDArray[Any], counts: NDArray[Any]) -> list[NDArray[Any]]:
    return np.split(column, np.cumsum(counts)[:-1]) if len(counts) else []
