"""Vectorized rigid motions. Matrices act on column vectors; `a2b` maps points of frame a to frame b."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def quaternion_to_matrix(quaternion_wxyz: FloatArray) -> FloatArray:
    """Rotation matrices (N,3,3) of quaternions (N,4), order w, x, y, z; they are normalised first, a zero quaternion gives NaN."""
    with np.errstate(invalid="ignore", divide="ignore"):
        w, x, y, z = (quaternion_wxyz / np.linalg.norm(quaternion_wxyz, axis=1, keepdims=True)).T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.moveaxis(np.array(rows), 2, 0)


def rigid(rotation: FloatArray, translation_m: FloatArray) -> FloatArray:
    """Homogeneous transforms (N,4,4) from rotations (N,3,3) and translations (N,3)."""
    matrix = np.zeros((len(rotation), 4, 4))
    matrix[:, :3, :3] = rotation
    matrix[:, :3, 3] = translation_m
    matrix[:, 3, 3] = 1.0
    return matrix


def pose(quaternion_wxyz: FloatArray, translation_m: FloatArray) -> FloatArray:
    """Homogeneous transforms (N,4,4) from quaternions (N,4) and translations (N,3)."""
    return rigid(quaternion_to_matrix(quaternion_wxyz), translation_m)


def invert(matrix: FloatArray) -> FloatArray:
    """Inverse of rigid transforms (...,4,4)."""
    rotation_t = np.swapaxes(matrix[..., :3, :3], -1, -2)
    inverse = np.zeros_like(matrix)
    inverse[..., :3, :3] = rotation_t
    inverse[..., :3, 3] = -np.einsum("...ij,...j->...i", rotation_t, matrix[..., :3, 3])
    inverse[..., 3, 3] = 1.0
    return inverse


def transform(matrix: FloatArray, points: FloatArray) -> FloatArray:
    """Points (N,3) moved by one transform (4,4)."""
    return points @ matrix[:3, :3].T + matrix[:3, 3]


def pad_intrinsics(intrinsics: FloatArray) -> FloatArray:
    """A camera matrix (3,3) as (4,4), so that it composes with rigid transforms; depth stays in row 2."""
    padded = np.eye(4)
    padded[:3, :3] = intrinsics
    return padded


def project(ego2img: FloatArray, points_m: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Pixels (N,2) and depths in metres (N,) of points (N,3) under a projection (4,4); a pixel is valid where its depth is positive."""
    homogeneous = transform(ego2img, points_m)
    depth_m = homogeneous[:, 2]
    with np.errstate(invalid="ignore", divide="ignore"):
        return homogeneous[:, :2] / depth_m[:, None], depth_m
