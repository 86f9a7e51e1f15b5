"""Clamped uniform B-splines as constant matrices: a curve's points are `basis @ control_points`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import BSpline

CONTROL_POINTS = 6
# Points of a reported or compared curve: the control points of a spline of degree 1, and three between each two.
LINE_POINTS = 4 * (CONTROL_POINTS - 1) + 1


def basis(points: int, degree: int, control_points: int = CONTROL_POINTS) -> NDArray[np.float32]:
    """(points, control_points) values of the basis functions at evenly spaced parameters; rows sum to one, the curve starts and ends in the outer
    control points.
    """
    inner = np.linspace(0.0, 1.0, control_points - degree + 1)
    knots = np.concatenate([np.zeros(degree), inner, np.ones(degree)])
    parameters = np.linspace(0.0, 1.0, points)
    return BSpline.design_matrix(parameters, knots, degree).toarray().astype(np.float32)


def fit_matrix(points: int, degree: int, control_points: int = CONTROL_POINTS) -> NDArray[np.float32]:
    """(control_points, points) least-squares fit: control points of the spline nearest to evenly spaced samples of a curve."""
    return np.linalg.pinv(basis(points, degree, control_points).astype(np.float64)).astype(np.float32)
