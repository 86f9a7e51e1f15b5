from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.config import ModelConfig, load_config, preset_overrides
from pipeline.errors import ModelError
from pipeline.models.export import example_inputs
from pipeline.models.multitask import MultitaskModel
from pipeline.models.predictor import named_outputs, to_inputs
from pipeline.models.weights import empty_anchors, load_model, save_model
from tests.models.tiny import tiny_config


def outputs_of(model: MultitaskModel) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return named_outputs(model, to_inputs(example_inputs(model)))


def test_outputs_have_the_shapes_of_the_contract(model: MultitaskModel) -> None:
    shapes = {name: tuple(value.shape) for name, value in outputs_of(model).items()}
    assert shapes == {
        "det_logits": (1, 24, 10), "det_boxes": (1, 24, 11), "det_features_out": (1, 24, 16),
        "map_logits": (1, 12, 3), "map_states": (1, 12, 20), "occupancy_logits": (1, 16 * 12 * 4 + 8 * 8 * 2, 18),
    }  # fmt: skip


@pytest.mark.parametrize("task", ["detection", "map", "occupancy"])
def test_a_single_task_builds_only_its_head(task: str) -> None:
    config = tiny_config(tasks=[task])
    names = set(outputs_of(MultitaskModel(config, empty_anchors(config)).eval()))
    assert {name.split("_")[0] for name in names} == {{"detection": "det"}.get(task, task)}


def test_a_trained_layer_without_bev_runs() -> None:
    config = tiny_config(detection={"sample_bev": False, "velocity_refinement": False}, map={"sample_bev": False})
    outputs = outputs_of(MultitaskModel(config, empty_anchors(config)).eval())
    assert all(bool(value.isfinite().all()) for value in outputs.values())


def test_a_black_camera_gives_finite_outputs(model: MultitaskModel) -> None:
    example = example_inputs(model)
    example["images"][2] = 0.0
    with torch.inference_mode():
        outputs = named_outputs(model, to_inputs(example))
    assert all(bool(value.isfinite().all()) for value in outputs.values())


def test_preset_v1_j6m_has_the_reference_inputs(project_root) -> None:
    config = load_config(project_root / "params.yaml", preset_overrides("v1_j6m")).model
    model = MultitaskModel(config, empty_anchors(config))
    shapes = {name: value.shape for name, value in example_inputs(model).items()}
    # Public figures of the reference model: facts of the vendor's OE 3.7 table.
    assert shapes == {
        "images": (6, 3, 256, 704), "ego2img": (6, 4, 4), "point_map_feature": (10, 128, 128, 2), "point_map_depth": (10, 128, 128, 2),
        "det_anchors": (1, 384, 11), "det_features": (1, 384, 256),
    }  # fmt: skip
    assert sum(np.prod(level.cells) for level in config.occupancy.levels) == 229_376


def test_presets_have_the_same_keys_and_mini_is_the_default(project_root) -> None:
    def keys(values: object, prefix: str = "") -> set[str]:
        if not isinstance(values, dict):
            return {prefix}
        return {key for name, value in values.items() for key in keys(value, f"{prefix}.{name}")}

    mini, full = preset_overrides("mini"), preset_overrides("v1_j6m")
    assert keys(mini) == keys(full)
    assert load_config(project_root / "params.yaml", mini) == load_config(project_root / "params.yaml")


def test_weights_survive_saving_byte_for_byte(model: MultitaskModel, tmp_path) -> None:
    for name in ("first.pt", "second.pt"):
        save_model(tmp_path / name, model.config, model.state_dict(), ("map",))
    loaded = load_model(tmp_path / "first.pt")
    assert (tmp_path / "first.pt").read_bytes() == (tmp_path / "second.pt").read_bytes()
    assert loaded.trained_tasks == ("map",)
    for name, value in outputs_of(model).items():
        torch.testing.assert_close(outputs_of(loaded.model)[name], value)


def test_a_damaged_model_file_is_named(model: MultitaskModel, tmp_path) -> None:
    path = tmp_path / "model.pt"
    save_model(path, model.config, model.state_dict(), ())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.pt"):
        load_model(path)
    with pytest.raises(ModelError, match="Run the stage 'train' first"):
        load_model(tmp_path / "missing.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"view": {"cells": [129, 129]}}, "must be even"),
        ({"detection": {"feature_stride": 32}}, "must be one of neck.out_strides"),
        ({"occupancy": {"levels": [{"x_range_m": [-50, 50], "y_range_m": [-16, 16], "z_range_m": [-1, 5], "cells": [8, 8, 4]}]}}, "must lie inside"),
        ({"map": {"num_query": 200}}, "less than or equal to 128"),
        ({"image_size": [100, 352]}, "multiples of 32"),
        ({"detection": {"temporal_instances": 24}}, "must be below anchors"),
        ({"detection": {"updated_instances": 9}}, "must not exceed temporal_instances"),
        ({"map": {"sample_cameras": False, "sample_bev": False}}, "at least one of them"),
        ({"detection": {"groups": 3}}, "must divide neck.channels"),
    ],
)
def test_broken_rules_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_config_survives_json(config: ModelConfig) -> None:
    assert ModelConfig.model_validate_json(config.model_dump_json()) == config
