"""Laws of curves made of lines and arcs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.dataset.synthetic.paths2d import ArcPath, turn_between

lengths = st.floats(0.5, 60.0)
curvatures = st.floats(-0.05, 0.05)
poses = st.tuples(st.floats(-100, 100), st.floats(-100, 100), st.floats(-3.0, 3.0))
paths = st.builds(
    lambda start, pieces: ArcPath(start, tuple(p[0] for p in pieces), tuple(p[1] for p in pieces)),
    poses,
    st.lists(st.tuples(lengths, curvatures), min_size=1, max_size=4),
)


def test_quarter_circle_by_hand():
    path = ArcPath((0.0, 0.0, 0.0), (np.pi / 2 * 10.0,), (0.1,))
    np.testing.assert_allclose(path.end, (10.0, 10.0, np.pi / 2), atol=1e-12)


@given(paths)
def test_reversed_path_visits_the_same_points_backwards(path: ArcPath):
    s = np.linspace(0.0, path.length_m, 9)
    np.testing.assert_allclose(path.reversed().points(path.length_m - s), path.points(s), atol=1e-6)


@given(paths, st.floats(-8.0, 8.0))
def test_offset_path_keeps_its_distance(path: ArcPath, offset: float):
    s = path.stations()
    moved = path.offset(offset)
    np.testing.assert_allclose(np.abs(offset), np.linalg.norm(path.points(s, offset) - path.points(s), axis=1), atol=1e-9)
    np.testing.assert_allclose(moved.end[:2], path.points(path.length_m, offset)[0], atol=1e-6)


@given(paths, st.floats(0.0, 0.45), st.floats(0.55, 1.0))
def test_section_is_the_part_between(path: ArcPath, low: float, high: float):
    low, high = low * path.length_m, high * path.length_m
    part = path.section(low, high)
    np.testing.assert_allclose(part.length_m, high - low, atol=1e-9)
    np.testing.assert_allclose(part.points([0.0, part.length_m]), path.points([low, high]), atol=1e-6)


@given(poses, st.floats(0.4, 2.2), st.sampled_from([-1, 1]), st.floats(5.0, 30.0), st.floats(5.0, 30.0))
def test_turn_joins_both_poses(start, turn, side, before, after):
    corner = ArcPath(start, (before,), (0.0,)).end
    heading = corner[2] + side * turn
    end = (corner[0] + after * np.cos(heading), corner[1] + after * np.sin(heading), heading)
    path = turn_between(start, end)
    np.testing.assert_allclose(path.end[:2], end[:2], atol=1e-6)
    np.testing.assert_allclose(np.cos(path.end[2] - heading), 1.0, atol=1e-9)
    assert path.length_m <= before + after + 1e-9
