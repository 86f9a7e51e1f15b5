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
METRIC_PATTERN = r"^[a-z0-9_]+:[^\s:*]+$"  # report:dotted.path
WILDCARD_METRIC_PATTERN = r"^[a-z0-9_]+:[^\s:*]+(\.\*(\.[^\s:*]+)?)?$"  # the same; one part of the path may be *
AGAINST_CHAMPION = "champion"


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ---------------------------------------------------------------------------------------------------------------- dataset
class SyntheticConfig(Section):
    """The embedded data set (`dataset.source: synthetic`)."""

    seed: int = Field(0, ge=0, description="seed of everything random in the data set")
    train_scenes: PositiveInt = Field(126, description="scenes of the training split")
    val_scenes: PositiveInt = Field(24, description="scenes of the held-out split")
    samples_per_scene: int = Field(2, ge=2, description="key frames a scene, 0.5 s apart")
    image_width: int = Field(352, ge=64, le=1600, description="camera image width, px")
    image_height: int = Field(198, ge=36, le=900, description="camera image height, px")
    traffic_radius_m: float = Field(
        28.0, ge=15.0, le=60.0, description="traffic is placed this near to the ego vehicle, m; images this small show little of what is farther"
    )
    jpeg_quality: int = Field(90, ge=50, le=100, description="JPEG quality of the camera images")
    lidar_azimuth_steps: int = Field(720, ge=90, le=2160, description="lidar returns a turn and beam (32 beams); the real sensor has 1084")


class DatasetConfig(Section):
    """Which data the pipeline runs on."""

    source: Literal["synthetic", "nuscenes"] = Field("synthetic", description="generate the embedded data set, or read a nuScenes-format one")
    dataroot: str | None = Field(None, description="directory of the nuScenes-format data set; required for source nuscenes, not allowed otherwise")
    version: str = Field("v1.0-synthetic", description="name of the table directory under the dataroot")
    pairs: Literal["previous", "none"] = Field(
        "previous", description="what detection remembers: the sample before in the scene, or nothing (samples that do not follow each other)"
    )
    watch: str = Field("pipeline/dataset/synthetic", description="path whose change outdates the data set: the generator, or the real tables")
    val_scenes: tuple[str, ...] = Field((), description="scene names held out for evaluation; empty: the data set's own or the devkit's split")
    synthetic: SyntheticConfig = SyntheticConfig()

    @model_validator(mode="after")
    def _source_and_root(self) -> DatasetConfig:
        if (self.source == "nuscenes") != (self.dataroot is not None):
            raise ValueError(f"dataroot is {self.dataroot!r}: it must be set for source 'nuscenes' and only then (source is {self.source!r})")
        if self.source == "synthetic" and self.version != "v1.0-synthetic":
            raise ValueError(f"version is {self.version!r}: the embedded data set is v1.0-synthetic (or set source 'nuscenes' and dataroot)")
        return self


