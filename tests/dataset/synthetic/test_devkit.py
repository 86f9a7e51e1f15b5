"""The data set through nuscenes-devkit's eyes."""

import itertools
import json
from pathlib import Path

import numpy as np
from nuscenes.utils.data_classes import LidarPointCloud
from nuscenes.utils.geometry_utils import points_in_box
from nuscenes.utils.splits import get_scenes_of_split

from pipeline.dataset.synthetic import TRAIN_SPLIT, VAL_SPLIT, VERSION
from pipeline.dataset.synthetic.rig import CAMERA_PHASE_MS
from pipeline.dataset.synthetic.tables import TABLES, visibility_token


def test_all_tables_and_splits(nusc, synthetic_root: Path):
    for name in TABLES:
        assert json.loads((synthetic_root / VERSION / f"{name}.json").read_text())
    scenes = [scene["name"] for scene in nusc.scene]
    assert get_scenes_of_split(TRAIN_SPLIT, nusc) + get_scenes_of_split(VAL_SPLIT, nusc) == scenes


def test_every_file_exists_and_nothing_else(nusc, synthetic_root: Path):
    listed = {row["filename"] for row in nusc.sample_data}
    found = {str(p.relative_to(synthetic_root)) for p in (synthetic_root / "samples").rglob("*") if p.is_file()}
    assert listed == found


def test_sample_and_annotation_chains(nusc):
    for scene in nusc.scene:
        token, seen = scene["first_sample_token"], []
        while token:
            seen.append(token)
            token = nusc.get("sample", token)["next"]
        assert len(seen) == scene["nbr_samples"] == 3
        assert seen[-1] == scene["last_sample_token"]
        times = [nusc.get("sample", s)["timestamp"] for s in seen]
        assert all(350_000 < b - a < 650_000 for a, b in itertools.pairwise(times))
    for instance in nusc.instance:
        token, count = instance["first_annotation_token"], 0
        while token:
            row, count = nusc.get("sample_annotation", token), count + 1
            assert row["instance_token"] == instance["token"]
            token = row["next"]
        assert count == instance["nbr_annotations"]


def test_cameras_fire_in_the_order_of_the_sweep(nusc):
    for sample in nusc.sample:
        data = {channel: nusc.get("sample_data", token) for channel, token in sample["data"].items()}
        assert data["LIDAR_TOP"]["timestamp"] == sample["timestamp"]
        for channel, phase_ms in CAMERA_PHASE_MS.items():
            offset_ms = (data[channel]["timestamp"] - sample["timestamp"]) / 1e3
            assert abs(offset_ms - phase_ms) < 1.5
            assert nusc.get("ego_pose", data[channel]["ego_pose_token"])["timestamp"] == data[channel]["timestamp"]


def test_num_lidar_pts_is_the_devkits_count(nusc):
    total = 0
    for sample in nusc.sample:
        path, boxes, _ = nusc.get_sample_data(sample["data"]["LIDAR_TOP"])
        points = LidarPointCloud.from_file(path).points
        for box in boxes:
            expected = int(points_in_box(box, points[:3]).sum())
            assert nusc.get("sample_annotation", box.token)["num_lidar_pts"] == expected
            total += expected
    assert total > 500


def test_box_velocity_matches_the_attribute(nusc):
    moving = {"vehicle.moving", "pedestrian.moving"}
    still = {"vehicle.parked", "pedestrian.standing", "cycle.without_rider"}
    checked = 0
    for row in nusc.sample_annotation:
        speed = np.linalg.norm(nusc.box_velocity(row["token"])[:2])
        names = [nusc.get("attribute", token)["name"] for token in row["attribute_tokens"]]
        if not names or np.isnan(speed):
            continue
        checked += 1
        if names[0] in moving:
            assert 0.5 < speed < 12.0
        if names[0] in still:
            assert speed < 1e-6
    assert checked > 50


def test_boxes_do_not_overlap(nusc):
    from shapely.geometry import Polygon

    for sample in nusc.sample:
        shapes = [Polygon(nusc.get_box(token).bottom_corners()[:2].T) for token in sample["anns"]]
        for i, a in enumerate(shapes):
            assert all(a.intersection(b).area < 0.05 for b in shapes[:i])


def test_explorer_renders_a_sample(nusc, tmp_path: Path):
    import matplotlib

    matplotlib.use("Agg")
    target = tmp_path / "sample.png"
    nusc.explorer.render_sample(nusc.sample[0]["token"], out_path=str(target), verbose=False)
    assert target.stat().st_size > 10_000


def test_visibility_bins():
    assert [visibility_token(v, 100) for v in (0, 39, 40, 60, 79, 80, 100)] == ["1", "1", "2", "3", "3", "4", "4"]
    assert visibility_token(0, 0) == "1"
