"""The build folder of one chip: plan.json (all that `profile` reads), memory.json and schedule.json (extracts for people), and bundle/."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import J6Config
from pipeline.errors import DataError, file_error
from pipeline.io import read_json, write_json
from pipeline.j6.bundle import export_float_model, write_bundle
from pipeline.j6.chip import ChipProfile
from pipeline.j6.compiler import CompileOptions, compile_graph
from pipeline.j6.fuse import fuse
from pipeline.j6.graph import import_onnx
from pipeline.j6.plan import Plan, plan_document, write_plan
from pipeline.paths import Paths

ANALYSIS_PREFIX = "analysis/"  # calibration.npz keeps batches as analysis/<number>/<input>


def build_chip(folder: Path, chip: ChipProfile, config: J6Config, paths: Paths) -> Plan:
    """Compile models/multitask_int8.onnx for `chip` into `folder`. Raises `ModelError`, `ChipError` or `DataError`."""
    graph = import_onnx(paths.int8_onnx)
    options = compile_options(config, read_heads(paths.contract))
    plan = compile_graph(fuse(graph, enable=config.optimize_level != "O0"), chip, options)
    write_plan(plan, folder / "plan.json")
    document = plan_document(plan)
    identity = {"simulated": True, "chip": chip.name, "profile_hash": chip.hash, "model_hash": graph.model_hash}
    write_json(folder / "memory.json", identity | document["memory"])
    write_json(folder / "schedule.json", identity | document["schedule"])
    float_graph = import_onnx(paths.onnx)
    write_bundle(folder / "bundle", graph, float_graph, chip, read_calibration(paths.calibration, float_graph.inputs), options)
    export_float_model(paths.onnx, folder / "bundle")
    return plan


def compile_options(config: J6Config, heads: Mapping[str, tuple[str, ...]]) -> CompileOptions:
    """The compiler's options of the section j6 of the parameters."""
    return CompileOptions(
        compile_mode=config.compile_mode,
        balance_factor=config.balance_factor,
        optimize_level=config.optimize_level,
        core_num=config.core_num,
        max_time_per_fc_us=config.max_time_per_fc_us,
        max_l2m_bytes=config.max_l2m_bytes,
        heads=heads,
    )


def read_heads(contract: Path) -> dict[str, tuple[str, ...]]:
    """Head name -> prefixes, from the key "heads" of models/contract.json. Raises `DataError` when it is missing or malformed."""
    content = read_json(contract)
    heads = content.get("heads") if isinstance(content, dict) else None
    if not isinstance(heads, dict) or not all(_is_text_list(prefixes) for prefixes in heads.values()):
        raise file_error(contract, "field 'heads' must map each head to a list of name prefixes")
    return {name: tuple(prefixes) for name, prefixes in heads.items()}


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def read_calibration(path: Path, inputs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Input name -> (batches, *shape) from the batches kept in calibration.npz. Raises `DataError` for a missing or damaged file."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            numbers = sorted({int(key.split("/")[1]) for key in archive.files if key.startswith(ANALYSIS_PREFIX)})
            return {name: np.stack([archive[f"{ANALYSIS_PREFIX}{number}/{name}"] for number in numbers]) for name in inputs}
    except FileNotFoundError as error:
        raise file_error(path, "file not found", "run the stage calibrate") from error
    except KeyError as error:
        raise DataError(f"{path}: no batch for {error}; calibrate again with this model") from error
    except (OSError, ValueError, IndexError) as error:
        raise file_error(path, f"not a calibration file, or cut short ({error})", "run the stage calibrate") from error
