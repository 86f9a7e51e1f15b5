"""Writing a preset over params.yaml so that its comments and order stay."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from pipeline.config import load_config, preset_overrides
from pipeline.io import write_text


def write_preset(params: Path, name: str) -> dict[str, list[Any]]:
    """Replace the values of preset `name` in the file `params`. Returns {dotted field: [old, new]} of what changed.

    Raises:
        ConfigError: the preset is unknown, or the file is not valid before or after; it is then left as it was.
    """
    overrides = preset_overrides(name)
    load_config(params, overrides)
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1000  # never fold a line
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(params.read_text(encoding="utf-8"))
    changes = _apply(document, overrides, "")
    if changes:
        stream = io.StringIO()
        yaml.dump(document, stream)
        write_text(params, stream.getvalue())
    return changes


def _apply(target: CommentedMap, values: dict[str, Any], prefix: str) -> dict[str, list[Any]]:
    changes: dict[str, list[Any]] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            if not isinstance(target.get(key), dict):
                target[key] = CommentedMap()
            changes |= _apply(target[key], value, f"{prefix}{key}.")
        elif key not in target or target[key] != value:
            changes[f"{prefix}{key}"] = [_plain(target.get(key)), value]
            target[key] = _like(target.get(key), value)
    return changes


def _like(old: Any, new: Any) -> Any:
    """A list is written on one line unless the one it replaces is not; a sequence of mappings always one a line."""
    if not isinstance(new, list):
        return new
    sequence = CommentedSeq(new)
    one_line = old.fa.flow_style() if isinstance(old, CommentedSeq) else True
    if one_line and not any(isinstance(item, dict) for item in new):
        sequence.fa.set_flow_style()
    return sequence


def _plain(value: Any) -> Any:
    """A value without the types of ruamel.yaml, for JSON."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