# ------------------------------------------------------------------------------------------------------------- validation
class ValidationConfig(Section):
    """Rules of the validate stage."""

    sync_policy: Literal["phase", "window", "strict"] = Field("phase", description="how the time stamps of a sample are judged, docs/validation.md")
    max_jitter_ms: PositiveFloat = Field(5.0, description="phase: largest deviation of a camera from its usual phase in the lidar sweep, ms")
    max_wait_ms: PositiveFloat = Field(50.0, description="window: largest time between a camera image and the lidar key frame, ms")
    max_spread_ms: PositiveFloat = Field(5.0, description="strict: largest time between the first and the last camera image of a sample, ms")
    max_pose_age_ms: PositiveFloat = Field(20.0, description="largest time between a frame and the ego pose that places it, ms")
    max_motion_error_m: PositiveFloat = Field(0.5, description="largest distance of a frame's pose from the trajectory at its time, m")
    max_rig_rotation_deg: PositiveFloat = Field(5.0, description="largest rotation from the usual extrinsics of the same channel, degrees")
    max_rig_position_m: PositiveFloat = Field(0.15, description="largest distance from the usual position of the same channel, m")
    max_speed_mps: PositiveFloat = Field(45.0, description="largest plausible speed of an annotated object, m/s")
    max_acceleration_mps2: PositiveFloat = Field(20.0, description="largest plausible change of an annotated velocity, m/s^2")
    min_lidar_points: PositiveInt = Field(500, description="fewest returns of a plausible lidar sweep")
    projection_samples: PositiveInt = Field(200, description="samples whose lidar points are counted in their boxes, evenly spread")
    edge_samples: PositiveInt = Field(24, description="samples of a vehicle whose lidar edges are compared with image edges, evenly spread")
    min_edge_agreement: PositiveFloat = Field(
        3.5, description="least agreement of lidar depth edges with image edges, standard deviations above that of shifted ones"
    )
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
    min_spur_px: PositiveFloat = Field(8.0, description="a dead end that reaches less far beyond the edge of its line is a spur and is removed, px")
    max_gap_px: float = Field(14.0, ge=0.0, description="longest gap between two line ends that is bridged, px")
    noise_px: int = Field(4, ge=0, description="specks and holes that fit into a square of this size are noise, px; 0 keeps all")
    min_area_px: float = Field(16.0, ge=0.0, description="areas and holes smaller than this are noise, px^2")
    raster_resolution_m: PositiveFloat = Field(0.1, description="size of a pixel of the data set's raster base map, m")
    tile_px: int = Field(2048, ge=64, le=16384, description="side of the tiles in which masks are read and traced, px")


class MapsConfig(Section):
    """Map labels of the samples and raster-to-vector."""

    source: Literal["expansion", "raster"] = Field(
        "expansion", description="map labels from the map expansion, or from the vectorized raster base map where a location has no expansion"
    )
    topology: TopologyConfig = TopologyConfig()
    vectorize: VectorizeConfig = VectorizeConfig()


# ------------------------------------------------------------------------------------------------------------------ model
Range = tuple[float, float]


class BackboneConfig(Section):
    """HENet: four stages at strides 4, 8, 16, 32."""

    depths: tuple[PositiveInt, ...] = Field((1, 2, 3, 2), min_length=4, max_length=4, description="blocks of the four stages")
    widths: tuple[PositiveInt, ...] = Field((32, 64, 96, 160), min_length=4, max_length=4, description="channels of the four stages")
    blocks: tuple[Literal["DWCB", "GroupDWCB", "AltDWCB"], ...] = Field(
        ("DWCB", "DWCB", "AltDWCB", "DWCB"), min_length=4, max_length=4, description="kind of block of the four stages"
    )
    mlp_ratios: tuple[PositiveInt, ...] = Field((2, 2, 2, 2), min_length=4, max_length=4, description="hidden channels of a block / its channels")


class NeckConfig(Section):
    """MMFPN: all levels get the same channels and are fused by scaled addition."""

    channels: int = Field(64, ge=16, multiple_of=16, description="channels of every output level")
    out_strides: tuple[Literal[4, 8, 16, 32], ...] = Field((4, 8), min_length=1, description="strides of the image features that heads may use")


