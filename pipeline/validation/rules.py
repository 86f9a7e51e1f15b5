"""All rules of validation in one list.

The measuring modules turn the data set into tidy tables with one row a thing (a sample, a key frame, a box ...) and one column a measured
quantity. A rule is a limit on one such column: a range for a number, "no problem" (the empty string) for a text. Null means "cannot be
judged" and never fails. The same list drives the report and the Great Expectations suite.

Severity `error`: labels or geometry would be wrong, or a file is unusable; `warning`: worth knowing. A rule that `drops` takes the
samples of its failing rows out of training and evaluation, with the rule's name as the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.config import ValidationConfig

Severity = Literal["error", "warning"]
_POLICY_COLUMNS = {"phase": "camera_jitter_ms", "window": "camera_wait_ms", "strict": "camera_spread_ms"}


@dataclass(frozen=True)
class Rule:
    """A limit on one column of one tidy table; without minimum and maximum the column is text and must be empty."""

    name: str
    table: str
    column: str
    severity: Severity
    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    drops: bool = False

    @property
    def is_text(self) -> bool:
        """Whether the rule is "no problem"."""
        return self.minimum is None and self.maximum is None

    @property
    def limit(self) -> str:
        """The limit in words."""
        if self.is_text:
            return "no problem"
        if self.minimum is None:
            return f"<= {self.maximum:g}"
        return f">= {self.minimum:g}" if self.maximum is None else f"{self.minimum:g} .. {self.maximum:g}"


def rules(config: ValidationConfig) -> tuple[Rule, ...]:
    """The rules under a configuration, in the order in which reasons for dropping a sample take precedence."""
    return (*_table_rules(), *_time_rules(config), *_calibration_rules(config), *_annotation_rules(config), *_file_rules(config), *_map_rules())


def _table_rules() -> tuple[Rule, ...]:
    return (
        Rule("token_unique", "tokens", "duplicate_problem", "error", "a token names one record"),
        Rule("sample_chain", "samples", "chain_problem", "error", "prev and next of the samples of a scene form one chain in time order"),
        Rule("sample_data_chain", "sample_data", "chain_problem", "error", "prev and next of a sensor's frames form chains in time order"),
        Rule("scene_ends", "scenes", "end_problem", "warning", "a scene names its first and last sample"),
        Rule("scene_sample_count", "scenes", "sample_difference", "warning", "a scene has nbr_samples samples", 0, 0),
    )


def _time_rules(config: ValidationConfig) -> tuple[Rule, ...]:
    limit_ms = {"phase": config.max_jitter_ms, "window": config.max_wait_ms, "strict": config.max_spread_ms}[config.sync_policy]
    meaning = {
        "phase": "each camera keeps its usual phase in the lidar sweep",
        "window": "each camera is near the lidar key frame in time",
        "strict": "all cameras fire at the same time",
    }[config.sync_policy]
    column = _POLICY_COLUMNS[config.sync_policy]
    return (
        Rule("sample_camera_missing", "samples", "missing_camera", "error", "a sample has a key frame of all six cameras", drops=True),
        Rule("sample_lidar_missing", "samples", "lidar_frames", "warning", "a sample has a LIDAR_TOP key frame", 1),
        Rule("sample_pose", "samples", "pose_problem", "error", "a sample has a finite ego pose", drops=True),
        Rule("frame_pose", "frames", "pose_problem", "error", "a key frame has a finite ego pose", drops=True),
        Rule("frame_unique", "frames", "duplicate_problem", "error", "a sample has one key frame of a channel"),
        Rule("label_time", "samples", "label_age_ms", "error", "labels are of a sensor frame's time, not interpolated", None, 1, drops=True),
        Rule("sample_time_order", "samples", "interval_ms", "error", "samples of a scene have different time stamps", 0.001),
        Rule("sample_gap", "samples", "relative_interval", "warning", "samples are about evenly spaced (1: the median interval)", 0.5, 1.5),
        Rule(f"sync_{config.sync_policy}", "samples", column, "warning", meaning, None, limit_ms, drops=True),
        Rule(
            "ego_pose_age", "frames", "ego_age_ms", "warning", "the ego pose is of the frame's time", None, config.max_pose_age_ms, drops=True
        ),
        Rule(
            "motion_error", "frames", "pose_error_m", "error", "a frame's pose lies on the trajectory at the frame's time", None,
            config.max_motion_error_m, drops=True,
        ),
    )  # fmt: skip


def _calibration_rules(config: ValidationConfig) -> tuple[Rule, ...]:
    """Limits: real nuScenes (850 logs) stays within 3.3 degrees, 0.10 m and 1.6 % of the usual calibration, 2.6 degrees of the nominal headings, 1.2
    degrees of elevation and 1.3 of roll."""
    table = "calibrations"
    return (
        Rule("extrinsics_finite", table, "extrinsics_problem", "error", "rotation and translation are finite"),
        Rule("rotation_unit", table, "rotation_error", "error", "the quaternion has length 1", None, 1e-3),
        Rule("intrinsics_plausible", table, "intrinsics_problem", "error", "the camera matrix is one of a real camera"),
        Rule("intrinsics_foreign", table, "foreign_problem", "error", "a camera of a measured rig does not have another one's matrix"),
        Rule("intrinsics_own", table, "shared_problem", "warning", "a camera has its own matrix (simulated rigs may share one)"),
        Rule("principal_point", table, "principal_point_offset", "error", "the principal point is near the image centre", None, 0.25),
        Rule("field_of_view", table, "field_of_view_deg", "error", "the horizontal field of view is that of a lens without fisheye", 20, 150),
        Rule("camera_heading", table, "heading_error_deg", "error", "a camera looks where its channel name says", None, 30),
        Rule("camera_elevation", table, "elevation_deg", "error", "a camera looks at the horizon", None, 30),
        Rule("camera_roll", table, "roll_deg", "error", "a camera is upright", None, 20),
        Rule("rig_rotation", table, "rig_rotation_deg", "error", "rotation as in the rig's other logs", None, config.max_rig_rotation_deg),
        Rule("rig_position", table, "rig_position_m", "error", "position as in the rig's other logs", None, config.max_rig_position_m),
        Rule("rig_focal_length", table, "rig_focal_ratio", "error", "focal length as in the rig's other logs", None, 0.03),
        Rule("view_gap", "coverage", "view_gap_deg", "error", "the cameras together see all around", None, 10),
        Rule("box_points", "projection", "box_point_share", "error", "lidar points fall into the boxes that were annotated on them", 0.5),
        Rule("edge_agreement", "edges", "edge_agreement", "error", "depth edges of the lidar lie on edges of the images", config.min_edge_agreement),
    )


def _annotation_rules(config: ValidationConfig) -> tuple[Rule, ...]:
    return (
        Rule("box_numbers", "boxes", "number_problem", "error", "centre, size and rotation are finite and possible", drops=True),
        Rule("box_chain", "boxes", "chain_problem", "error", "prev and next of an instance's boxes form one chain in time order"),
        Rule("box_size", "boxes", "size_ratio", "warning", "the size fits the class (factor of the cube root of the volume)", None, 3),
        Rule("box_speed", "boxes", "speed_mps", "warning", "nothing is faster than traffic", None, config.max_speed_mps),
        Rule("box_velocity_jump", "boxes", "jump_mps2", "warning", "velocity changes as a vehicle can", None, config.max_acceleration_mps2),
        Rule("box_point_count", "boxes", "num_lidar_pts", "warning", "the number of lidar points is known", 0),
        Rule("instance_ends", "instances", "end_problem", "warning", "an instance names the first and last box of its chain"),
        Rule("instance_count", "instances", "annotation_difference", "warning", "an instance has nbr_annotations boxes", 0, 0),
    )


def _file_rules(config: ValidationConfig) -> tuple[Rule, ...]:
    return (
        Rule("image_file", "images", "file_problem", "error", "the image is there, whole and decodable", drops=True),
        Rule("image_size", "images", "size_problem", "error", "the image has the size in sample_data", drops=True),
        Rule("image_black", "images", "dark_problem", "warning", "the image shows something", drops=True),
        Rule("image_repeated", "images", "repeat_problem", "warning", "no two frames hold the same bytes", drops=True),
        Rule("lidar_file", "lidar", "file_problem", "warning", "the lidar file is there and whole (else: no depth supervision)"),
        Rule("lidar_points", "lidar", "points", "warning", "a sweep has a plausible number of returns", config.min_lidar_points, 1_000_000),
        Rule("lidar_finite", "lidar", "invalid_points", "warning", "all returns are finite", None, 0),
        Rule("lidar_range", "lidar", "max_range_m", "warning", "no return is farther than a lidar reaches", None, 300),
        Rule("occupancy_file", "occupancy", "file_problem", "error", "the label is readable, of the right shape and classes"),
        Rule("occupancy_lidar", "occupancy", "hit_share", "warning", "lidar returns lie in or beside occupied voxels", 0.5),
    )


def _map_rules() -> tuple[Rule, ...]:
    return (
        Rule("map_references", "maps", "reference_problem", "error", "the map file is readable and its tokens resolve"),
        Rule("map_shapes", "maps", "shape_problem", "warning", "lines have a length, polygons are simple, lane links lead somewhere"),
    )
