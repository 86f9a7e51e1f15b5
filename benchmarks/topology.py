"""Map labels of a sample against the devkit's path to the same geometry, in one run.

    python benchmarks/topology.py [--shared FOLDER] [--poses N] [--json]

Poses are spread over the lane dividers of the four real nuScenes map patches. The devkit path is what label code built on it calls for every
sample: `NuScenesMap.explorer.get_map_geom` for dividers, crossings, drivable area and lanes, with the map loaded before. Ours makes the
whole label: clipped lines and polygons, segments, topology matrix, resampled points, lanes and their edges. The patches hold a small part of a
city; on a full map the devkit, which walks through all records for every sample, is slower by about the ratio of the sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from pipeline.config import TopologyConfig
from pipeline.maps.expansion import load_expansion
from pipeline.maps.topology import label_sample

LAYERS = ["road_divider", "lane_divider", "ped_crossing", "drivable_area", "lane"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=Path(__file__).resolve().parents[2] / "shared")
    parser.add_argument("--poses", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.shared / "data" / "nuscenes-subset"
    if not folder.is_dir():
        print(f"real maps not found at {folder}; give --shared", file=sys.stderr)
        return 1
    rows = [compare(folder, path.stem, options.poses) for path in sorted((folder / "maps" / "expansion").glob("*.json"))]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(
            f"{row['location']:26s} devkit {row['devkit_ms']:8.2f} ms  ours {row['ours_ms']:6.2f} ms  ratio {row['ratio']:6.1f}"
            f"   load {row['devkit_load_s']:.2f} s / {row['ours_load_s']:.2f} s"
        )
    print(f"median ratio {statistics.median(row['ratio'] for row in rows):.1f}")
    return 0


def compare(folder: Path, location: str, poses: int) -> dict[str, Any]:
    """Times of one location: load, and the median per sample of either path over the same poses."""
    from nuscenes.map_expansion.map_api import NuScenesMap

    start = time.perf_counter()
    theirs = NuScenesMap(str(folder), location)
    devkit_load_s = time.perf_counter() - start
    start = time.perf_counter()
    ours = load_expansion(folder / "maps" / "expansion" / f"{location}.json", 0.01)
    ours.dividers.tree, ours.boundary.tree, ours.crossing_tree, ours.lane_tree  # noqa: B018 - built on first use
    ours_load_s = time.perf_counter() - start
    rng = np.random.default_rng(0)
    places = ours.dividers.starts_m[rng.integers(len(ours.dividers.starts_m), size=poses)]
    matrices = [ego2global(x, y, rng.uniform(-np.pi, np.pi)) for x, y in places]
    config = TopologyConfig()

    def devkit(matrix: np.ndarray) -> None:
        yaw = np.degrees(np.arctan2(matrix[1, 0], matrix[0, 0]))
        theirs.explorer.get_map_geom((matrix[0, 3], matrix[1, 3], 30.0, 60.0), yaw, LAYERS)

    devkit_ms, ours_ms = median_ms([devkit, lambda matrix: label_sample(ours, matrix, config)], matrices)
    return {
        "location": location,
        "devkit_ms": devkit_ms,
        "ours_ms": ours_ms,
        "ratio": devkit_ms / ours_ms,
        "devkit_load_s": devkit_load_s,
        "ours_load_s": ours_load_s,
    }


def ego2global(x_m: float, y_m: float, yaw_rad: float) -> np.ndarray:
    matrix = np.eye(4)
    matrix[:2, :2] = [[np.cos(yaw_rad), -np.sin(yaw_rad)], [np.sin(yaw_rad), np.cos(yaw_rad)]]
    matrix[:2, 3] = x_m, y_m
    return matrix


def median_ms(functions: list[Callable[[np.ndarray], Any]], matrices: list[np.ndarray]) -> list[float]:
    """Median time of each function per sample; the functions take turns, so that a busy machine slows all of them alike."""
    times: list[list[float]] = [[] for _ in functions]
    for matrix in [matrices[0], *matrices]:
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function(matrix)
            own.append(1000.0 * (time.perf_counter() - start))
    return [statistics.median(own[1:]) for own in times]


if __name__ == "__main__":
    sys.exit(main())
