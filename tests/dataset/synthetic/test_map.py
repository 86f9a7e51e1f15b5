"""The map expansion through nuscenes-devkit, and against images' ground texture and base map."""

from pathlib import Path

import numpy as np
import pytest
from nuscenes.map_expansion.map_api import NuScenesMap
from shapely.geometry import Point

from pipeline.dataset.synthetic.ground import LOT, ROAD, WALK, make_ground
from pipeline.dataset.synthetic.layout import make_layout


@pytest.fixture(scope="module")
def maps(synthetic_root: Path, nusc) -> dict[str, NuScenesMap]:
    return {log["location"]: NuScenesMap(str(synthetic_root), log["location"]) for log in nusc.log}


def test_layers_around_the_ego_vehicle(nusc, maps):
    for sample in nusc.sample:
        pose = nusc.get("ego_pose", nusc.get("sample_data", sample["data"]["LIDAR_TOP"])["ego_pose_token"])
        location = nusc.get("log", nusc.get("scene", sample["scene_token"])["log_token"])["location"]
        x, y = pose["translation"][:2]
        found = maps[location].get_records_in_patch((x - 30, y - 30, x + 30, y + 30), maps[location].non_geometric_layers)
        assert found["lane"] and found["road_segment"] and found["walkway"] and found["road_divider"]
        assert maps[location].layers_on_point(x, y)["drivable_area"]
        mask = next(m["mask"] for m in nusc.map if nusc.get("scene", sample["scene_token"])["log_token"] in m["log_tokens"])
        assert mask.is_on_mask(np.array([x]), np.array([y])).all()


def test_lane_centre_lines_stay_in_their_lanes(maps):
    for nusc_map in maps.values():
        for lane in nusc_map.lane + nusc_map.lane_connector:
            polygon = nusc_map.extract_polygon(lane["polygon_token"]).buffer(0.05)
            path = nusc_map.discretize_lanes([lane["token"]], 1.0)[lane["token"]]
            assert all(polygon.contains(Point(pose[:2])) for pose in path)


def test_connected_lanes_meet(maps):
    joints = 0
    for nusc_map in maps.values():
        for token, neighbours in nusc_map.connectivity.items():
            end = np.array(nusc_map.arcline_path_3[token][-1]["end_pose"])
            for following in neighbours["outgoing"]:
                start = np.array(nusc_map.arcline_path_3[following][0]["start_pose"])
                np.testing.assert_allclose(start[:2], end[:2], atol=1e-3)
                assert np.cos(start[2] - end[2]) > 1 - 1e-6
                assert token in nusc_map.connectivity[following]["incoming"]
                joints += 1
    assert joints > 5


def test_every_reference_resolves_and_rings_are_simple(maps):
    for nusc_map in maps.values():
        for polygon in nusc_map.polygon:
            assert len(polygon["exterior_node_tokens"]) >= 3
            assert nusc_map.extract_polygon(polygon["token"]).buffer(0.0).area > 0.0
        for segment in nusc_map.road_block:
            assert nusc_map.get("road_segment", segment["road_segment_token"])
        for line in nusc_map.stop_line:
            assert line["cue"]


@pytest.mark.parametrize("seed", range(4))
def test_paint_and_map_dividers_coincide(seed: int):
    rng = np.random.default_rng(seed)
    plan = make_layout(rng)
    ground = make_ground(plan, rng)
    size = np.full(1, 0.05, np.float32)
    for marking in plan.markings:
        middle = 0.5 * (marking.points[:-1] + marking.points[1:])[:: max(len(marking.points) // 8, 1)]
        assert (ground.label_at(middle) == ROAD).all()
        if marking.kind == "double_yellow":
            continue
        tangent = np.diff(marking.points, axis=0)
        along = np.concatenate([[0.0], np.cumsum(np.linalg.norm(tangent, axis=1))])
        s = np.linspace(1.0, along[-1] - 1.0, 200)
        line = np.stack([np.interp(s, along, marking.points[:, i]) for i in range(2)], axis=1).astype(np.float32)
        heading = np.stack([np.interp(s, 0.5 * (along[1:] + along[:-1]), tangent[:, i]) for i in range(2)], axis=1)
        normal = np.stack([-heading[:, 1], heading[:, 0]], axis=1) / np.linalg.norm(heading, axis=1, keepdims=True)
        beside = (line + 0.5 * normal).astype(np.float32)
        on, off = (ground.colour_at(p.T, np.zeros_like(p.T), np.repeat(size, len(p)))[1].mean() for p in (line, beside))
        assert on > 1.8 * off


@pytest.mark.parametrize("seed", range(6))
def test_ground_labels_follow_the_plan(seed: int):
    rng = np.random.default_rng(100 + seed)
    plan = make_layout(rng)
    ground = make_ground(plan, rng)
    for path in plan.routes():
        points = path.points(np.linspace(1.0, path.length_m - 1.0, 50))
        assert (ground.label_at(points) == ROAD).all()
    for band in plan.sidewalks:
        assert (ground.label_at(0.5 * (band.left + band.right)[1:-1]) == WALK).all()
    for lot in plan.lots:
        assert ground.label_at(lot.outline.mean(axis=0)[None])[0] == LOT
