"""The documented fields of the vendor's hb_compile YAML and of quant_config, as a check that a bundle passes before it is written.

Source: OE-Skills @0c35b733, horizon_tc_ui references/yaml (groups, fields, ranges) and hmct skills (quant_config). A field that is not listed there,
or a value outside the documented choice or range, is refused: the toolchain ignores some mistakes silently (no cal_data_dir: no calibration).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pipeline.errors import ConfigError

Rule = tuple[Callable[[Any], bool], str]

MARCHES = ("nash-b", "nash-b-lite", "nash-b-plus", "nash-e", "nash-m", "nash-h", "nash-p")
INPUT_TYPES = ("nv12", "yuv444", "rgb", "bgr", "gray", "featuremap")
QTYPES = ("int8", "int16", "float16", "dual-int16")
INPUT_QTYPES = ("int8", "int16", "float16")
MAX_L2M_BYTES = 25165824
SEGMENT_US = (1000, 10_000_000)


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _one_of(*choices: object) -> Rule:
    return (lambda value: value in choices), f"one of {', '.join(map(str, choices))}"


def _list_of(choices: Collection[str]) -> Rule:
    return (lambda value: _text(value) and all(part in choices for part in value.split(";"))), f"';'-separated: {', '.join(choices)}"


def _whole(low: int, high: int) -> Rule:
    return (lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high), f"a whole number {low}..{high}"


TEXT: Rule = (_text, "text")
FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
SHAPES: Rule = (
    lambda value: _text(value) and all(size.isdigit() and int(size) > 0 for part in value.split(";") for size in part.split("x")),
    "';'-separated shapes such as 1x3x224x224",
)

FIELDS: Mapping[str, Mapping[str, Rule]] = {
    "model_parameters": {
        "onnx_model": TEXT,
        "march": _one_of(*MARCHES),
        "working_dir": TEXT,
        "output_model_file_prefix": TEXT,
        "output_nodes": TEXT,
        "remove_node_type": _list_of(("Quantize", "Transpose", "Dequantize", "Cast", "Reshape", "Softmax")),
        "remove_node_name": TEXT,
        "debug_mode": _one_of("dump_calibration_data"),
        "enable_vpu": FLAG,
        "enable_spu": FLAG,
    },
    "input_parameters": {
        "input_name": TEXT,
        "input_type_rt": _list_of(INPUT_TYPES),
        "input_type_train": _list_of(INPUT_TYPES),
        "input_layout_train": _list_of(("NCHW", "NHWC")),
        "input_space_and_range": _list_of(("regular", "bt601_video")),
        "input_shape": SHAPES,
        "input_batch": _whole(1, 4096),
        "separate_batch": FLAG,
        "separate_name": TEXT,
        "mean_value": TEXT,
        "scale_value": TEXT,
        "std_value": TEXT,
    },
    "calibration_parameters": {
        "cal_data_dir": TEXT,
        "calibration_type": _one_of("kl", "max", "skip"),
        "per_channel": FLAG,
        "max_percentile": (lambda value: isinstance(value, float) and 0 <= value <= 1, "0..1"),
        "run_on_cpu": TEXT,
        "run_on_bpu": TEXT,
        "optimization": TEXT,
        "quant_config": TEXT,
    },
    "compiler_parameters": {
        "compile_mode": _one_of("latency", "bandwidth", "balance"),
        "balance_factor": _whole(0, 100),
        "optimize_level": _one_of("O0", "O1", "O2"),
        "core_num": _whole(1, 4),
        "max_time_per_fc": (lambda value: value == 0 or SEGMENT_US[0] <= value <= SEGMENT_US[1], f"0, or {SEGMENT_US[0]}..{SEGMENT_US[1]} us"),
        "jobs": _whole(1, 256),
        "advice": _whole(0, 1),
        "debug": FLAG,
        "cache_mode": TEXT,
        "cache_path": TEXT,
        "max_l2m_size": _whole(0, MAX_L2M_BYTES),
    },
}
REQUIRED = {
    "model_parameters": ("onnx_model", "march", "working_dir", "output_model_file_prefix"),
    "input_parameters": ("input_name", "input_shape", "input_type_rt", "input_type_train"),
    "calibration_parameters": ("cal_data_dir",),
    "compiler_parameters": ("compile_mode", "optimize_level"),
}
SINGLE_CORE_MARCHES = ("nash-b", "nash-b-lite", "nash-b-plus", "nash-e", "nash-m")  # no L2M, core_num 1


def check_hb_compile(document: Mapping[str, Any]) -> None:
    """Raises `ConfigError` naming group, field, value and rule for anything that the documentation does not allow."""
    for group in {*document, *FIELDS}:
        if group not in FIELDS or group not in document:
            raise ConfigError(f"hb_compile.yaml: group {group!r} is {'missing' if group in FIELDS else 'unknown'}")
        missing = [name for name in REQUIRED[group] if name not in document[group]]
        if missing:
            raise ConfigError(f"hb_compile.yaml: {group}.{missing[0]} is missing")
        for name, value in document[group].items():
            _check_field(group, name, value)
    _check_inputs(document["input_parameters"], document["calibration_parameters"])
    _check_cores(document["model_parameters"]["march"], document["compiler_parameters"])


def _check_field(group: str, name: str, value: Any) -> None:
    if name not in FIELDS[group]:
        raise ConfigError(f"hb_compile.yaml: {group}.{name} is no documented field")
    valid, rule = FIELDS[group][name]
    if not valid(value):
        raise ConfigError(f"hb_compile.yaml: {group}.{name} is {value!r}; rule: {rule}")


def _check_inputs(inputs: Mapping[str, Any], calibration: Mapping[str, Any]) -> None:
    """Lists that go by input have one entry each; a feature map takes neither mean nor scale."""
    count = len(inputs["input_name"].split(";"))
    lists = {name: inputs[name] for name in ("input_shape", "input_type_rt", "input_type_train", "input_layout_train") if name in inputs}
    for name, value in {**lists, "cal_data_dir": calibration["cal_data_dir"]}.items():
        if len(value.split(";")) != count:
            raise ConfigError(f"hb_compile.yaml: {name} has {len(value.split(';'))} entries; rule: one for each of the {count} inputs")
    if "featuremap" in inputs["input_type_train"].split(";") and {"mean_value", "scale_value", "std_value"} & set(inputs):
        raise ConfigError("hb_compile.yaml: a featuremap input takes no mean, scale or std value")


def _check_cores(march: str, compiler: Mapping[str, Any]) -> None:
    if march in SINGLE_CORE_MARCHES and compiler.get("core_num", 1) != 1:
        raise ConfigError(f"hb_compile.yaml: compiler_parameters.core_num is {compiler['core_num']}; {march} has one core")
    if march in SINGLE_CORE_MARCHES and compiler.get("max_l2m_size"):
        raise ConfigError(f"hb_compile.yaml: compiler_parameters.max_l2m_size is set; {march} has no L2M")


def check_quant_config(document: Mapping[str, Any], nodes: Mapping[str, int]) -> None:
    """Raises `ConfigError` for an undocumented key or value, or an unknown node; `nodes`: name in the float model -> number of inputs."""
    unknown = set(document) - {"model_config", "op_config", "node_config"}
    if unknown:
        raise ConfigError(f"quant_config.json: {sorted(unknown)[0]!r} is no documented key")
    base = document.get("model_config", {}).get("all_node_type", "int8")
    if base not in ("int8", "int16", "float16"):
        raise ConfigError(f"quant_config.json: model_config.all_node_type is {base!r}; rule: int8, int16 or float16")
    for name, entry in document.get("node_config", {}).items():
        if name not in nodes:
            raise ConfigError(f"quant_config.json: node_config names {name!r}, which the float model does not have")
        for key, value in entry.items():
            _check_node(name, key, value, nodes[name])


def _check_node(name: str, key: str, value: Any, inputs: int) -> None:
    if key == "qtype" and value in QTYPES:
        return
    index = key.removeprefix("input")
    if key.startswith("input") and index.isdigit() and int(index) < inputs and value in INPUT_QTYPES:
        return
    rule = f"qtype, or input0..input{inputs - 1}, with {', '.join(QTYPES)}"
    raise ConfigError(f"quant_config.json: node_config[{name!r}] has {key}: {value!r}; rule: {rule}")
