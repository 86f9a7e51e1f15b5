"""Errors a user can act on.

Every message names the file, the field, the value and the rule that was broken. Stage mains and the command line print the message without a
traceback and exit with a non-zero status; anything that is not a `BevError` is a defect of this program and keeps its traceback.
"""

from __future__ import annotations

from pathlib import Path


class BevError(Exception):
    """Base of all errors caused by input, configuration or environment."""


class ConfigError(BevError):
    """params.yaml (or an override) breaks a rule."""


class DataError(BevError):
    """A data set file is missing, unreadable or contradicts another one."""


class ModelError(BevError):
    """A model file cannot be read, built, exported or quantized."""


class ChipError(BevError):
    """A chip profile is unknown or lacks a number that is needed."""


class ServiceError(BevError):
    """A server (MLflow, Prefect, object store) cannot be reached or refuses."""


def file_error(path: Path | str, problem: str, hint: str = "") -> DataError:
    """A `DataError` that starts with the file: "<path>: <problem>. <hint>"."""
    text = f"{path}: {problem}"
    return DataError(f"{text}. {hint}" if hint else text)
