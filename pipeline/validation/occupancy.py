"""Occupancy labels: readable, right shape and classes, and in agreement with the lidar."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.dataset.lidar import points_in_ego
from pipeline.dataset.occupancy import ORIGIN_M, SHAPE, VOXEL_M, OccupancyLabels, labels_path, read_labels
from pipeline.dataset.records import LidarFrame
from pipeline.errors import DataError
from pipeline.execution import map_ordered
from pipeline.progress import track
from pipeline.taxonomy import OCCUPANCY_FREE
from pipeline.validation.context import Context
from pipeline.validation.projection import lidar_frames


def measure(context: Context) -> pa.Table:
    """One row a sample with a label: file_problem, and hit_share, the share of lidar points in the grid that fall into an occupied voxel or beside
    one (null without lidar)."""
    samples = context.index.samples.select(["token", "scene_name"]).to_pylist()
    jobs = []
    lidar = lidar_frames(context)
    for row in samples:
        path = labels_path(context.dataroot, row["scene_name"], row["token"])
        if path.is_file():
            jobs.append((path, lidar.get(row["token"])))
    tokens = [path.parent.name for path, _ in jobs]
    # Starting processes costs seconds: not for a few hundred labels.
    workers = context.workers if len(jobs) > 1000 else 1
    found = list(track(map_ordered(_inspect, jobs, workers), "checking occupancy", len(jobs)))
    shares = np.array([share for _, share in found], dtype=np.float64)
    return pa.table(
        {
            "token": pa.array(tokens, pa.string()),
            "sample_token": pa.array(tokens, pa.string()),
            "file_problem": pa.array([problem for problem, _ in found], pa.string()),
            "hit_share": pa.array(shares, mask=~np.isfinite(shares)),
        }
    )


def _inspect(job: tuple[Path, LidarFrame | None]) -> tuple[str, float]:
    path, lidar = job
    try:
        labels = read_labels(path)
        return "", hit_share(labels, points_in_ego(lidar)) if lidar is not None else np.nan
    except DataError as error:
        return str(error).removeprefix(f"{path}: "), np.nan


def hit_share(labels: OccupancyLabels, points_m: NDArray[np.float64]) -> float:
    """Share of the points (N,3) inside the grid whose voxel, or one of its 26 neighbours, is occupied; NaN without points.

    Neighbours count because a return on a surface lies on the border of two voxels.
    """
    cells = np.floor((points_m - ORIGIN_M) / VOXEL_M).astype(np.int64)
    cells = cells[((cells >= 0) & (cells < SHAPE)).all(axis=1)]
    if not len(cells):
        return float("nan")
    # One layer of free voxels around the grid lets every cell look at all its neighbours; flat indices make a neighbour a constant step.
    occupied = np.pad(labels.semantics != OCCUPANCY_FREE, 1)
    flat, step = np.ravel_multi_index(tuple((cells + 1).T), occupied.shape), np.array(occupied.strides) // occupied.itemsize
    near = np.zeros(len(cells), dtype=bool)
    for offset in np.ndindex(3, 3, 3):
        near |= occupied.ravel()[flat + int((np.array(offset) - 1) @ step)]
    return float(near.mean())