class ViewConfig(Section):
    """LSS view transform on precomputed point maps and the BEV encoder."""

    feature_stride: Literal[4, 8, 16, 32] = Field(4, description="stride of the image feature that is lifted; must be in model.neck.out_strides")
    depth_stride: Literal[4, 8, 16, 32] = Field(8, description="stride of the depth distribution; must be in model.neck.out_strides")
    x_range_m: Range = Field((-40.0, 40.0), description="BEV grid along x (forward), m")
    y_range_m: Range = Field((-40.0, 40.0), description="BEV grid along y (left), m")
    cells: tuple[int, int] = Field((80, 80), description="cells along y and x; even numbers, the chip refuses odd maps such as 129x129")
    heights_m: tuple[float, ...] = Field(
        (0.0, 0.6, 1.4, 2.6), min_length=1, description="heights over ground at which a cell samples the images, m; the first is the ground"
    )
    cameras_per_point: int = Field(1, ge=1, le=2, description="cameras that may contribute to one point; points maps hold heights x cameras")
    depth_range_m: Range = Field((1.0, 64.0), description="depths of the first and last bin, m; bins are spaced by equal ratios")
    depth_bins: int = Field(32, ge=2, le=256, description="bins of the depth distribution")
    lift_channels: int = Field(32, ge=8, multiple_of=8, description="channels of the lifted image feature")
    channels: int = Field(64, ge=16, multiple_of=16, description="channels of the BEV feature")
    encoder_depth: int = Field(2, ge=1, description="blocks of the BEV encoder at half of the grid's resolution; half as many at the full one")
    task_depth: int = Field(2, ge=0, description="blocks of its own that each head has on the BEV feature; 0: all heads read the shared one")

    @model_validator(mode="after")
    def _grid(self) -> ViewConfig:
        for name in ("x_range_m", "y_range_m", "depth_range_m"):
            low, high = getattr(self, name)
            if low >= high:
                raise ValueError(f"{name} is {low, high}: the first value must be below the second")
        if any(cells % 2 or cells < 2 for cells in self.cells):
            raise ValueError(f"cells is {self.cells}: both must be even (the chip aligns BEV maps; 129x129 would be padded by a row and a column)")
        return self


class DetectionConfig(Section):
    """Sparse4D kind of detection head and its temporal instance bank."""

    feature_stride: Literal[4, 8, 16, 32] = Field(8, description="stride of the image feature it samples; must be in model.neck.out_strides")
    anchors: int = Field(256, ge=1, le=1024, description="instances N: fixed anchors plus temporal slots")
    temporal_instances: int = Field(48, ge=0, description="slots of N that hold instances of earlier frames (fixed anchors while the bank is empty)")
    updated_instances: int = Field(24, ge=0, description="most confident temporal instances, rewritten each frame; the others are only cached")
    max_misses: int = Field(3, ge=1, description="frames without a confident update after which a temporal instance is dropped")
    layers: int = Field(2, ge=1, le=6, description="decoder layers, each followed by a refinement")
    key_points: int = Field(9, ge=1, le=32, description="points an instance samples")
    groups: int = Field(4, ge=1, description="channel groups with their own sampling weights")
    sample_bev: bool = Field(True, description="key points sample the BEV feature as well as the images")
    velocity_refinement: bool = Field(True, description="the block that refines velocities; off for thermal fail-safe")
    score_threshold: Fraction = Field(0.02, description="boxes below this confidence are not reported")
    max_boxes: PositiveInt = Field(200, description="most boxes reported for a sample")
    nms_radius_m: tuple[float, ...] = Field(
        (2.5, 4.0, 5.0, 5.0, 5.0, 2.0, 2.0, 2.0, 1.5, 2.0), min_length=10, max_length=10,
        description="of boxes of one class closer than this only the best is kept, m, by detection class; 0: keep all",
    )  # fmt: skip

    @model_validator(mode="after")
    def _slots(self) -> DetectionConfig:
        if self.temporal_instances >= self.anchors:
            raise ValueError(f"temporal_instances is {self.temporal_instances}: must be below anchors ({self.anchors})")
        if self.updated_instances > self.temporal_instances:
            raise ValueError(f"updated_instances is {self.updated_instances}: must not exceed temporal_instances ({self.temporal_instances})")
        return self


class MapConfig(Section):
    """MapTR kind of map head with spline queries."""

    feature_stride: Literal[4, 8, 16, 32] = Field(8, description="stride of the image feature it samples; must be in model.neck.out_strides")
    num_query: int = Field(80, ge=1, le=128, description="map instances; the chip plan reserves 128")
    layers: int = Field(3, ge=1, le=6, description="decoder layers, each followed by a refinement")
    spline_degree: int = Field(1, ge=1, le=3, description="degree of the B-spline of the six control points; 1: a polyline through them")
    sample_points: int = Field(11, ge=6, le=32, description="points along the line that sample features")
    sample_cameras: bool = Field(False, description="points sample the image features")
    sample_bev: bool = Field(True, description="points sample the BEV feature")
    score_threshold: Fraction = Field(0.02, description="elements below this confidence are not reported")
    nms_distance_m: float = Field(
        1.5, ge=0.0, description="of elements of one class closer than this Chamfer distance only the best is kept, m; 0: keep all"
    )

    @model_validator(mode="after")
    def _samples_something(self) -> MapConfig:
        if not (self.sample_cameras or self.sample_bev):
            raise ValueError("sample_cameras and sample_bev are both false: the points must sample at least one of them")
        return self


