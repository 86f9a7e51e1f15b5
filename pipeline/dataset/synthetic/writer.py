"""Write the whole embedded data set: scenes in parallel, then tables, splits, base maps and map expansions."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from pipeline.config import SyntheticConfig
from pipeline.dataset.synthetic.ground import SIZE_PX
from pipeline.dataset.synthetic.layout import TILE_M
from pipeline.dataset.synthetic.mapfile import LAYERS
from pipeline.dataset.synthetic.scene import SceneResult, SceneTask, make_scene, scene_name
from pipeline.dataset.synthetic.tables import LOCATIONS, MAP_TOKENS, TABLES, Rows, constant_tables
from pipeline.execution import map_ordered
from pipeline.io import atomic_dir
from pipeline.progress import track
from pipeline.taxonomy import CAMERAS, LIDAR

VERSION = "v1.0-synthetic"
TRAIN_SPLIT, VAL_SPLIT = "synthetic_train", "synthetic_val"


@dataclass(frozen=True)
class Summary:
    """What was written."""

    scenes: int
    samples: int
    annotations: int


def generate(config: SyntheticConfig, out_dir: Path, workers: int = 1) -> Summary:
    """Write a nuScenes v1.0 data set (version folder `v1.0-synthetic`) to `out_dir`, replacing what is there once all is done.

    Equal configurations give equal bytes, whatever the number of `workers` (processes).
    """
    with atomic_dir(out_dir) as root:
        for channel in (*CAMERAS, LIDAR):
            (root / "samples" / channel).mkdir(parents=True)
        (root / "maps" / "expansion").mkdir(parents=True)
        (root / VERSION).mkdir()
        tasks = scene_tasks(config, root)
        results = list(track(map_ordered(make_scene, tasks, workers), "synthetic data set", total=len(tasks)))
        rows = _merge(results)
        for name in TABLES:
            _write_json(root / VERSION / f"{name}.json", rows[name])
        train = [scene_name(k) for k in range(config.train_scenes)]
        val = [scene_name(config.train_scenes + k) for k in range(config.val_scenes)]
        _write_json(root / VERSION / "splits.json", {TRAIN_SPLIT: train, VAL_SPLIT: val})
        for location in sorted({result.location for result in results}):
            _write_maps(root / "maps", location, [result for result in results if result.location == location])
    return Summary(len(rows["scene"]), len(rows["sample"]), len(rows["sample_annotation"]))


def scene_tasks(config: SyntheticConfig, root: Path) -> list[SceneTask]:
    """Deal the scenes to the locations in turn, each on its own tile of a square grid of the location's map."""
    tasks = []
    for index in range(config.train_scenes + config.val_scenes):
        rank = index // len(LOCATIONS)
        columns = _grid(config)[0]
        centre = ((rank % columns + 0.5) * TILE_M, (rank // columns + 0.5) * TILE_M)
        tasks.append(SceneTask(config, index, LOCATIONS[index % len(LOCATIONS)], centre, root))
    return tasks


def _grid(config: SyntheticConfig) -> tuple[int, int]:
    """Columns and rows of tiles of a location's map."""
    scenes = -(-(config.train_scenes + config.val_scenes) // len(LOCATIONS))
    columns = int(np.ceil(np.sqrt(scenes)))
    return columns, -(-scenes // columns)


def _merge(results: list[SceneResult]) -> Rows:
    """All tables; the map table has one base map a location."""
    rows: Rows = {name: [] for name in TABLES} | constant_tables()
    for result in results:
        for name, part in result.rows.items():
            rows[name].extend(part)
    for location in sorted({result.location for result in results}):
        logs = [log["token"] for log in rows["log"] if log["location"] == location]
        token = MAP_TOKENS[location]
        rows["map"].append({"token": token, "category": "semantic_prior", "filename": f"maps/{token}.png", "log_tokens": logs})
    return rows


def _write_maps(folder: Path, location: str, results: list[SceneResult]) -> None:
    """The base map (drivable area, 0.1 m a pixel, row 0 at the largest y) and the map expansion of a location."""
    extent = np.ceil(np.max([result.tile_centre_m for result in results], axis=0) / TILE_M).astype(int)
    image = np.zeros((extent[1] * SIZE_PX, extent[0] * SIZE_PX), np.uint8)
    layers: dict[str, Any] = {name: [] for name in LAYERS}
    layers |= {"version": "1.3", "canvas_edge": (extent * TILE_M).tolist(), "arcline_path_3": {}, "connectivity": {}}
    for result in results:
        column, row = (int(c // TILE_M) * SIZE_PX for c in result.tile_centre_m)
        top = image.shape[0] - row - SIZE_PX
        image[top : top + SIZE_PX, column : column + SIZE_PX] = 255 * np.unpackbits(result.drivable_bits).reshape(SIZE_PX, SIZE_PX)
        for name in LAYERS:
            layers[name].extend(result.map_records.layers[name])
        layers["arcline_path_3"].update(result.map_records.arcline_path_3)
        layers["connectivity"].update(result.map_records.connectivity)
    cv2.imwrite(str(folder / f"{MAP_TOKENS[location]}.png"), image, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    _write_json(folder / "expansion" / f"{location}.json", layers)


def _write_json(path: Path, value: Iterable[Any]) -> None:
    path.write_text(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False), encoding="utf-8")
