"""Geometry: a point of the world must be found at the pixel, the feature cell and the depth bin where it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.config import ModelConfig
from pipeline.models.export import example_rig
from pipeline.models.heads.decoder import FeatureSampler
from pipeline.models.point_maps import bev_cell_centers, cell_points, depth_to_bin, point_maps
from pipeline.models.view_transform import ViewTransform

FRONT, LEFT_OF_FRONT = 1, 0


@pytest.fixture(scope="module")
def rig(config: ModelConfig) -> np.ndarray:
    return example_rig(config)


def pixel_of(projection: np.ndarray, point_m: np.ndarray) -> tuple[float, float, float]:
    u, v, depth_m, _ = projection @ np.append(point_m, 1.0)
    return u / depth_m, v / depth_m, depth_m


def test_front_camera_sees_ahead_and_left_is_left(rig: np.ndarray, config: ModelConfig) -> None:
    height, width = config.image_size
    u, v, depth_m = pixel_of(rig[FRONT], np.array([10.0, 0.0, 1.5]))
    assert (u, v, depth_m) == pytest.approx((width / 2, height / 3, 10.0), abs=1e-4)
    assert pixel_of(rig[FRONT], np.array([10.0, 2.0, 1.5]))[0] < width / 2  # left in the world is left in the image
    assert pixel_of(rig[FRONT], np.array([10.0, 0.0, 0.0]))[1] > height / 3  # the ground is below the horizon
    assert pixel_of(rig[LEFT_OF_FRONT], np.array([10.0, 10.0, 1.5]))[2] > 0


def marked_feature(config: ModelConfig, rig: np.ndarray, point_m: np.ndarray) -> torch.Tensor:
    """(6, 1, Hf, Wf): 1 in the front camera's cell that holds the point."""
    stride = config.view.feature_stride
    u, v, _ = pixel_of(rig[FRONT], point_m)
    feature = torch.zeros(6, 1, config.image_size[0] // stride, config.image_size[1] // stride)
    feature[FRONT, 0, int((v + 0.5) // stride), int((u + 0.5) // stride)] = 1.0
    return feature


def test_bev_gathers_the_feature_of_a_cell_from_where_the_camera_sees_it(rig: np.ndarray, config: ModelConfig) -> None:
    x, y = bev_cell_centers(config.view)
    row, column = int(np.abs(y - 1.0).argmin()), int(np.abs(x - 9.0).argmin())
    point_m = np.array([x[column], y[row], 0.0])
    bin_number = int(np.round(depth_to_bin(np.float32([pixel_of(rig[FRONT], point_m)[2]]), config.view))[0])
    depth = torch.zeros(6, config.view.depth_bins, *(side // config.view.depth_stride for side in config.image_size))
    depth[:, bin_number] = 1.0
    maps = [torch.from_numpy(value)[None] for value in point_maps(rig, config.image_size, config.view)]
    view = ViewTransform(config.neck.channels, config.view)
    bev = view.gather(marked_feature(config, rig, point_m), depth, *maps)[0, 0]  # height 0
    top = np.unravel_index(int(bev.argmax()), bev.shape)
    # The feature cell covers several BEV cells along the ray; the brightest is within one cell of the marked one.
    assert abs(top[0] - row) <= 1
    assert abs(top[1] - column) <= 1


def test_sampling_finds_the_marked_cell(rig: np.ndarray, config: ModelConfig) -> None:
    point_m = np.array([9.0, 1.0, 0.5])
    sampler = FeatureSampler(config)
    points = torch.from_numpy(np.float32([[[point_m, -point_m]]]))  # the second one lies behind the car
    found = sampler.cameras(points, marked_feature(config, rig, point_m), torch.from_numpy(rig)[None])
    assert float(found[0, 0, 0, 0]) > 0.2
    assert float(found[0, 0, 0, 1]) == 0.0


def test_bev_sampling_reads_the_cell_a_point_stands_in(config: ModelConfig) -> None:
    points = torch.from_numpy(cell_points(config.view)[:1])  # (1, Y, X, 3)
    bev = torch.rand(1, 3, *config.view.cells)
    sampled = FeatureSampler(config).bird_eye(points, bev)
    torch.testing.assert_close(sampled, bev, atol=1e-5, rtol=1e-5)


def test_unseen_cells_sample_nothing_and_seen_ones_stay_in_their_camera(rig: np.ndarray, config: ModelConfig) -> None:
    feature_map, depth_map = point_maps(rig, config.image_size, config.view)
    hidden = feature_map[..., 0] == -2.0
    assert hidden.any()
    assert not hidden.all()
    assert (depth_map[hidden] == -2.0).all()
    rows = config.image_size[0] // config.view.feature_stride
    row = ((feature_map[..., 1][~hidden] + 1) * 6 * rows - 1) / 2
    # A sample between the last row of a camera and the first of the next would mix the two.
    assert ((row % rows) <= rows - 1 + 1e-3).all()


def test_depth_bins_are_spaced_by_equal_ratios(config: ModelConfig) -> None:
    low, high = config.view.depth_range_m
    bins = depth_to_bin(np.float32([low, np.sqrt(low * high), high]), config.view)
    np.testing.assert_allclose(bins, [0, (config.view.depth_bins - 1) / 2, config.view.depth_bins - 1], atol=1e-4)
