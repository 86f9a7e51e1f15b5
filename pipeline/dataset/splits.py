"""Which scenes are trained on and which are held out.

The first of these that applies:

1. `dataset.val_scenes` of params.yaml: those scenes are held out, all others train.
2. `<dataroot>/<version>/splits.json`, the devkit's custom splits: one split named train or *_train, one named val or *_val.
3. The devkit's predefined splits (mini_train and mini_val for versions that end in "mini", else train and val), if both have scenes here.
4. The last fifth of the scenes by time, at least one, is held out.

A scene is never in both, unless the data set has a single scene: then it is trained on and evaluated on, and a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, file_error
from pipeline.io import read_json

HELD_OUT_FRACTION = 0.2


@dataclass(frozen=True)
class Splits:
    """Scene names by split, where they come from, and what a reader must know about them."""

    train: tuple[str, ...]
    val: tuple[str, ...]
    origin: str
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, list[str]]:
        """{"train": [...], "val": [...]}."""
        return {"train": list(self.train), "val": list(self.val)}


def resolve_splits(scenes: Sequence[str], val_scenes: Sequence[str], dataroot: Path, version: str) -> Splits:
    """Splits of a data set.

    Args:
        scenes: scene names that have samples, by time of the first one.
        val_scenes: `dataset.val_scenes` of params.yaml.
        dataroot: the data set.
        version: its table directory.

    Raises:
        ConfigError: `val_scenes` names an unknown scene or leaves nothing to train on.
        DataError: splits.json is damaged, names an unknown scene or holds a scene twice.
    """
    if len(scenes) == 1:
        note = f"Single scene ({scenes[0]}): it is trained on AND evaluated on, so the metrics say nothing about scenes not seen in training."
        return Splits(tuple(scenes), tuple(scenes), "single scene", (note,))
    if val_scenes:
        return _from_params(scenes, val_scenes)
    custom = dataroot / version / "splits.json"
    if custom.is_file():
        return _from_file(scenes, custom)
    return _from_devkit(scenes, version) or _last_scenes(scenes, version)


def _from_params(scenes: Sequence[str], val_scenes: Sequence[str]) -> Splits:
    unknown = [name for name in val_scenes if name not in scenes]
    if unknown:
        raise ConfigError(f"params.yaml: dataset.val_scenes: {unknown[0]!r} is not a scene with samples; scenes: {_some(scenes)}")
    train = tuple(name for name in scenes if name not in val_scenes)
    if not train:
        raise ConfigError("params.yaml: dataset.val_scenes names every scene of the data set: nothing is left to train on")
    return Splits(train, tuple(name for name in scenes if name in val_scenes), "params.yaml")


def _from_file(scenes: Sequence[str], path: Path) -> Splits:
    stored = read_json(path)
    train, val = (_one_split(stored, path, name) for name in ("train", "val"))
    names = [*train, *val]
    unknown = [name for name in names if name not in scenes]
    if unknown:
        raise file_error(path, f"scene {unknown[0]!r} is not a scene with samples; scenes: {_some(scenes)}")
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise file_error(path, f"scene {twice!r} is listed twice: no scene may be trained on and held out")
    if not train or not val:
        raise file_error(path, "train and val must both have scenes")
    return Splits(tuple(train), tuple(val), "splits.json")


def _one_split(stored: Any, path: Path, name: str) -> list[str]:
    """The scenes of the split `name` or `*_name`."""
    found = [key for key in stored if key == name or key.endswith(f"_{name}")] if isinstance(stored, Mapping) else []
    if len(found) != 1 or not isinstance(stored[found[0]], list):
        raise file_error(path, f'must hold one list of scene names called "{name}" or "*_{name}", has {len(found)}')
    return stored[found[0]]


def _from_devkit(scenes: Sequence[str], version: str) -> Splits | None:
    from nuscenes.utils.splits import create_splits_scenes

    known = create_splits_scenes()
    names = ("mini_train", "mini_val") if version.endswith("mini") else ("train", "val")
    train, val = (tuple(name for name in scenes if name in set(known[split])) for split in names)
    if not train or not val:
        return None
    unused = len(scenes) - len(train) - len(val)
    notes = (f"{unused} scenes are in neither {names[0]} nor {names[1]} of nuScenes and are not used.",) if unused else ()
    return Splits(train, val, f"nuScenes {names[0]}, {names[1]}", notes)


def _last_scenes(scenes: Sequence[str], version: str) -> Splits:
    count = max(1, round(HELD_OUT_FRACTION * len(scenes)))
    train, val = tuple(scenes[:-count]), tuple(scenes[-count:])
    note = f"No nuScenes split gives {version} training and held-out scenes: the last {count} of {len(scenes)} scenes by time are held out."
    return Splits(train, val, "last scenes", (note,))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
