"""A registered version on another chip: simulated latency, bandwidth and memory of its INT8 model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.j6.cli import profile_command
from pipeline.paths import Paths
from pipeline.tracking.registry import registered_files


def profile_registered(paths: Paths, config: Config, version: int | str, chip: str) -> dict[str, Any]:
    """The profile (as reports/profile.json) of a registered version on `chip`, a name or a profile file; conditions as in `config.j6`.

    Returns:
        The profile with `registered_model`, `registered_version`, and `logged_latency_ms`, the simulated latency on the chip it was registered for.

    Raises:
        DataError: no such version, or something stored with it was changed.
        ChipError, ConfigError: no such chip, or its numbers do not do.
        ServiceError: MLflow is away or refuses.
    """
    scenario = Path(config.j6.scenario) if config.j6.scenario else None
    with registered_files(paths, config, version) as (target, folder):
        document = profile_command(folder / "model.onnx", chip, scenario=scenario, design_fps=config.j6.design_fps)
    origin = {"registered_model": target.name, "registered_version": int(target.version), "logged_latency_ms": float(target.tags["bevj6.latency_ms"])}
    return {**document, **origin}