class OccupancyLevel(Section):
    """One grid of the occupancy head."""

    x_range_m: Range
    y_range_m: Range
    z_range_m: Range
    cells: tuple[PositiveInt, PositiveInt, PositiveInt] = Field(description="voxels along x, y, z")


class OccupancyConfig(Section):
    """Channel-to-height occupancy: each level is read from the BEV feature by a fixed resampling; one level is the single-level variant."""

    levels: tuple[OccupancyLevel, ...] = Field(
        (OccupancyLevel(x_range_m=(-40.0, 40.0), y_range_m=(-40.0, 40.0), z_range_m=(-1.0, 5.4), cells=(80, 80, 16)),),
        min_length=1, description="grids from the widest to the finest",
    )  # fmt: skip
    channels: int = Field(48, ge=16, multiple_of=16, description="hidden channels")


class ModelConfig(Section):
    """The multi-task network."""

    tasks: tuple[Literal["detection", "map", "occupancy"], ...] = Field(TASKS, min_length=1, description="heads that are built and trained")
    image_size: tuple[int, int] = Field((128, 352), description="network input height and width, px; multiples of 32")
    backbone: BackboneConfig = BackboneConfig()
    neck: NeckConfig = NeckConfig()
    view: ViewConfig = ViewConfig()
    detection: DetectionConfig = DetectionConfig()
    map: MapConfig = MapConfig()
    occupancy: OccupancyConfig = OccupancyConfig()

    @model_validator(mode="after")
    def _rules(self) -> ModelConfig:
        if any(side <= 0 or side % 32 for side in self.image_size):
            raise ValueError(f"image_size is {self.image_size}: height and width must be multiples of 32, the coarsest stride of the backbone")
        strides = {f"{name}.feature_stride": getattr(self, name).feature_stride for name in ("view", "detection", "map")}
        for name, stride in {**strides, "view.depth_stride": self.view.depth_stride}.items():
            if stride not in self.neck.out_strides:
                raise ValueError(f"{name} is {stride}: must be one of neck.out_strides {self.neck.out_strides}")
        if self.neck.channels % self.detection.groups:
            raise ValueError(f"detection.groups is {self.detection.groups}: must divide neck.channels ({self.neck.channels})")
        self._check_occupancy_inside_bev()
        return self

    def _check_occupancy_inside_bev(self) -> None:
        for number, level in enumerate(self.occupancy.levels):
            for axis in ("x_range_m", "y_range_m"):
                low, high = getattr(level, axis)
                bev_low, bev_high = getattr(self.view, axis)
                if low < bev_low or high > bev_high or low >= high:
                    raise ValueError(f"occupancy.levels[{number}].{axis} is {low, high}: must lie inside view.{axis} {bev_low, bev_high}")


# ------------------------------------------------------------------------------------------------------------------ train
class AugmentationConfig(Section):
    """Changes of a training sample; labels, velocities, cameras and point maps change together."""

    rotation_deg: float = Field(15.0, ge=0.0, le=45.0, description="BEV rotation, drawn evenly from plus or minus this, degrees")
    flip_probability: Fraction = Field(0.5, description="mirror the scene left to right")
    photometric: Fraction = Field(0.2, description="strength of brightness, contrast and colour changes")


class AuxiliaryConfig(Section):
    """Weights of dense losses that exist in training only."""

    depth: float = Field(1.0, ge=0.0, description="lidar depth on the depth distribution")
    image_boxes: float = Field(1.5, ge=0.0, description="class heat map of projected boxes on the image feature")
    bev_boxes: float = Field(1.5, ge=0.0, description="detection head's dense field: heat map of box centres, way to the nearest box and its shape")
    image_surface: float = Field(1.0, ge=0.0, description="occupancy class of the surface a lidar point hit, on the image feature")
    image_lines: float = Field(1.0, ge=0.0, description="map elements drawn on the image feature")
    bev_lines: float = Field(1.5, ge=0.0, description="the map head's dense field: elements drawn on the BEV grid and the way to them")


