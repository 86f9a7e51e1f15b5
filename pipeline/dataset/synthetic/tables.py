"""The nuScenes v1.0 tables: constant rows, tokens, and the rows of one scene."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from pipeline.taxonomy import CAMERAS, LIDAR

Row = dict[str, Any]
Rows = dict[str, list[Row]]

TABLES = (
    "category", "attribute", "visibility", "instance", "sensor", "calibrated_sensor", "ego_pose", "log", "scene", "sample", "sample_data",
    "sample_annotation", "map",
)  # fmt: skip
LOCATIONS = ("singapore-onenorth", "boston-seaport", "singapore-queenstown", "singapore-hollandvillage")
"""Location names are borrowed because nuscenes-devkit's NuScenesMap accepts no others; the streets are synthetic."""
MAP_TOKENS = {
    "singapore-onenorth": "53992ee3023e5494b90c316c183be829",
    "singapore-hollandvillage": "37819e65e09e5547b8a3ceaefba56bb2",
    "singapore-queenstown": "93406b464a165eaba6d9de76ca09f5da",
    "boston-seaport": "36092f0b03a857c6a3403e25b4b7aab3",
}
"""File names of the base maps, fixed in nuscenes-devkit's BitMap."""

_CATEGORIES = (
    "human.pedestrian.adult", "human.pedestrian.child", "human.pedestrian.wheelchair", "human.pedestrian.stroller",
    "human.pedestrian.personal_mobility", "human.pedestrian.police_officer", "human.pedestrian.construction_worker", "animal", "vehicle.car",
    "vehicle.motorcycle", "vehicle.bicycle", "vehicle.bus.bendy", "vehicle.bus.rigid", "vehicle.truck", "vehicle.construction",
    "vehicle.emergency.ambulance", "vehicle.emergency.police", "vehicle.trailer", "movable_object.barrier", "movable_object.trafficcone",
    "movable_object.pushable_pullable", "movable_object.debris", "static_object.bicycle_rack",
)  # fmt: skip
_ATTRIBUTES = (
    "vehicle.moving", "vehicle.stopped", "vehicle.parked", "cycle.with_rider", "cycle.without_rider", "pedestrian.sitting_lying_down",
    "pedestrian.standing", "pedestrian.moving",
)  # fmt: skip
_VISIBILITY = (("1", "v0-40", 0, 40), ("2", "v40-60", 40, 60), ("3", "v60-80", 60, 80), ("4", "v80-100", 80, 100))


def token_maker(*scope: object) -> Callable[[str], str]:
    """A function from names to 32 hex digits, different for each scope (seed, scene)."""
    prefix = hashlib.md5(f"{'/'.join(map(str, scope))}/".encode(), usedforsecurity=False)

    def token(name: str) -> str:
        digest = prefix.copy()
        digest.update(name.encode())
        return digest.hexdigest()

    return token


def category_token(name: str) -> str:
    """Token of a category."""
    return token_maker("category")(name)


def attribute_token(name: str) -> str:
    """Token of an attribute."""
    return token_maker("attribute")(name)


def sensor_token(channel: str) -> str:
    """Token of a sensor."""
    return token_maker("sensor")(channel)


def visibility_token(visible_px: int, silhouette_px: int) -> str:
    """Bin of the visible share of an object's pixels over all cameras; the lowest bin if no camera could see it."""
    share = visible_px / silhouette_px if silhouette_px else 0.0
    return next(token for token, _, _, high in reversed(_VISIBILITY) if token == "1" or share >= (high - 20) / 100.0)


def constant_tables() -> Rows:
    """category, attribute, visibility and sensor."""
    sensors = [(channel, "camera") for channel in CAMERAS] + [(LIDAR, "lidar")]
    return {
        "category": [{"token": category_token(n), "name": n, "description": n.split(".")[-1].replace("_", " ")} for n in _CATEGORIES],
        "attribute": [{"token": attribute_token(n), "name": n, "description": n.split(".")[-1].replace("_", " ")} for n in _ATTRIBUTES],
        "visibility": [
            {"token": token, "level": level, "description": f"visibility of whole object is between {low} and {high}%"}
            for token, level, low, high in _VISIBILITY
        ],
        "sensor": [{"token": sensor_token(channel), "channel": channel, "modality": modality} for channel, modality in sensors],
    }


def chain(rows: list[Row]) -> None:
    """Link rows in order through `prev` and `next` tokens, in place."""
    for row, previous in zip(rows, [None, *rows[:-1]], strict=True):
        row["prev"] = previous["token"] if previous else ""
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        row["next"] = following["token"] if following else ""
