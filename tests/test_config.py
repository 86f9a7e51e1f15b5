"""params.yaml: good files load, every kind of mistake names the file, the field and the rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_config, merge
from pipeline.errors import ConfigError


def test_shipped_parameters_load(project_root: Path) -> None:
    assert load_config(project_root / "params.yaml").j6.chip == "j6m"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"train": {"stepz": 3}}, "train.stepz = 3: unknown key"),
        ({"trian": {}}, "trian: unknown key"),
        ({"train": {"steps": 0}}, "train.steps = 0"),
        ({"train": {"steps": "many"}}, "train.steps = 'many'"),
        ({"dataset": {"source": "nuscenes"}}, "dataroot is None"),
        ({"dataset": {"source": "kitti"}}, "dataset.source = 'kitti'"),
    ],
)
def test_mistakes_name_file_field_value_and_rule(project_root: Path, overrides: dict, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(project_root / "params.yaml", overrides)
    assert expected in str(error.value)
    assert "params.yaml" in str(error.value)


@pytest.mark.parametrize(("text", "expected"), [("a: [1", "not valid YAML"), ("- 1", "must hold a mapping"), ("", "must hold a mapping")])
def test_unreadable_files(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_config(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="file not found"):
        load_config(tmp_path / "none.yaml")


def test_sections_are_frozen(project_root: Path) -> None:
    config = load_config(project_root / "params.yaml")
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 2  # type: ignore[misc]


def test_merge_is_deep_and_leaves_its_inputs_alone() -> None:
    base = {"a": {"b": 1, "c": [1, 2]}}
    assert merge(base, {"a": {"c": [3]}}) == {"a": {"b": 1, "c": [3]}}
    assert base == {"a": {"b": 1, "c": [1, 2]}}
