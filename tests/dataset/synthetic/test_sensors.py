"""Images, sweeps and occupancy agree with the geometry they come from."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from nuscenes.utils.data_classes import LidarPointCloud

from pipeline.dataset.synthetic.ground import make_ground
from pipeline.dataset.synthetic.layout import make_layout
from pipeline.dataset.synthetic.occupancy import GRID_SHAPE, npz_bytes, voxel_index
from pipeline.dataset.synthetic.render import make_light, render
from pipeline.dataset.synthetic.rig import about, lidar_rays, make_rig, matrix
from pipeline.dataset.synthetic.scenery import make_scenery
from pipeline.dataset.synthetic.traffic import make_traffic
from pipeline.dataset.synthetic.world import World
from pipeline.taxonomy import OCCUPANCY_CLASSES, OCCUPANCY_FREE


@pytest.fixture(scope="module")
def rendered():
    """One instant of a scene: world, pose of the ego vehicle, rig, and a frame of each camera."""
    rng = np.random.default_rng(3)
    plan = make_layout(rng)
    ground = make_ground(plan, rng)
    traffic = make_traffic(plan, 1.5, 30.0, rng)
    world = World(ground, make_scenery(plan, ground, rng), traffic.actors)
    light, rig = make_light(rng), make_rig(200, 112, rng)
    x, y, _, yaw = traffic.ego.poses(np.array([0.7]))[0]
    ego2tile = matrix(about("z", yaw), (x, y, 0.0))
    instant = world.at(0.7)
    frames = {c: render(world, instant, light, k, ego2tile @ k.mount.sensor2ego, 1) for c, k in rig.cameras.items()}
    return world, instant, ego2tile, rig, frames


def box_corners(world: World, instant, k: int) -> np.ndarray:
    length, width, height = world.actors[k].shape.size_lwh_m
    x, y, z, yaw = instant.poses[k]
    local = np.array([[i * length / 2, j * width / 2, h] for i in (-1, 1) for j in (-1, 1) for h in (0.0, height)])
    c, s = np.cos(yaw), np.sin(yaw)
    return local @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]]) + [x, y, z]


def test_every_object_pixel_lies_in_its_projected_box(rendered):
    world, instant, ego2tile, rig, frames = rendered
    checked = 0
    for channel, camera in rig.cameras.items():
        tile2camera = np.linalg.inv(ego2tile @ camera.mount.sensor2ego)
        for k in np.unique(frames[channel].instance):
            if k < 0:
                continue
            corners = box_corners(world, instant, k) @ tile2camera[:3, :3].T + tile2camera[:3, 3]
            if corners[:, 2].min() < 0.5:
                continue
            pixels = corners @ camera.intrinsics.T
            hull = cv2.convexHull((pixels[:, :2] / pixels[:, 2:]).astype(np.float32))
            rows, columns = np.nonzero(frames[channel].instance == k)
            distance = [cv2.pointPolygonTest(hull, (float(c), float(r)), True) for r, c in zip(rows, columns, strict=True)]
            assert min(distance) > -0.05
            checked += 1
    assert checked > 10


def test_visible_pixels_never_exceed_the_silhouette(rendered):
    _, _, _, _, frames = rendered
    for frame in frames.values():
        assert (frame.visible_px <= frame.silhouette_px).all()
        counts = np.bincount(frame.instance[frame.instance >= 0], minlength=len(frame.visible_px))
        np.testing.assert_array_equal(counts, frame.visible_px)
    assert any((frame.silhouette_px > frame.visible_px).any() for frame in frames.values())


def test_moving_objects_are_cast_where_they_are(rendered):
    world, _, _, _, _ = rendered
    k = world.movers[0]
    for time_s in (0.0, 0.6, 1.2):
        instant = world.at(time_s)
        x, y, z, _ = instant.poses[k]
        height = world.actors[k].shape.size_lwh_m[2]
        hits = world.cast(instant, np.array([x, y, z + 60.0]), np.array([[0.0, 0.0, -1.0]], np.float32))
        owner = world.instance[hits.triangle[0]]
        # Something may stand over the object (a tree), but nothing may be hit below its roof.
        assert owner == k or hits.range_m[0] < 60.0 - 0.5 * height


def test_range_image_is_the_distance_to_the_ground(rendered):
    _, _, ego2tile, rig, frames = rendered
    camera, frame = rig.cameras["CAM_FRONT"], frames["CAM_FRONT"]
    down = (camera.rays.reshape(112, 200, 3) @ (ego2tile @ camera.mount.sensor2ego)[2, :3])[-1]
    height = camera.mount.position_m[2]
    expected = -height / down
    ground = (frame.instance[-1] < 0) & (frame.range_m[-1] > expected - 0.02)
    assert ground.sum() > 20
    np.testing.assert_allclose(frame.range_m[-1][ground], expected[ground], rtol=2e-3)


def test_lidar_beams_cover_the_sphere_band():
    directions, ring = lidar_rays(90)
    np.testing.assert_allclose(np.linalg.norm(directions, axis=1), 1.0, atol=1e-6)
    elevation = np.rad2deg(np.arcsin(directions[:, 2]))
    np.testing.assert_allclose([elevation[ring == 0].mean(), elevation[ring == 31].mean()], [-30.67, 10.67], atol=1e-3)


def test_lidar_returns_lie_in_occupied_voxels(nusc, synthetic_root: Path):
    for sample in nusc.sample:
        scene = nusc.get("scene", sample["scene_token"])
        labels = np.load(synthetic_root / "gts" / scene["name"] / sample["token"] / "labels.npz", allow_pickle=False)
        semantics, mask_lidar, mask_camera = (labels[k] for k in ("semantics", "mask_lidar", "mask_camera"))
        assert semantics.shape == mask_lidar.shape == mask_camera.shape == GRID_SHAPE
        assert semantics.dtype == mask_lidar.dtype == mask_camera.dtype == np.uint8
        assert semantics.max() == OCCUPANCY_FREE
        data = nusc.get("sample_data", sample["data"]["LIDAR_TOP"])
        calibration = nusc.get("calibrated_sensor", data["calibrated_sensor_token"])
        lidar2ego = matrix(tuple(calibration["rotation"]), tuple(calibration["translation"]))
        cloud = LidarPointCloud.from_file(str(synthetic_root / data["filename"])).points[:3].T
        index, inside = voxel_index(cloud @ lidar2ego[:3, :3].T + lidar2ego[:3, 3])
        near_occupied = cv2.dilate((semantics != OCCUPANCY_FREE).reshape(200, -1).astype(np.uint8), np.ones((3, 1), np.uint8)).reshape(GRID_SHAPE)
        near_occupied |= np.roll(near_occupied, 1, axis=1) | np.roll(near_occupied, -1, axis=1)
        near_occupied[:, :, 1:] |= near_occupied[:, :, :-1].copy()
        cells = index[inside]
        assert near_occupied[cells[:, 0], cells[:, 1], cells[:, 2]].mean() > 0.98
        assert (semantics[cells[:, 0], cells[:, 1], cells[:, 2]] != OCCUPANCY_FREE).mean() > 0.9
        assert mask_lidar[cells[:, 0], cells[:, 1], cells[:, 2]].all()
        assert 0.02 < mask_camera.mean() < 0.5
        assert (semantics[mask_camera == 1] == OCCUPANCY_FREE).mean() > 0.5


def test_box_centres_of_vehicles_have_their_label_nearby(nusc, synthetic_root: Path):
    agree = total = 0
    for sample in nusc.sample:
        scene = nusc.get("scene", sample["scene_token"])
        semantics = np.load(synthetic_root / "gts" / scene["name"] / sample["token"] / "labels.npz")["semantics"]
        pose = nusc.get("ego_pose", nusc.get("sample_data", sample["data"]["LIDAR_TOP"])["ego_pose_token"])
        ego2global = matrix(tuple(pose["rotation"]), tuple(pose["translation"]))
        for token in sample["anns"]:
            row = nusc.get("sample_annotation", token)
            if row["category_name"] not in ("vehicle.car", "vehicle.truck", "movable_object.barrier"):
                continue
            centre = (np.array(row["translation"]) - ego2global[:3, 3]) @ ego2global[:3, :3]
            index, inside = voxel_index(centre[None])
            if not inside[0] or np.abs(centre[:2]).max() > 37.0:
                continue
            i, j, _ = index[0]
            name = {"vehicle.car": "car", "vehicle.truck": "truck", "movable_object.barrier": "barrier"}[row["category_name"]]
            agree += (semantics[i - 6 : i + 7, j - 6 : j + 7] == OCCUPANCY_CLASSES.index(name)).any()
            total += 1
    assert total > 10
    assert agree == total


def test_images_have_the_listed_size_and_are_not_flat(nusc, synthetic_root: Path):
    for row in nusc.sample_data:
        if row["fileformat"] == "jpg":
            image = cv2.imread(str(synthetic_root / row["filename"]))
            assert image.shape == (row["height"], row["width"], 3)
            assert image.std() > 8


def test_npz_bytes_depend_on_content_only():
    arrays = {"a": np.arange(5, dtype=np.uint8)}
    assert npz_bytes(arrays) == npz_bytes({"a": np.arange(5, dtype=np.uint8)})
