"""Objects fill their boxes; solids are closed and face outwards."""

import numpy as np
import pytest

from pipeline.dataset.synthetic.actors import MEAN_SIZE_LWH_M, make_shape
from pipeline.dataset.synthetic.mesh import Material, box, lathe
from pipeline.taxonomy import DETECTION_CLASSES, OCCUPANCY_CLASSES


def signed_volume(triangles: np.ndarray) -> float:
    a, b, c = triangles.astype(float).transpose(1, 0, 2)
    return float(np.einsum("ij,ij->", a, np.cross(b, c)) / 6.0)


@pytest.mark.parametrize("name", DETECTION_CLASSES)
def test_shape_fills_its_box_exactly(name: str):
    for seed in range(3):
        shape = make_shape(name, np.random.default_rng(seed), with_rider=bool(seed % 2))
        corners = shape.mesh.triangles.reshape(-1, 3)
        length, width, height = shape.size_lwh_m
        np.testing.assert_allclose(corners.min(axis=0), (-length / 2, -width / 2, 0.0), atol=1e-5)
        np.testing.assert_allclose(corners.max(axis=0), (length / 2, width / 2, height), atol=1e-5)
        assert set(shape.mesh.labels) == {OCCUPANCY_CLASSES.index(name)}
        assert 0.8 < length / MEAN_SIZE_LWH_M[name][0] < 1.2


def test_every_detection_class_has_a_shape():
    assert set(MEAN_SIZE_LWH_M) == set(DETECTION_CLASSES)


def test_box_volume_and_outward_normals():
    mesh = box((0, 0, 0), (2, 3, 4), (1, 1, 1))
    assert signed_volume(mesh.triangles) == pytest.approx(24.0)
    outwards = np.einsum("ij,ij->i", mesh.normals(), mesh.triangles.mean(axis=1) - [1.0, 1.5, 2.0])
    assert (outwards > 0).all()


def test_cylinder_volume_approaches_the_circle():
    mesh = lathe((5, 0, 0), (1, 1), (0, 2), (1, 1, 1), sides=64, axis="y")
    assert signed_volume(mesh.triangles) == pytest.approx(2 * np.pi, rel=0.01)


def test_surface_points_lie_on_the_surface_and_cover_it():
    mesh = box((0, 0, 0), (2, 3, 4), (1, 1, 1), Material.PLAIN, 15)
    points, triangle = mesh.surface_points(0.2)
    on_face = np.isclose(points, 0.0, atol=1e-5) | np.isclose(points, [2.0, 3.0, 4.0], atol=1e-5)
    assert on_face.any(axis=1).all()
    # 52 m^2 of faces, at least one point for each 0.04 m^2.
    assert len(points) >= 52 / 0.04
    assert len(np.unique(triangle)) == 12
