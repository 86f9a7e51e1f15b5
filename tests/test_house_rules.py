"""Rules of docs/architecture.md that a reader cannot check by eye: import costs, function sizes, complete parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.config import Config, merge, preset_overrides

FORBIDDEN_EVERYWHERE = {"prefect"}
LAZY_ONLY = {"mlflow", "great_expectations"}
J6_ALLOWED = {"numpy", "onnx", "pydantic", "yaml", "rich"}
STANDARD_LIBRARY_AND_OWN = {"pipeline"}
MAX_FUNCTION_LINES = 80


def modules(root: Path, folder: str) -> list[Path]:
    return sorted((root / folder).rglob("*.py"))


def imported(tree: ast.AST, top_level_only: bool) -> Iterator[str]:
    nodes = tree.body if top_level_only and isinstance(tree, ast.Module) else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


def test_pipeline_never_imports_prefect_and_heavy_libraries_only_inside_functions(project_root: Path) -> None:
    broken = []
    for path in modules(project_root, "pipeline"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        broken += [f"{path}: {name}" for name in FORBIDDEN_EVERYWHERE & set(imported(tree, top_level_only=False))]
        broken += [f"{path}: {name} at top level" for name in LAZY_ONLY & set(imported(tree, top_level_only=True))]
    assert not broken


def test_hardware_model_needs_only_light_packages(project_root: Path) -> None:
    import sys

    allowed = J6_ALLOWED | STANDARD_LIBRARY_AND_OWN | set(sys.stdlib_module_names)
    broken = {
        f"{path.name}: {name}"
        for path in modules(project_root, "pipeline/j6")
        for name in imported(ast.parse(path.read_text(encoding="utf-8")), top_level_only=False)
        if name not in allowed
    }
    assert not broken


def test_functions_fit_a_screen(project_root: Path) -> None:
    long = []
    for path in modules(project_root, "pipeline") + modules(project_root, "flows"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES:
                long.append(f"{path.name}:{node.lineno} {node.name}")
    assert not long


def missing_keys(model: dict[str, object], given: object, prefix: str = "") -> Iterator[str]:
    for key, value in model.items():
        name = f"{prefix}{key}"
        if not isinstance(given, dict) or key not in given:
            yield name
        elif isinstance(value, dict):
            yield from missing_keys(value, given[key], f"{name}.")


def test_params_yaml_states_every_parameter(project_root: Path) -> None:
    """DVC sees only what stands in params.yaml: a default hidden in code would change results unseen."""
    given = yaml.safe_load((project_root / "params.yaml").read_text(encoding="utf-8"))
    config = Config.model_validate(given).model_dump(mode="json")
    assert list(missing_keys(config, given)) == []


@pytest.mark.parametrize("preset", ["mini", "v1_j6m"])
def test_presets_are_valid_and_mini_is_the_default(project_root: Path, preset: str) -> None:
    given = yaml.safe_load((project_root / "params.yaml").read_text(encoding="utf-8"))
    config = Config.model_validate(merge(given, preset_overrides(preset)))
    assert (config == Config.model_validate(given)) == (preset == "mini")