class BalanceConfig(Section):
    """How the losses of the tasks are weighted against each other."""

    method: Literal["gradient_norm", "fixed"] = Field("fixed", description="equal gradient norms on the shared feature, or fixed weights")
    initial: dict[Literal["detection", "map", "occupancy"], PositiveFloat] = Field(
        {"detection": 1.0, "map": 1.0, "occupancy": 1.0}, description="weights at the start (fixed: for good)"
    )
    rate: PositiveFloat = Field(0.1, description="gradient_norm: step of the log weights towards equal norms")
    every: PositiveInt = Field(10, description="gradient_norm: steps between two updates")
    cap_ratio: float = Field(1.5, gt=1.0, description="gradient_norm: a task whose norm exceeds another's by this factor shrinks by 5 %")


class TrainConfig(Section):
    """Training loop."""

    seed: int = Field(0, ge=0, description="seed of weights, sampling and augmentation")
    steps: PositiveInt = Field(420, description="optimizer steps of the whole network")
    image_steps: int = Field(450, ge=0, description="optimizer steps before these that train backbone, neck and depth alone, on the image losses")
    batch_scenes: int = Field(4, ge=1, description="scenes streamed in parallel: samples of one step")
    matrix_learning_rate: PositiveFloat = Field(0.05, description="peak learning rate of Muon, which trains kernels and linear weights")
    learning_rate: PositiveFloat = Field(5e-3, description="peak learning rate of AdamW, which trains everything else")
    weight_decay: float = Field(0.01, ge=0.0, description="decoupled weight decay of matrices and kernels")
    warmup_fraction: Fraction = Field(0.1, description="share of the steps in which the rate rises; it then falls along a cosine")
    clip_norm: PositiveFloat = Field(10.0, description="largest gradient norm of a step")
    ema_decay: Fraction = Field(0.99, description="decay of the averaged weights that are saved")
    one_to_one_last: bool = Field(
        False, description="last layer: one instance for each label (long trainings); else its nearest ones, told apart by suppression"
    )
    log_every: PositiveInt = Field(20, description="steps between two rows of curves.csv")
    checkpoint_every: PositiveInt = Field(200, description="steps between two resumable checkpoints")
    processes: PositiveInt = Field(2, description="data-parallel processes; they share the scenes of a batch evenly")
    threads: PositiveInt = Field(1, description="CPU threads of torch in each process")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="in which the image part and the BEV encoder train; auto: bfloat16 where the processor multiplies it in hardware",
    )
    augmentation: AugmentationConfig = AugmentationConfig()
    auxiliary: AuxiliaryConfig = AuxiliaryConfig()
    balance: BalanceConfig = BalanceConfig()

    @model_validator(mode="after")
    def _even_shares(self) -> TrainConfig:
        if self.batch_scenes % self.processes:
            raise ValueError(f"batch_scenes is {self.batch_scenes}: it must be a multiple of processes, {self.processes}")
        return self


# --------------------------------------------------------------------------------------------------------------- evaluate
class EvaluateConfig(Section):
    """Accuracy on the held-out scenes; what the metrics mean stands in pipeline/evaluation."""

    map_chamfer_thresholds_m: tuple[PositiveFloat, ...] = Field(
        (0.5, 1.0, 1.5), min_length=1, description="Chamfer distances at which a map element counts as found, m"
    )
    max_samples: int | None = Field(None, ge=1, description="evaluate only the first samples of the held-out split; null: all")
    prior_samples: PositiveInt = Field(400, description="training samples, evenly chosen, that the constant prior is made from at most")
    threads: PositiveInt = Field(2, description="CPU threads of the network, float and INT8")
    pictures: int = Field(3, ge=0, le=12, description="held-out samples, evenly chosen, drawn in reports/predictions_float.png")
    detections_json: bool = Field(False, description="also write the boxes as nuScenes results files, reports/detections_float.json and _int8.json")


