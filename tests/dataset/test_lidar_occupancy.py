"""Lidar files and occupancy labels: real ones are read, damaged ones are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.dataset.index import Index
from pipeline.dataset.lidar import points_in_ego, read_points
from pipeline.dataset.occupancy import SHAPE, labels_path, load_labels, read_labels, voxel_centers_m
from pipeline.dataset.records import Boxes
from pipeline.errors import DataError


def points_inside(boxes: Boxes, i: int, points: np.ndarray) -> int:
    offset = points - boxes.center_m[i]
    c, s = np.cos(boxes.yaw_rad[i]), np.sin(boxes.yaw_rad[i])
    along, across = c * offset[:, 0] + s * offset[:, 1], -s * offset[:, 0] + c * offset[:, 1]
    width, length, height = boxes.size_wlh_m[i]
    return int(((abs(along) <= length / 2) & (abs(across) <= width / 2) & (abs(offset[:, 2]) <= height / 2)).sum())


def test_real_points_lie_in_the_real_boxes(real_index: Index) -> None:
    """The tables count the lidar points of every box.

    Ours must agree (up to the box edges, because yaw alone ignores the ego's small roll and pitch).
    """
    checked = 0
    for token in real_index.tokens():
        record = real_index.sample(token)
        if record.lidar is None or not record.lidar.path.is_file():
            continue
        points = points_in_ego(record.lidar)
        counted = np.array([points_inside(record.boxes, i, points) for i in range(len(record.boxes))])
        agreement = np.abs(counted - record.boxes.num_lidar_pts) <= np.maximum(2, 0.15 * record.boxes.num_lidar_pts)
        assert agreement.mean() > 0.9
        checked += 1
    if real_index.version != "v1.0-minival":
        assert checked


def test_near_and_invalid_returns_are_left_out(tmp_path: Path, real_index: Index) -> None:
    from dataclasses import replace

    points = np.array([[0.1, 0, 0, 1, 0], [5, 0, 0, 1, 0], [np.nan, 0, 0, 1, 0]], dtype=np.float32)
    points.tofile(tmp_path / "a.pcd.bin")
    token = next(token for token in real_index.tokens() if real_index.sample(token).lidar is not None)
    frame = replace(real_index.sample(token).lidar, path=tmp_path / "a.pcd.bin")
    np.testing.assert_allclose(points_in_ego(frame), [(frame.lidar2ego @ [5, 0, 0, 1])[:3]])


@pytest.mark.parametrize("size", [0, 30])
def test_wrong_lidar_size_is_named(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.pcd.bin").write_bytes(b"x" * size)
    with pytest.raises(DataError, match=f"a.pcd.bin: lidar file has {size} bytes"):
        read_points(tmp_path / "a.pcd.bin")


def test_real_occupancy_label_is_read(shared: Path) -> None:
    path = shared / "data" / "occ3d" / "29796060110c4163b07f06eff4af0753" / "labels.npz"
    labels = read_labels(path)
    assert labels.semantics.shape == SHAPE
    assert sorted(np.unique(labels.semantics)) == [0, 1, 3, 4, 6, 11, 13, 14, 15, 16, 17]
    assert labels.mask_camera.dtype == labels.mask_lidar.dtype == bool
    assert 0 < labels.mask_camera.mean() < 0.5 and 0 < labels.mask_lidar.mean() < 0.5


def test_missing_label_is_none_not_invented(real_index: Index, tmp_path: Path) -> None:
    assert load_labels(tmp_path, real_index.sample(real_index.tokens()[0])) is None


def _write(path: Path, **arrays: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return path


GOOD = {name: np.zeros(SHAPE, np.uint8) for name in ("semantics", "mask_lidar", "mask_camera")}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({**GOOD, "semantics": np.zeros((3, 3, 3), np.uint8)}, r"semantics.*shape \(3, 3, 3\)"),
        ({**GOOD, "semantics": np.full(SHAPE, 18, np.uint8)}, r"18: they must be 0\.\.17"),
        ({"semantics": GOOD["semantics"]}, "mask_lidar.*missing"),
    ],
)
def test_wrong_label_is_named(tmp_path: Path, arrays: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_labels(_write(labels_path(tmp_path, "scene-1", "token"), **arrays))


def test_cut_label_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "labels.npz", **GOOD)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"labels\.npz: occupancy label cannot be read"):
        read_labels(path)


def test_voxel_centres() -> None:
    x, y, z = voxel_centers_m()
    assert (x[0], x[-1], y[0], z[0]) == pytest.approx((-39.8, 39.8, -39.8, -0.8))
    assert (len(x), len(y), len(z)) == SHAPE
