"""The index equals nuscenes-devkit record for record on real tables."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.dataset.build import IndexTables, annotation_velocity
from pipeline.dataset.geometry import invert
from pipeline.dataset.index import Index
from pipeline.dataset.tables import Tables
from pipeline.taxonomy import DETECTION_CLASSES


@pytest.fixture(scope="session")
def devkit(real_tables: Tables):
    from nuscenes import NuScenes

    return NuScenes(real_tables.folder.name, str(real_tables.folder.parent), verbose=False)


def test_samples_equal(real_index: Index, devkit) -> None:
    assert len(real_index) == len(devkit.sample)
    for token in real_index.tokens(kept_only=False):
        ours, theirs = real_index.sample(token), devkit.get("sample", token)
        scene = devkit.get("scene", theirs["scene_token"])
        assert (ours.timestamp_us, ours.prev, ours.next) == (theirs["timestamp"], theirs["prev"], theirs["next"])
        assert (ours.scene_token, ours.scene_name) == (scene["token"], scene["name"])
        assert ours.location == devkit.get("log", scene["log_token"])["location"]


def test_samples_of_a_scene_follow_the_chain(real_index: Index, devkit) -> None:
    for scene in devkit.scene:
        token, chain = scene["first_sample_token"], []
        while token:
            chain.append(token)
            token = devkit.get("sample", token)["next"]
        assert real_index.scenes()[scene["name"]] == chain
        assert [real_index.sample(token).index_in_scene for token in chain] == list(range(len(chain)))


def test_camera_and_lidar_frames_equal(real_index: Index, devkit) -> None:
    for token in real_index.tokens():
        record, data = real_index.sample(token), devkit.get("sample", token)["data"]
        assert set(record.cameras) == {channel for channel in data if channel.startswith("CAM")}
        for channel, frame in record.cameras.items():
            _assert_frame(devkit, data[channel], frame, frame.camera2ego)
            sensor = devkit.get("calibrated_sensor", devkit.get("sample_data", data[channel])["calibrated_sensor_token"])
            np.testing.assert_array_equal(frame.intrinsics, sensor["camera_intrinsic"])
        assert (record.lidar is not None) == ("LIDAR_TOP" in data)
        if record.lidar is not None:
            _assert_frame(devkit, data["LIDAR_TOP"], record.lidar, record.lidar.lidar2ego)
            np.testing.assert_array_equal(record.ego2global, record.lidar.ego2global)


def _assert_frame(devkit, token: str, frame, sensor2ego: np.ndarray) -> None:
    from nuscenes.utils.geometry_utils import transform_matrix
    from pyquaternion import Quaternion

    data = devkit.get("sample_data", token)
    sensor, pose = devkit.get("calibrated_sensor", data["calibrated_sensor_token"]), devkit.get("ego_pose", data["ego_pose_token"])
    assert (frame.timestamp_us, str(frame.path)) == (data["timestamp"], devkit.get_sample_data_path(token))
    np.testing.assert_allclose(sensor2ego, transform_matrix(sensor["translation"], Quaternion(sensor["rotation"])), atol=1e-12)
    np.testing.assert_allclose(frame.ego2global, transform_matrix(pose["translation"], Quaternion(pose["rotation"])), atol=1e-12)


def test_annotation_fields_equal(real_index: Index, devkit) -> None:
    from nuscenes.eval.detection.utils import category_to_detection_name

    for token in real_index.tokens():
        boxes, annotations = real_index.sample(token).boxes, devkit.get("sample", token)["anns"]
        assert list(boxes.tokens) == annotations
        for i, theirs in enumerate(devkit.get("sample_annotation", annotation) for annotation in annotations):
            name = category_to_detection_name(theirs["category_name"])
            assert boxes.class_id[i] == (-1 if name is None else DETECTION_CLASSES.index(name))
            attributes = [devkit.get("attribute", attribute)["name"] for attribute in theirs["attribute_tokens"]]
            assert boxes.attributes[i] == (attributes[0] if attributes else "")
            assert boxes.instance_tokens[i] == theirs["instance_token"]
            assert boxes.num_lidar_pts[i] == theirs["num_lidar_pts"]
            assert boxes.visibility[i] == int(theirs["visibility_token"] or 0)
            assert boxes.size_wlh_m[i].tolist() == theirs["size"]


def test_velocity_equals_box_velocity_to_the_last_bit(real_tables: Tables, devkit) -> None:
    ours = annotation_velocity(real_tables)
    theirs = np.array([devkit.box_velocity(record["token"]) for record in devkit.sample_annotation])
    np.testing.assert_array_equal(ours, theirs)
    # Both kinds occur in the data: single annotations have none.
    assert np.isnan(ours).any() and np.isfinite(ours).any()


def test_boxes_in_the_ego_frame_equal(real_index: Index, devkit) -> None:
    from nuscenes.eval.common.utils import quaternion_yaw
    from pyquaternion import Quaternion

    for token in real_index.tokens():
        record = real_index.sample(token)
        pose = _bev_pose(devkit, token)
        rotation = Quaternion(pose["rotation"]).inverse
        for i, annotation in enumerate(record.boxes.tokens):
            box = devkit.get_box(annotation)
            box.velocity = devkit.box_velocity(annotation)
            box.translate(-np.array(pose["translation"]))
            box.rotate(rotation)
            np.testing.assert_allclose(record.boxes.center_m[i], box.center, atol=1e-9)
            turn = record.boxes.yaw_rad[i] - quaternion_yaw(box.orientation)
            assert abs((turn + np.pi) % (2 * np.pi) - np.pi) < 1e-9
            np.testing.assert_allclose(record.boxes.velocity_mps[i], box.velocity[:2], atol=1e-9)


def _bev_pose(devkit, token: str) -> dict:
    """The pose of the lidar key frame, else of the key frame nearest in time."""
    sample = devkit.get("sample", token)
    frames = [devkit.get("sample_data", data) for data in sample["data"].values()]
    best = min(frames, key=lambda frame: (frame["channel"] != "LIDAR_TOP", abs(frame["timestamp"] - sample["timestamp"])))
    return devkit.get("ego_pose", best["ego_pose_token"])


def test_boxes_in_the_lidar_frame_equal_get_sample_data(real_index: Index, devkit) -> None:
    checked = 0
    for token in real_index.tokens():
        record, data = real_index.sample(token), devkit.get("sample", token)["data"]
        if record.lidar is None:
            continue
        _, theirs, _ = devkit.get_sample_data(data["LIDAR_TOP"])
        ego2lidar = invert(record.lidar.lidar2ego)
        ours = record.boxes.center_m @ ego2lidar[:3, :3].T + ego2lidar[:3, 3]
        np.testing.assert_allclose(ours, [box.center for box in theirs], atol=1e-9)
        checked += len(theirs)
    assert checked


def test_boxes_project_where_the_devkit_projects_them(real_index: Index, devkit) -> None:
    from nuscenes.utils.geometry_utils import BoxVisibility, view_points

    for token in real_index.tokens()[:4]:
        record, data = real_index.sample(token), devkit.get("sample", token)["data"]
        for channel in record.cameras:
            # The devkit moves global boxes into the camera with the pose of the camera's own time stamp.
            _, theirs, intrinsics = devkit.get_sample_data(data[channel], box_vis_level=BoxVisibility.ANY)
            for box in theirs:
                if box.center[2] < 1.0:
                    continue
                i = record.boxes.tokens.index(box.token)
                point = record.ego2img(channel) @ np.append(record.boxes.center_m[i], 1.0)
                expected = view_points(box.center[:, None], intrinsics, normalize=True)[:2, 0]
                np.testing.assert_allclose(point[:2] / point[2], expected, atol=1e-6)


def test_instances_equal(real_index_tables: IndexTables, devkit) -> None:
    table = real_index_tables.instances.to_pylist()
    assert len(table) == len(devkit.instance)
    by_instance: dict[str, list[dict]] = {}
    for annotation in devkit.sample_annotation:
        by_instance.setdefault(annotation["instance_token"], []).append(annotation)
    for row in table:
        owned = by_instance[row["token"]]
        stamps = {devkit.get("sample", a["sample_token"])["timestamp"]: a["sample_token"] for a in owned}
        assert row["annotations"] == len(owned)
        assert (row["first_sample"], row["last_sample"]) == (stamps[min(stamps)], stamps[max(stamps)])
        assert row["duration_s"] == pytest.approx(1e-6 * (max(stamps) - min(stamps)), abs=1e-12)
        assert row["category"] == owned[0]["category_name"]