# ------------------------------------------------------------------------------------------------------------- robustness
class RobustnessConfig(Section):
    """The INT8 model with a camera lost and in bad weather; pipeline/robustness says how these are made."""

    samples: PositiveInt = Field(12, description="first samples of the held-out split; each of six cameras and three kinds of weather goes over them")


# ----------------------------------------------------------------------------------------------------------- quantization
QuantDtype = Literal["int8", "int16", "float32"]
ObserverName = Literal["minmax", "percentile", "mse", "kl", "auto"]


class QuantRule(Section):
    """Override for tensors whose node name, tensor name or module path matches `pattern` (shell wildcards, case matters)."""

    pattern: str = Field(min_length=1, description="for example head.refine* or */attn/Softmax; matching nothing is an error")
    dtype: QuantDtype | None = Field(None, description="data type on the chip; null: as without this rule")
    threshold: PositiveFloat | None = Field(None, description="fixed range [-threshold, threshold] in the tensor's own unit; null: calibrated")
    observer: ObserverName | None = Field(None, description="how the range follows from calibration; null: as without this rule")

    @model_validator(mode="after")
    def _says_something(self) -> QuantRule:
        if self.dtype is None and self.threshold is None and self.observer is None:
            raise ValueError(f"rule {self.pattern!r} sets none of dtype, threshold, observer")
        if self.threshold is not None and self.observer is not None:
            raise ValueError(f"rule {self.pattern!r} sets threshold and observer: a fixed range needs no observer")
        return self


def _default_op_dtypes() -> dict[str, QuantDtype]:
    return {"Softmax": "int16"}


class PromotionConfig(Section):
    """Which int8 tensors become int16 beyond the rules: the sensitivity template (docs/quantization.md, "Mixed precision")."""

    method: Literal["search", "top", "none"] = Field("search", description="search: least time for the target; top: the worst by effect; none")
    patterns: tuple[str, ...] = Field(("*",), min_length=1, description="only tensors named by one of these; matching nothing is an error")
    candidates: int = Field(120, ge=0, description="int8 tensors, worst by own error, whose effect on the outputs is measured")
    top: PositiveFloat = Field(0.05, description="method top: below 1 a share of the int8 tensors, from 1 on their number")
    target_sqnr_db: float = Field(34.0, gt=0.0, le=120.0, description="method search: signal to noise that every output should reach, dB")
    output_targets_db: dict[str, Annotated[float, Field(gt=0.0, le=120.0)]] = Field(
        {}, description="other targets than target_sqnr_db for some outputs, by name; an unknown output is an error"
    )
    max_extra_us: PositiveFloat | None = Field(None, description="method search: most simulated time the promotions may add, us; null: no limit")

    @model_validator(mode="after")
    def _top_is_share_or_number(self) -> PromotionConfig:
        if self.top > 1.0 and self.top != int(self.top):
            raise ValueError(f"top is {self.top}: below 1 it is a share, from 1 on a whole number of tensors")
        return self


class RepairConfig(Section):
    """Cheap steps that win accuracy back without training, each on its own switch (docs/quantization.md, "Repair")."""

    equalize: bool = Field(False, description="move range between the channels of an activation and the weights that read it")
    bias_correction: bool = Field(True, description="take the mean error that rounded weights cause out of the biases")
    rounding: bool = Field(True, description="choose the rounding of each weight for the least error of the layer's output")


class QatConfig(Section):
    """Quantization-aware training, the repair that costs minutes (docs/quantization.md, "Training")."""

    when: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: where a head keeps less than min_kept without it; for a model without a task, where an output misses its target"
    )
    min_kept: float = Field(0.99, gt=0.0, le=1.0, description="share of each head's float metric that makes training unnecessary")
    samples: PositiveInt = Field(32, description="training samples of an epoch; held in memory")
    epochs: PositiveInt = Field(2, description="passes over them")
    warmup_epochs: int = Field(1, ge=0, description="epochs with the ranges of calibration while the observers watch; then ranges are frozen")
    learning_rate: PositiveFloat = Field(0.02, description="integer steps that a weight may move in a training step (Adam), falling to 0 as a cosine")

    @model_validator(mode="after")
    def _warmup_ends(self) -> QatConfig:
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs is {self.warmup_epochs}, epochs {self.epochs}: at least one epoch must have frozen ranges")
        return self


