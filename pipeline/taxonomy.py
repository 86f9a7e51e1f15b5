"""Class names and their order: one place, used by labels, heads, metrics and reports."""

from __future__ import annotations

from typing import Literal

# nuScenes detection challenge, order of nuscenes-devkit's detection_cvpr_2019 configuration.
DETECTION_CLASSES: tuple[str, ...] = (
    "car", "truck", "bus", "trailer", "construction_vehicle", "pedestrian", "motorcycle", "bicycle", "traffic_cone", "barrier",
)  # fmt: skip

# Vector map elements, as in MapTR: lane and road dividers, pedestrian crossings, edge of the drivable area.
MAP_CLASSES: tuple[str, ...] = ("divider", "ped_crossing", "boundary")

# Occ3D-nuScenes: index is the label value, 17 is free space.
OCCUPANCY_CLASSES: tuple[str, ...] = (
    "others", "barrier", "bicycle", "bus", "car", "construction_vehicle", "motorcycle", "pedestrian", "traffic_cone", "trailer",
    "truck", "driveable_surface", "other_flat", "sidewalk", "terrain", "manmade", "vegetation", "free",
)  # fmt: skip
OCCUPANCY_FREE = OCCUPANCY_CLASSES.index("free")

# Order of the cameras in every [6, ...] tensor: clockwise seen from above, starting front left, as they fire in one lidar sweep.
CAMERAS: tuple[str, ...] = ("CAM_FRONT_LEFT", "CAM_FRONT", "CAM_FRONT_RIGHT", "CAM_BACK_RIGHT", "CAM_BACK", "CAM_BACK_LEFT")
LIDAR = "LIDAR_TOP"

Task = Literal["detection", "map", "occupancy"]
TASKS: tuple[Task, ...] = ("detection", "map", "occupancy")
