"""Map labels of one sample: geometry, matrix, lane graph, and the laws they obey."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import shapely
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.config import TopologyConfig
from pipeline.errors import DataError
from pipeline.maps.expansion import load_expansion
from pipeline.maps.frames import BevRange, PlanarPose
from pipeline.maps.lanes import build_lane_graph
from pipeline.maps.lines import LineSet, drop_repeated_nodes, resample
from pipeline.maps.rings import clip_polygons, to_corners
from pipeline.maps.topology import BOUNDARY, CROSSING, DIVIDER, label_sample, to_segments, topology_matrix
from pipeline.maps.vector_map import polygon_array
from tests.maps.small_maps import SmallMap, ego, rectangle, street

CONFIG = TopologyConfig()
BEV = BevRange(-30.0, 30.0, -15.0, 15.0)
coordinate = st.floats(-60.0, 60.0, allow_nan=False).map(lambda value: round(value, 2))
polyline = st.lists(st.tuples(coordinate, coordinate), min_size=2, max_size=8, unique=True).map(np.array)
angle = st.floats(-3.2, 3.2)


def test_label_of_a_street(tmp_path: Path) -> None:
    vector_map = load_expansion(street().write(tmp_path), 0.01)
    label, counts = label_sample(vector_map, ego(0, 0, 0), CONFIG)
    # Divider and two road edges are cut at x = +-30 m, crossing and island lie inside.
    assert counts.by_class == (1, 1, 3) and counts.clipped == 3
    assert label.polyline_class.tolist() == [DIVIDER, CROSSING, BOUNDARY, BOUNDARY, BOUNDARY]
    assert label.closed.tolist() == [False, True, False, False, True]
    np.testing.assert_allclose(label.polylines[0], [[-30, 0], [30, 0]])
    np.testing.assert_allclose(label.polygons[0], rectangle(5, -6, 9, 6))
    # The lower road edge has a node at x = 0, where two lanes meet: its half with x < 0 does not touch the crossing.
    assert label.line_segments.shape == (12, 2, 2) and label.topology_matrix.shape == (12, 2)
    away = [bool(segment[:, 1].max() < -5 and segment[:, 0].max() < 1) for segment in label.line_segments]
    # Crossing: the divider runs through it, its own four edges, the road edges touch it. Island: its own edges only.
    assert sum(away) == 1 and label.topology_matrix[:8, 0].tolist() == [int(not far) for far in away[:8]]
    assert label.topology_matrix[8:, 0].tolist() == [0] * 4
    assert label.topology_matrix[:, 1].tolist() == [0] * 8 + [1] * 4
    assert label.lanes.shape == (2, 4, 2) and label.lane_adjacency.tolist() == [[0, 1]]
    assert label.labelled.all() and vector_map.findings.counts["lane_links_dangling"] == 1


def test_the_area_is_on_the_left_of_a_boundary(tmp_path: Path) -> None:
    label, _ = label_sample(load_expansion(street().write(tmp_path), 0.01), ego(0, 0, 0), CONFIG)
    lower = next(line for line in label.polylines[2:4] if line[0, 1] < 0)
    assert lower[0, 0] < lower[-1, 0]  # road above the lower edge: it runs towards +x


def test_drivable_area_stands_in_for_missing_road_segments(tmp_path: Path) -> None:
    segments = load_expansion(street().write(tmp_path / "a"), 0.01)
    drivable = load_expansion(street(with_road_segments=False).write(tmp_path / "b"), 0.01)
    assert (segments.boundary_source, drivable.boundary_source) == ("road_segment+lane", "drivable_area")
    first, second = (label_sample(vector_map, ego(0, 0, 0.3), CONFIG)[0] for vector_map in (segments, drivable))
    drawn = [shapely.union_all([shapely.LineString(line) for line in label.polylines]) for label in (first, second)]
    assert shapely.hausdorff_distance(*drawn) < 1e-4 and first.closed.sum() == second.closed.sum() == 2


def test_general_number_of_corners(tmp_path: Path) -> None:
    vector_map = load_expansion(street().write(tmp_path), 0.01)
    for corners in (3, 4, 7):
        label, _ = label_sample(vector_map, ego(0, 0, 0), CONFIG.model_copy(update={"polygon_corners": corners}))
        assert label.polygons.shape == (2, corners, 2)
    reference, _ = label_sample(vector_map, ego(0, 0, 0), CONFIG)
    np.testing.assert_array_equal(label.topology_matrix, reference.topology_matrix)  # the matrix does not depend on K


@settings(max_examples=40, deadline=None)
@given(yaw=angle, x=st.floats(-2.0, 2.0), y=st.floats(-2.0, 2.0))
def test_turning_the_ego_turns_the_vectors_and_leaves_the_matrix(tmp_path_factory: pytest.TempPathFactory, yaw: float, x: float, y: float) -> None:
    small = SmallMap()
    small.area("drivable_area", rectangle(-10, -8, 10, 8), [rectangle(-3, 3, -1, 5)])
    small.line("lane_divider", [(-9, 0), (0, 1), (9, 0)])
    small.area("ped_crossing", rectangle(2, -2, 5, 0.9))
    vector_map = load_expansion(small.write(tmp_path_factory.mktemp("map")), 0.01)
    wide = CONFIG.model_copy(update={"x_range_m": (-30.0, 30.0), "y_range_m": (-30.0, 30.0)})
    straight, _ = label_sample(vector_map, ego(x, y, 0.0), wide)
    turned, _ = label_sample(vector_map, ego(x, y, yaw), wide)
    back = PlanarPose(0.0, 0.0, yaw).to_global(turned.line_segments.astype(np.float64))
    np.testing.assert_allclose(back, straight.line_segments, atol=1e-4)
    np.testing.assert_array_equal(turned.topology_matrix, straight.topology_matrix)


@settings(max_examples=60, deadline=None)
@given(line=polyline, share=st.floats(0.05, 0.95), tolerance=st.floats(0.0, 1.0))
def test_splitting_a_line_keeps_incidence(line: np.ndarray, share: float, tolerance: float) -> None:
    ring = np.array([*rectangle(-5, -5, 5, 5), (-5, -5)], dtype=float)
    segments = to_segments([line])
    halfway = segments[:, 0] + share * (segments[:, 1] - segments[:, 0])
    parts = [np.stack([segments[:, 0], halfway], axis=1), np.stack([halfway, segments[:, 1]], axis=1)]
    distance = shapely.distance(shapely.linestrings(segments), shapely.Polygon(ring))
    assume((np.abs(distance - tolerance) > 1e-9).all() and (np.abs(shapely.length(shapely.linestrings(segments))) > 1e-6).all())
    whole = topology_matrix(segments, [ring], tolerance)
    np.testing.assert_array_equal(whole, topology_matrix(parts[0], [ring], tolerance) | topology_matrix(parts[1], [ring], tolerance))


@settings(max_examples=100, deadline=None)
@given(line=polyline, yaw=angle)
def test_clipping_gives_what_lies_inside_and_joins_nothing(line: np.ndarray, yaw: float) -> None:
    pose = PlanarPose(3.0, -2.0, yaw)
    pieces = LineSet.of([line]).clip(pose, BEV)
    source, inside = shapely.LineString(pose.to_ego(line)), shapely.box(-30, -15, 30, 15)
    assert sum(shapely.LineString(piece.points_m).length for piece in pieces) == pytest.approx(
        sum(shapely.intersection(shapely.LineString(pose.to_ego(pair)), inside).length for pair in to_segments([line])), abs=1e-6
    )
    for piece in pieces:
        assert shapely.LineString(piece.points_m).within(source.buffer(1e-6))
        assert shapely.LineString(piece.points_m).within(inside.buffer(1e-6))
    for piece in pieces:  # every step of a piece is a part of one source segment
        for step in to_segments([piece.points_m]):
            assert any(shapely.LineString(step).within(shapely.LineString(s).buffer(1e-6)) for s in to_segments([pose.to_ego(line)]))


@settings(max_examples=60, deadline=None)
@given(x=st.floats(-40, 40), y=st.floats(-25, 25), yaw=angle)
def test_closed_polygons_stay_closed(x: float, y: float, yaw: float) -> None:
    horseshoe = shapely.Polygon([(-8, -8), (8, -8), (8, 8), (4, 8), (4, -4), (-4, -4), (-4, 8), (-8, 8)])
    polygons = polygon_array([horseshoe])
    rings, _ = clip_polygons(polygons, shapely.STRtree(polygons), PlanarPose(x, y, yaw), BEV)
    for ring in rings:
        assert (ring[0] == ring[-1]).all() and shapely.Polygon(ring).is_valid
        assert to_corners(ring, 4).shape == (4, 2)
    inside = shapely.intersection(horseshoe, shapely.polygons(PlanarPose(x, y, yaw).to_global(BEV.corners())))
    assert sum(shapely.Polygon(ring).area for ring in rings) == pytest.approx(inside.area, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(line=polyline, yaw=angle)
def test_clipping_never_invents_an_incidence(line: np.ndarray, yaw: float) -> None:
    crossing = shapely.Polygon(rectangle(20, -20, 40, 5))
    polygons, pose = polygon_array([crossing]), PlanarPose(0.0, 0.0, yaw)
    rings, _ = clip_polygons(polygons, shapely.STRtree(polygons), pose, BEV)
    pieces = LineSet.of([line]).clip(pose, BEV)
    clipped = topology_matrix(to_segments([piece.points_m for piece in pieces]), rings, 0.1).any()
    assert not clipped or shapely.dwithin(shapely.LineString(line), crossing, 0.1 + 1e-6)


def test_a_closed_line_cut_once_is_one_piece() -> None:
    ring = np.array([(0, 0), (40, 0), (40, 5), (0, 5), (0, 0)], dtype=float)
    pieces = LineSet.of([ring]).clip(PlanarPose(0, 0, 0), BEV)
    assert len(pieces) == 1 and not pieces[0].closed and pieces[0].clipped
    np.testing.assert_allclose(pieces[0].points_m, [(30, 5), (0, 5), (0, 0), (30, 0)])


def test_repeated_nodes_and_lines_without_length() -> None:
    line = np.array([(0, 0), (0, 0), (0.004, 0), (1, 0), (1, 0.003)])
    np.testing.assert_array_equal(drop_repeated_nodes(line, 0.01), [(0, 0), (1, 0.003)])
    assert len(drop_repeated_nodes(np.array([(1, 1), (1.001, 1)]), 0.01)) == 1


@given(line=polyline, count=st.integers(2, 30))
def test_resampled_points_are_equally_spaced_along_the_line(line: np.ndarray, count: int) -> None:
    points = resample(line, count)
    np.testing.assert_allclose(points[[0, -1]], line[[0, -1]])
    step = shapely.LineString(line).length / (count - 1)
    chords = np.linalg.norm(np.diff(points, axis=0), axis=1)
    assert (chords <= step * (1 + 1e-9) + 1e-9).all()  # no two neighbours are further apart than one step along the line
    assert max(shapely.distance(shapely.points(points), shapely.LineString(line))) < 1e-9


def test_lane_graph_passes_through_connectors_and_counts_what_dangles() -> None:
    table = {
        "a": {"incoming": [], "outgoing": ["c1", "lost"]},
        "c1": {"incoming": ["a"], "outgoing": ["c2"]},
        "c2": {"incoming": [], "outgoing": ["b"]},
        "b": {"incoming": ["c2"], "outgoing": []},
    }
    graph = build_lane_graph(["b", "a"], ["c1", "c2"], table)
    assert graph.edges.tolist() == [[1, 0]] and graph.dangling == 1 and graph.one_sided == 1


def test_a_pose_that_is_not_finite_is_refused() -> None:
    with pytest.raises(DataError, match="ego2global"):
        PlanarPose.from_matrix(np.full((4, 4), np.nan))