class QuantizationConfig(Section):
    """Calibration and INT8 (docs/quantization.md)."""

    calibration_batches: PositiveInt = Field(50, description="training samples (one batch each) used for calibration")
    allow_fewer_batches: bool = Field(False, description="calibrate with what there is when the training split has fewer samples")
    analysis_batches: PositiveInt = Field(4, description="calibration batches kept for error tables and sensitivity")
    warmup_steps: int = Field(2, ge=0, description="earlier key frames of the same scene run before each calibration sample, for the temporal state")
    observer: ObserverName = Field("mse", description="how int8 ranges follow from calibration; auto: best of all by tensor; int16 covers everything")
    percentile: float = Field(99.99, gt=50.0, le=100.0, description="observer percentile: per cent of magnitudes inside the range")
    power_of_two_scales: bool = Field(False, description="round scales up to powers of two")
    default_dtype: QuantDtype = Field("int8", description="activations that no other rule decides")
    grid_dtype: QuantDtype = Field("int16", description="everything between a GridSample grid and the matrix operator or graph input it comes from")
    output_dtype: QuantDtype = Field("int16", description="graph outputs, back to the operator that makes them")
    op_dtypes: dict[str, QuantDtype] = Field(
        default_factory=_default_op_dtypes,
        description="data type of the outputs of an ONNX operator type; softmax over many keys is mostly below half an int8 step",
    )
    fixed_thresholds: dict[str, PositiveFloat] = Field(
        default_factory=lambda: {"Sigmoid": 1.0, "HardSigmoid": 1.0, "Softmax": 1.0, "Tanh": 1.0, "Sin": 1.0, "Cos": 1.0},
        description="range of operator types whose results are bounded by definition",
    )
    rules: tuple[QuantRule, ...] = Field((), description="overrides by name pattern; two rules that disagree about a tensor are an error")
    promotion: PromotionConfig = PromotionConfig()
    repair: RepairConfig = RepairConfig()
    qat: QatConfig = QatConfig()
    threads: PositiveInt = Field(2, description="onnxruntime threads of calibration and analysis")


# --------------------------------------------------------------------------------------------------------------------- j6
class J6Config(Section):
    """Chip, compiler and the conditions of the simulated latency."""

    chip: str = Field("j6m", description="chip profile: a name in pipeline/j6/chips or a path to a YAML file")
    chip_overrides: dict[str, float | bool] = Field({}, description="numbers of the chip profile to replace, by quantity name")
    compile_mode: Literal["latency", "bandwidth", "balance"] = Field("latency", description="what tiling is chosen for: time, DDR bytes, or both")
    balance_factor: int = Field(50, ge=0, le=100, description="for compile_mode balance: 0 only DDR bytes, 100 only time")
    optimize_level: Literal["O0", "O1", "O2"] = Field("O2", description="O0: one block an operator; O1: fusion; O2: also chains of blocks in pieces")
    core_num: int = Field(1, ge=1, le=4, description="BPU cores that share one frame; J6B/E/M have one")
    max_time_per_fc_us: float = Field(0.0, ge=0, le=10_000_000, description="longest segment of a submit, us; 0: one segment, else at least 1000")
    max_l2m_bytes: int | None = Field(None, ge=0, le=25_165_824, description="shared on-chip memory to use, bytes; null: all the chip has")
    design_fps: PositiveFloat = Field(25.0, description="frame rate at which DDR bandwidth is reported, frames/s; 25 is the 40 ms beat")
    scenario: str | None = Field(None, description="conditions of p50/p99: path of a scenario YAML; null: the model alone on a nominal chip")


