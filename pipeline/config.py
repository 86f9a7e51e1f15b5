"""params.yaml as typed, frozen objects. Every parameter is documented here with its unit and range; every rule between fields lives here.

`load_config(Path("params.yaml"))` is the only way in. A wrong key, type, range or a broken rule raises `ConfigError` that names the file, the
field, the value and the rule. Sections are named like the stages that read them, so dvc.yaml can list them as parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import ConfigError
from pipeline.taxonomy import TASKS

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ---------------------------------------------------------------------------------------------------------------- dataset
class SyntheticConfig(Section):
    """The embedded data set (`dataset.source: synthetic`)."""

    seed: int = Field(0, ge=0, description="seed of everything random in the data set")
    train_scenes: PositiveInt = Field(64, description="scenes of the training split")
    val_scenes: PositiveInt = Field(16, description="scenes of the held-out split")
    samples_per_scene: int = Field(5, ge=2, description="key frames a scene, 0.5 s apart")
    image_width: int = Field(400, ge=64, le=1600, description="camera image width, px")
    image_height: int = Field(225, ge=36, le=900, description="camera image height, px")


class DatasetConfig(Section):
    """Which data the pipeline runs on."""

    source: Literal["synthetic", "nuscenes"] = Field("synthetic", description="generate the embedded data set, or read a nuScenes-format one")
    dataroot: str | None = Field(None, description="directory of the nuScenes-format data set; required for source nuscenes, not allowed otherwise")
    version: str = Field("v1.0-synthetic", description="name of the table directory under the dataroot")
    watch: str = Field("pipeline/dataset/synthetic", description="path whose change makes the data set out of date: the generator, or the real tables")
    val_scenes: tuple[str, ...] = Field((), description="scene names held out for evaluation; empty: the data set's own or the devkit's split")
    synthetic: SyntheticConfig = SyntheticConfig()

    @model_validator(mode="after")
    def _source_and_root(self) -> DatasetConfig:
        if (self.source == "nuscenes") != (self.dataroot is not None):
            raise ValueError(f"dataroot is {self.dataroot!r}: it must be set for source 'nuscenes' and only then (source is {self.source!r})")
        return self


# ------------------------------------------------------------------------------------------------------------- validation
class ValidationConfig(Section):
    """Rules of the validate stage."""

    sync_policy: Literal["phase", "window", "strict"] = Field("phase", description="how the time stamps of a sample are judged, docs/validation.md")
    max_jitter_ms: PositiveFloat = Field(5.0, description="phase: largest deviation of a camera from its usual phase in the lidar sweep, ms")
    fail_on: Literal["error", "warning", "never"] = Field("error", description="lowest severity that fails the stage")


# ------------------------------------------------------------------------------------------------------------------- maps
class TopologyConfig(Section):
    """Vector map labels of one sample, in the ego BEV frame (x forward, y left). Exact meaning: docs/maps.md."""

    x_range_m: tuple[float, float] = Field((-30.0, 30.0), description="BEV range along x, m")
    y_range_m: tuple[float, float] = Field((-15.0, 15.0), description="BEV range along y, m")
    points_per_line: int = Field(20, ge=2, description="points of a resampled polyline")
    polygon_corners: int = Field(4, ge=3, description="K, corners of a polygon in `polygons` [M,K,2]")
    incidence_tolerance_m: float = Field(0.1, ge=0.0, le=5.0, description="a segment this close to a polygon is incident with it, m")
    node_tolerance_m: float = Field(0.01, gt=0.0, le=1.0, description="successive nodes closer than this are one node, m")
    min_length_m: float = Field(0.2, ge=0.0, description="shorter pieces of lines, left over from clipping, are dropped, m")

    @model_validator(mode="after")
    def _ranges_ascend(self) -> TopologyConfig:
        for name, (low, high) in (("x_range_m", self.x_range_m), ("y_range_m", self.y_range_m)):
            if not low < high:
                raise ValueError(f"{name} is ({low}, {high}): the first value must be below the second")
        return self


class VectorizeConfig(Section):
    """Raster-to-vector, docs/maps.md. Lengths in pixels of the mask."""

    tolerance_px: PositiveFloat = Field(1.0, description="Douglas-Peucker tolerance, px")
    min_spur_px: PositiveFloat = Field(8.0, description="a dead end shorter than this, or than the line is wide, is a spur and is removed, px")
    max_gap_px: float = Field(12.0, ge=0.0, description="longest gap between two line ends that is bridged, px")
    min_area_px: float = Field(16.0, ge=0.0, description="areas and holes smaller than this are noise, px^2")
    raster_resolution_m: PositiveFloat = Field(0.1, description="size of a pixel of the data set's raster base map, m")
    tile_px: int = Field(2048, ge=64, le=16384, description="side of the tiles in which masks are read and traced, px")


class MapsConfig(Section):
    source: Literal["expansion", "raster"] = Field(
        "expansion", description="map labels from the map expansion, or from the vectorized raster base map where a location has no expansion"
    )
    topology: TopologyConfig = TopologyConfig()
    vectorize: VectorizeConfig = VectorizeConfig()


# ------------------------------------------------------------------------------------------------------------------ model
class ModelConfig(Section):
    """The multi-task network. Filled in by the model room."""

    tasks: tuple[Literal["detection", "map", "occupancy"], ...] = Field(TASKS, description="heads that are built and trained")
    image_size: tuple[int, int] = Field((128, 352), description="network input height and width, px")


# ------------------------------------------------------------------------------------------------------------------ train
class TrainConfig(Section):
    seed: int = Field(0, ge=0)
    steps: PositiveInt = Field(1000, description="optimizer steps")


# --------------------------------------------------------------------------------------------------------------- evaluate
class EvaluateConfig(Section):
    map_chamfer_thresholds_m: tuple[float, ...] = Field((0.5, 1.0, 1.5), description="Chamfer distances at which a map element counts as found, m")
    max_samples: int | None = Field(None, ge=1, description="evaluate only the first samples of the held-out split; null: all")


# ----------------------------------------------------------------------------------------------------------- quantization
class QuantizationConfig(Section):
    calibration_batches: PositiveInt = Field(50, description="training samples (one batch each) used for calibration")


# --------------------------------------------------------------------------------------------------------------------- j6
class J6Config(Section):
    chip: str = Field("j6m", description="chip profile: a name in pipeline/j6/chips or a path to a YAML file")


# ------------------------------------------------------------------------------------------------------------------- gate
class GateRule(Section):
    """One rule of the release gate: `metric` (report:dotted.path) compared with `limit`."""

    name: str = Field(description="what the reader sees")
    metric: str = Field(description="report and dotted path, for example eval_int8:detection.mAP or profile:latency_ms")
    op: Literal[">=", "<="] = Field(description="how value and limit compare")
    limit: float = Field(description="absolute limit, or ratio when `relative_to` is set")
    relative_to: str | None = Field(None, description="metric the value is divided by before it is compared, for example eval_float:detection.mAP")
    severity: Literal["error", "warning"] = Field("error", description="only errors fail the gate")


class GateConfig(Section):
    rules: tuple[GateRule, ...] = ()


# --------------------------------------------------------------------------------------------------------------- tracking
class TrackingConfig(Section):
    experiment: str = Field("bevj6", min_length=1, description="MLflow experiment")
    registered_model: str = Field("bev-multitask", min_length=1, description="registered model; the chip name is appended: bev-multitask-j6m")


# -------------------------------------------------------------------------------------------------------------- execution
class ExecutionConfig(Section):
    workers: PositiveInt = Field(2, description="processes for work over scenes")


class Config(Section):
    """All of params.yaml."""

    dataset: DatasetConfig = DatasetConfig()
    validation: ValidationConfig = ValidationConfig()
    maps: MapsConfig = MapsConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    quantization: QuantizationConfig = QuantizationConfig()
    j6: J6Config = J6Config()
    gate: GateConfig = GateConfig()
    tracking: TrackingConfig = TrackingConfig()
    execution: ExecutionConfig = ExecutionConfig()


def load_config(path: Path, overrides: dict[str, Any] | None = None) -> Config:
    """Read and check a parameter file.

    Args:
        path: YAML file with the sections of `Config`.
        overrides: nested mapping merged over the file (a preset, or a test's changes).

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, a value has the wrong type or range, or a rule between fields is broken.
    """
    values = merge(_read_yaml(path), overrides or {})
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from None


def merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`base` with `overrides` merged in, mapping by mapping; lists and scalars are replaced."""
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def preset_overrides(name: str) -> dict[str, Any]:
    """The values of a preset in pipeline/presets, to be merged over params.yaml."""
    folder = Path(__file__).parent / "presets"
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"preset {name!r}: unknown; known presets: {', '.join(known)}")
    return _read_yaml(folder / f"{name}.yaml")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: file not found") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a mapping of sections, got {type(values).__name__}")
    return values


def _explain(path: Path, error: ValidationError) -> str:
    """One line per problem: file, field, value and rule."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or "(file)"
        rule = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"]
        value = "" if isinstance(problem["input"], dict | BaseModel) else f" = {problem['input']!r}"
        lines.append(f"{path}: {field}{value}: {rule}")
    return "\n".join(lines)
