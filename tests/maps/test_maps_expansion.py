"""Map expansions: equal to nuscenes-devkit on the real maps; bad files are named, bad elements are left out and counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import shapely

from pipeline.errors import DataError
from pipeline.maps.expansion import load_expansion
from pipeline.maps.frames import BevRange, PlanarPose
from pipeline.maps.rings import clip_polygons
from tests.maps.small_maps import SmallMap, rectangle, street

BEV = BevRange(-30.0, 30.0, -15.0, 15.0)
LOCATIONS = ("boston-seaport", "singapore-hollandvillage", "singapore-onenorth", "singapore-queenstown")


def poses_on(lines_m: np.ndarray, number: int) -> list[PlanarPose]:
    rng = np.random.default_rng(3)
    return [PlanarPose(*(lines_m[rng.integers(len(lines_m))] + rng.normal(0, 3, 2)), rng.uniform(-np.pi, np.pi)) for _ in range(number)]


@pytest.mark.parametrize("location", LOCATIONS)
def test_geometry_equals_the_devkit(shared: Path, location: str) -> None:
    """Union of what lies in the patch, layer by layer, within 1 cm (the tolerance at which nodes are merged)."""
    from nuscenes.map_expansion.map_api import NuScenesMap

    root = shared / "data" / "nuscenes-subset"
    theirs = NuScenesMap(str(root), location)
    ours = load_expansion(root / "maps" / "expansion" / f"{location}.json", 0.01)
    frame = shapely.box(-30, -15, 30, 15)
    for pose in poses_on(ours.dividers.starts_m, 5):
        found = dict(
            theirs.explorer.get_map_geom(
                (pose.x_m, pose.y_m, 30.0, 60.0), np.degrees(pose.yaw_rad), ["road_divider", "lane_divider", "ped_crossing", "drivable_area"]
            )
        )
        lines = shapely.union_all(found["road_divider"] + found["lane_divider"])
        own_lines = shapely.union_all([shapely.LineString(piece.points_m) for piece in ours.dividers.clip(pose, BEV)])
        assert same(own_lines, lines)
        crossings = shapely.union_all(found["ped_crossing"])
        own_crossings = shapely.union_all([shapely.Polygon(ring) for ring in clip_polygons(ours.crossings, ours.crossing_tree, pose, BEV)[0]])
        assert own_crossings.symmetric_difference(crossings).area < 0.02
        edges = shapely.intersection(shapely.boundary(shapely.union_all(found["drivable_area"])), frame.buffer(-0.01))
        own_edges = shapely.union_all([shapely.LineString(piece.points_m) for piece in ours.boundary.clip(pose, BEV)])
        assert same(shapely.intersection(own_edges, frame.buffer(-0.01)), edges)


def same(first: shapely.Geometry, second: shapely.Geometry) -> bool:
    """Each lies within 2 cm of the other."""
    return bool(first.within(second.buffer(0.02)) and second.within(first.buffer(0.02))) if not (first.is_empty and second.is_empty) else True


@pytest.mark.parametrize("location", LOCATIONS)
def test_records_in_patch_equal_the_devkit(shared: Path, location: str) -> None:
    from nuscenes.map_expansion.map_api import NuScenesMap

    root = shared / "data" / "nuscenes-subset"
    theirs = NuScenesMap(str(root), location)
    ours = load_expansion(root / "maps" / "expansion" / f"{location}.json", 0.01)
    assert len(ours.lanes) == len(theirs.lane)
    order = {record["token"]: number for number, record in enumerate(theirs.lane)}
    for pose in poses_on(ours.dividers.starts_m, 4):
        patch = (pose.x_m - 30, pose.y_m - 30, pose.x_m + 30, pose.y_m + 30)
        wanted = sorted(order[token] for token in theirs.get_records_in_patch(patch, ["lane"], "intersect")["lane"])
        assert sorted(ours.lane_tree.query(shapely.box(*patch), predicate="intersects").tolist()) == wanted


def test_the_oddities_of_the_real_maps_are_counted(shared: Path) -> None:
    found = load_expansion(shared / "data" / "nuscenes-subset" / "maps" / "expansion" / "boston-seaport.json", 0.01)
    assert found.boundary_source == "drivable_area" and len(found.boundary) == 109  # one shell, 108 holes
    assert found.findings.counts["lane_links_dangling"] > 0 and found.lane_edges.shape[1] == 2


def test_clockwise_unclosed_and_repeated(tmp_path: Path) -> None:
    small = SmallMap()
    small.area("ped_crossing", rectangle(0, 0, 4, 2)[::-1])
    small.area("ped_crossing", [(10, 0), (10, 0), (14, 0), (14, 0.004), (14, 2), (10, 2), (10, 0)])
    small.area("ped_crossing", [(0, 10), (4, 12), (4, 10), (0, 12)])  # crosses itself: two triangles
    small.area("ped_crossing", [(0, 20), (1, 20), (0, 20)])
    found = load_expansion(small.write(tmp_path), 0.01)
    assert [round(area.area, 1) for area in found.crossings] == [8.0, 8.0, 2.0, 2.0]
    assert all(area.exterior.is_ccw and area.is_valid for area in found.crossings)
    assert found.findings.counts == {"ped_crossing_self_intersecting_repaired": 1, "ped_crossing_without_area": 1}


def test_elements_with_unknown_tokens_or_bad_numbers_are_left_out(tmp_path: Path) -> None:
    small = street()
    small.line("lane_divider", [(0, 1), (0, 1)])
    small.line("lane_divider", [(0, float("nan")), (0, 2)])
    small.line("lane_divider", [(0, 2), (5, 2)])
    small.content["line"][-1]["node_tokens"][0] = "lost"
    small.content["lane_divider"].append({"token": "x", "line_token": "lost"})
    found = load_expansion(small.write(tmp_path), 0.01)
    assert len(found.dividers) == 1
    wanted = {"lane_divider_without_length": 1, "lane_divider_not_finite": 1, "lane_divider_unknown_node": 1, "lane_divider_unknown_geometry": 1}
    assert wanted.items() <= found.findings.counts.items()
    assert any("lane_divider x" in example for example in found.findings.examples)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "not valid JSON"),
        (lambda text: "[]", "mapping of layers"),
        (lambda text: text.replace('"1.3"', '"1.2"'), "version = '1.2'"),
        (lambda text: text.replace('"node":', '"nodes":'), "layer 'node'"),
        (lambda text: text.replace('"x":', '"z":', 1), "layer 'node', record 0"),
        (lambda text: json.dumps(json.loads(text) | {"lane": [1]}), "layer 'lane'"),
        (lambda text: json.dumps(json.loads(text) | {"connectivity": [1]}), "connectivity"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: object, message: str) -> None:
    path = street().write(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match=message) as error:
        load_expansion(path, 0.01)
    assert str(path) in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="file not found"):
        load_expansion(tmp_path / "nowhere.json", 0.01)
