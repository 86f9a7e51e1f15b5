"""The bundle for the vendor's real toolchain: hb_compile YAML, calibration data as .npy, per-node quantization config, and the exact commands.

Field names follow the public description of hb_compile's YAML groups; `hb_schema.py` checks what is written against it. Calibration data is
written exactly as the network wants it, already normalised: the toolchain takes unnormalised data without complaint and compiles noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml

from pipeline.errors import DataError
from pipeline.io import write_json
from pipeline.j6.chip import ChipProfile
from pipeline.j6.compiler import CompileOptions
from pipeline.j6.hb_schema import check_hb_compile, check_quant_config
from pipeline.j6.ir import VIEW_KINDS, Graph

PREFIX = "multitask"
MAX_IR_VERSION = 9
MAX_SAFE_INPUT = 64.0  # a normalised image stays within a few units; raw pixels reach 255


def calibration_folder(name: str) -> str:
    """Folder of one input's calibration data, relative to the bundle."""
    return f"calibration/{name}"


def hb_compile_config(graph: Graph, chip: ChipProfile, options: CompileOptions) -> dict[str, Any]:
    """The YAML document. Every input is a feature map because the graph takes images already normalised."""
    names = list(graph.inputs)
    shapes = ["x".join(map(str, graph.tensors[name].shape)) for name in names]
    return {
        "model_parameters": {
            "onnx_model": f"./{PREFIX}.onnx",
            "march": chip.march,
            "working_dir": "./model_output",
            "output_model_file_prefix": PREFIX,
        },
        "input_parameters": {
            "input_name": ";".join(names),
            "input_shape": ";".join(shapes),
            "input_type_rt": ";".join("featuremap" for _ in names),
            "input_type_train": ";".join("featuremap" for _ in names),
            "input_layout_train": ";".join("NCHW" for _ in names),
        },
        "calibration_parameters": {
            "cal_data_dir": ";".join(f"./{calibration_folder(name)}" for name in names),
            "calibration_type": "max",
            "per_channel": True,
            "quant_config": "./quant_config.json",
        },
        "compiler_parameters": compiler_parameters(chip, options),
    }


def compiler_parameters(chip: ChipProfile, options: CompileOptions) -> dict[str, Any]:
    """The same choices for the vendor's compiler as for ours; debug gives the per-layer report."""
    values: dict[str, Any] = {
        "compile_mode": options.compile_mode,
        "optimize_level": options.optimize_level,
        "core_num": options.core_num,
        "max_time_per_fc": int(options.max_time_per_fc_us),
        "jobs": 4,
        "debug": True,
    }
    if options.compile_mode == "balance":
        values["balance_factor"] = options.balance_factor
    if chip.number("l2m_bytes") and options.max_l2m_bytes is not None:
        values["max_l2m_size"] = options.max_l2m_bytes
    return values


def quant_config(quantized: Graph, float_graph: Graph) -> dict[str, Any]:
    """Precision by node and input in the toolchain's quant_config form: int8, and int16 for every input that is int16 in our INT8 model.

    Nodes carry their names in `float_graph`, the model that the toolchain quantizes; conversions that only our INT8 model has are left out.
    """
    known = {op.name for op in float_graph.ops}
    nodes = {}
    for op in quantized.ops:
        wide = {f"input{i}": "int16" for i, name in enumerate(op.operands) if quantized.tensors[name].dtype == "int16"}
        if wide and op.name in known and op.kind not in VIEW_KINDS:
            nodes[op.name] = wide
    return {"model_config": {"all_node_type": "int8"}, "node_config": dict(sorted(nodes.items()))}


def commands(chip: ChipProfile) -> str:
    """Shell commands in the order a user runs them."""
    lines = [
        "#!/bin/sh",
        "# Run in this folder, inside the vendor's OpenExplorer container.",
        "set -e",
        "# 1. operators the chip accepts",
        f"hb_compile -m {PREFIX}.onnx --march {chip.march}",
        "# 2. quantize, compile, static performance (html and json)",
        "hb_compile -c hb_compile.yaml",
        f"# 3. copy model_output/{PREFIX}.hbm to the board and run there",
        f"# hrt_model_exec model_info --model_file {PREFIX}.hbm",
        f"# hrt_model_exec perf --model_file {PREFIX}.hbm --thread_num 1 --frame_count 200",
        f"# hrt_model_exec perf --model_file {PREFIX}.hbm --thread_num 2 --frame_count 200",
    ]
    return "\n".join(lines) + "\n"


def check_calibration(graph: Graph, samples: Mapping[str, np.ndarray]) -> None:
    """Refuse calibration data that the toolchain would accept silently. `samples`: input name -> (N, *input shape).

    Raises `DataError` naming input, value and rule.
    """
    for name in graph.inputs:
        if name not in samples:
            raise DataError(f"calibration data: input {name!r} is missing; one folder per input is required")
        array, shape = samples[name], graph.tensors[name].shape
        if array.shape[1:] != shape:
            raise DataError(f"calibration data: input {name!r} has shape {array.shape[1:]}, the model wants {shape}")
        if not np.isfinite(array).all():
            raise DataError(f"calibration data: input {name!r} holds NaN or infinity")
        image = len(shape) == 4 and shape[1] == 3
        if image and float(np.abs(array).max()) > MAX_SAFE_INPUT:
            raise DataError(
                f"calibration data: input {name!r} reaches {np.abs(array).max():.0f}; "
                f"images must be normalised as in training (at most {MAX_SAFE_INPUT:.0f})"
            )


def write_bundle(
    folder: Path, quantized: Graph, float_graph: Graph, chip: ChipProfile, samples: Mapping[str, np.ndarray], options: CompileOptions
) -> None:
    """Write hb_compile.yaml, quant_config.json, commands.sh and calibration/<input>/<number>.npy.

    `quantized` says which inputs are int16; `float_graph` is the model that the toolchain quantizes with `samples` (input name -> (N, *shape)).
    Raises `ConfigError` for options that the toolchain does not document, `DataError` for calibration data it would swallow.
    """
    check_calibration(float_graph, samples)
    document, precision = hb_compile_config(float_graph, chip, options), quant_config(quantized, float_graph)
    check_hb_compile(document)
    check_quant_config(precision, {op.name: len(op.operands) for op in float_graph.ops})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hb_compile.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    write_json(folder / "quant_config.json", precision)
    (folder / "commands.sh").write_text(commands(chip), encoding="utf-8")
    _write_samples(folder, float_graph, samples)


def export_float_model(source: Path, folder: Path) -> None:
    """Copy the float ONNX model into the bundle with an IR version that the toolchain accepts (at most 9, seen in a user's refusal)."""
    model = onnx.load(str(source))
    model.ir_version = min(model.ir_version, MAX_IR_VERSION)
    onnx.save(model, str(folder / f"{PREFIX}.onnx"))


def _write_samples(folder: Path, graph: Graph, samples: Mapping[str, np.ndarray]) -> None:
    for name in graph.inputs:
        target = folder / calibration_folder(name)
        target.mkdir(parents=True, exist_ok=True)
        for number, array in enumerate(samples[name]):
            np.save(target / f"{number:04d}.npy", array.astype(np.float32), allow_pickle=False)