# ------------------------------------------------------------------------------------------------------------------- gate
class GateRule(Section):
    """One rule of the release gate: `metric`, or its ratio to or difference from a reference, is compared with `limit`. pipeline/gate.py says how."""

    name: str = Field(min_length=1, description="what the reader sees; unique")
    metric: str = Field(
        pattern=WILDCARD_METRIC_PATTERN, description="report and dotted path, e.g. profile:latency_ms; with a part `*` the worst entry counts"
    )
    op: Literal[">=", "<="] = Field(description="how value and limit compare")
    limit: float = Field(allow_inf_nan=False, description="in the unit of the metric; without unit for a ratio")
    relative_to: str | None = Field(
        None, pattern=rf"^{AGAINST_CHAMPION}$|{METRIC_PATTERN}", description="another metric, e.g. eval_float:map.AP, or `champion`'s"
    )
    relation: Literal["ratio", "difference"] = Field("ratio", description="value / reference, or value - reference; without meaning when absolute")
    severity: Literal["error", "warning"] = Field("error", description="only errors fail the gate")


class ChecklistItem(Section):
    """An item of the release checklist: the rules that decide it, or why nothing here can."""

    item: str = Field(min_length=1, description="what the reader sees")
    rules: tuple[str, ...] = Field((), description="names of rules; the item has passed when all have")
    undecided: str | None = Field(None, min_length=1, description="what it takes to decide an item without rules")

    @model_validator(mode="after")
    def _is_decided_or_says_why_not(self) -> ChecklistItem:
        if bool(self.rules) == (self.undecided is not None):
            raise ValueError(f"checklist item {self.item!r} must have either rules or undecided")
        return self


class GateConfig(Section):
    """Rules of the release; pipeline/gate.py says how they are judged."""

    rules: tuple[GateRule, ...] = Field((), description="in the order in which they are shown")
    checklist: tuple[ChecklistItem, ...] = Field((), description="what a release has to show, in the order in which it is shown")

    @model_validator(mode="after")
    def _names_are_unique(self) -> GateConfig:
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"rule name {twice[0]!r} stands twice: every rule needs its own name")
        return self

    @model_validator(mode="after")
    def _checklist_names_rules(self) -> GateConfig:
        names = {rule.name for rule in self.rules}
        for item in self.checklist:
            if unknown := [name for name in item.rules if name not in names]:
                raise ValueError(f"checklist item {item.item!r} names {unknown[0]!r}, which is no rule")
        return self


# --------------------------------------------------------------------------------------------------------------- tracking
class TrackingConfig(Section):
    """Names in MLflow."""

    experiment: str = Field("bevj6", min_length=1, description="MLflow experiment")
    registered_model: str = Field("bev-multitask", min_length=1, description="registered model; the chip name is appended: bev-multitask-j6m")


# -------------------------------------------------------------------------------------------------------------- execution
class ExecutionConfig(Section):
    """How work over scenes is spread; never changes a result."""

    workers: PositiveInt = Field(2, description="processes for work over scenes, where there is no cluster")
    dask_address: str | None = Field(
        None, pattern=r"^(tcp|tls|ws|wss)://\S+:\d+$", description="scheduler of a Dask cluster that shares this file system; null: local processes"
    )


class Config(Section):
    """All of params.yaml."""

    dataset: DatasetConfig = DatasetConfig()
    validation: ValidationConfig = ValidationConfig()
    maps: MapsConfig = MapsConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    robustness: RobustnessConfig = RobustnessConfig()
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
        raise ConfigError(explain_problems(path, error)) from None


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


def explain_problems(path: Path, error: ValidationError, section: str = "") -> str:
    """One line per problem: file, field, value and rule. `section`: what was validated, where it was not the whole file."""
    lines = []
    for problem in error.errors():
        field = ".".join([section] * bool(section) + [str(part) for part in problem["loc"]]) or "(file)"
        rule = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"]
        value = "" if isinstance(problem["input"], dict | BaseModel) else f" = {problem['input']!r}"
        lines.append(f"{path}: {field}{value}: {rule}")
    return "\n".join(lines)
