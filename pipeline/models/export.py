"""The trained model as ONNX with static shapes, and the contract that says how to feed and read it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.errors import ModelError
from pipeline.io import atomic_path, write_json
from pipeline.models.heads.decoder import POINT_SCALE_M
from pipeline.models.heads.detection import BOX_STATE
from pipeline.models.multitask import Inputs, MultitaskModel
from pipeline.models.point_maps import point_maps
from pipeline.models.predictor import named_outputs, onnx_session, torch_session
from pipeline.models.preprocess import MEAN_RGB, STD_RGB
from pipeline.models.weights import SavedModel
from pipeline.taxonomy import CAMERAS, DETECTION_CLASSES, MAP_CLASSES, OCCUPANCY_CLASSES

OPSET = 21  # the first with int16 QuantizeLinear
LARGEST_DIFFERENCE = 1e-3

INPUT_UNITS = {
    "images": "normalised RGB, cameras in the order of `cameras`",
    "ego2img": "BEV frame (m) to network input pixels times depth (m)",
    "point_map_feature": "position in the stacked camera features, -1 to 1 (GridSample, align_corners 0); -2 where no camera looks",
    "point_map_depth": "position in the stacked depth distribution, -1 to 1; -2 where no camera looks",
    "det_anchors": "box states, BEV frame: x, y, z m, log w, log l, log h of m, sin yaw, cos yaw, vx, vy, vz m/s",
    "det_features": "instance features of remembered instances, 0 for fixed anchors",
}
OUTPUT_UNITS = {
    "det_logits": "logit of each detection class",
    "det_boxes": "box states as in det_anchors",
    "det_features_out": "instance features",
    "map_logits": "logit of each map class",
    "map_states": "six B-spline control points x, y, z (m, BEV frame), logit of closed, logit of localisation quality",
    "occupancy_logits": "logit of each occupancy class; voxels run over levels, then y, x, z",
}


@dataclass(frozen=True)
class ExportResult:
    """What the stage prints."""

    nodes: int
    max_difference: float

    def __str__(self) -> str:
        return f"{self.nodes} nodes, largest difference to torch {self.max_difference:.1e}"


class OneSample(nn.Module):
    """The model with the contract's inputs and outputs: a batch of one, only what leaves the graph."""

    def __init__(self, model: MultitaskModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, images: Tensor, ego2img: Tensor, point_map_feature: Tensor, point_map_depth: Tensor, det_anchors: Tensor, det_features: Tensor
    ) -> tuple[Tensor, ...]:
        """One sample, shapes as in docs/architecture.md."""
        inputs = Inputs(images, ego2img[None], point_map_feature[None], point_map_depth[None], det_anchors, det_features)
        return tuple(named_outputs(self.model, inputs).values())


def export(saved: SavedModel, onnx_path: Path, contract_path: Path) -> ExportResult:
    """Write the ONNX model and its contract, after comparing it with torch on one sample.

    Raises:
        ModelError: onnx.checker refuses the model, or it differs from torch by more than `LARGEST_DIFFERENCE`.
    """
    example = example_inputs(saved.model)
    with atomic_path(onnx_path) as temporary:
        to_onnx(saved.model, example, temporary)
        graph = onnx.load(temporary)
        try:
            onnx.checker.check_model(graph, full_check=True)
        except onnx.checker.ValidationError as error:
            raise ModelError(f"{onnx_path}: onnx.checker refuses the exported model ({error})") from error
        difference = largest_difference(saved.model, temporary, example)
        if not difference <= LARGEST_DIFFERENCE:
            raise ModelError(f"{onnx_path}: exported model differs from torch by {difference:.2e}, allowed are {LARGEST_DIFFERENCE:.0e}")
    write_json(contract_path, contract(saved, graph, difference))
    return ExportResult(len(graph.graph.node), difference)


def example_inputs(model: MultitaskModel) -> dict[str, NDArray[Any]]:
    """A sample with random images, a rig of six level cameras, and remembered instances."""
    config, random = model.config, np.random.default_rng(0)
    height, width = config.image_size
    ego2img = example_rig(config)
    map_feature, map_depth = point_maps(ego2img, config.image_size, config.view)
    anchors = model.box_anchors.numpy()[None]
    return {
        "images": random.normal(size=(len(CAMERAS), 3, height, width)).astype(np.float32),
        "ego2img": ego2img,
        "point_map_feature": map_feature,
        "point_map_depth": map_depth,
        "det_anchors": (anchors + random.normal(scale=0.05, size=anchors.shape)).astype(np.float32),
        "det_features": random.normal(size=(1, config.detection.anchors, config.neck.channels)).astype(np.float32),
    }


def example_rig(config: ModelConfig) -> NDArray[np.float32]:
    """(6, 4, 4) projections of six cameras 1.5 m over ground, 60 degrees apart, in the order of taxonomy.CAMERAS."""
    height, width = config.image_size
    focal = 0.8 * width
    intrinsics = np.array([[focal, 0, width / 2, 0], [0, focal, height / 3, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    matrices = []
    for degrees in (55.0, 0.0, -55.0, -110.0, 180.0, 110.0):
        cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
        # Camera axes in the ego frame: x right, y down, z forward.
        rotation = np.array([[sin, -cos, 0], [0, 0, -1.0], [cos, sin, 0]])
        matrix = np.eye(4)
        matrix[:3, :3], matrix[:3, 3] = rotation, rotation @ np.array([0, 0, -1.5])
        matrices.append(intrinsics @ matrix)
    return np.stack(matrices).astype(np.float32)


def to_onnx(model: MultitaskModel, example: dict[str, NDArray[Any]], path: Path) -> None:
    """Trace the model and write it; shapes are static, constants folded, node names are module paths."""
    arguments = tuple(torch.from_numpy(value) for value in example.values())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the exporter warns about its own replacement and about Python values in the trace, all of them constants here
        names = list(named_outputs(model, Inputs(arguments[0], *(value[None] for value in arguments[1:4]), *arguments[4:])))
        torch.onnx.export(
            OneSample(model).eval(), arguments, str(path), input_names=list(example), output_names=names, opset_version=OPSET, dynamo=False,
            do_constant_folding=True,
        )  # fmt: skip
    graph = onnx.load(path)
    strip_prefix(graph)
    remove_unused(graph.graph)
    onnx.save(graph, path)


def remove_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes whose outputs nobody reads: the tracer leaves questions about the batch size behind."""
    wanted = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            kept.append(node)
    del graph.node[:]
    graph.node.extend(reversed(kept))


def strip_prefix(graph: onnx.ModelProto) -> None:
    """Take the wrapper's name off the node names, so that they start with the module of the network: /detection/..., /backbone/..."""
    for node in graph.graph.node:
        node.name = node.name.removeprefix("/model")
        node.doc_string = ""


def largest_difference(model: MultitaskModel, path: Path, example: dict[str, NDArray[Any]]) -> float:
    """Largest absolute difference between torch and onnxruntime, in units of each output's largest value (at least 1)."""
    expected, found = torch_session(model)(example), onnx_session(path, torch.get_num_threads())(example)
    return max(float(np.abs(found[name] - value).max() / max(1.0, float(np.abs(value).max()))) for name, value in expected.items())


def contract(saved: SavedModel, graph: onnx.ModelProto, difference: float) -> dict[str, Any]:
    """Content of models/contract.json."""
    model = saved.model
    return {
        "opset": OPSET,
        "inputs": [describe(value, INPUT_UNITS) for value in graph.graph.input],
        "outputs": [describe(value, OUTPUT_UNITS) for value in graph.graph.output],
        "cameras": list(CAMERAS),
        "preprocessing": {
            "image_size": list(model.config.image_size), "resize": "one factor to the input width, area average", "crop": "rows off the top",
            "channel_order": "RGB", "mean": list(MEAN_RGB), "std": list(STD_RGB),
        },
        "classes": {"detection": list(DETECTION_CLASSES), "map": list(MAP_CLASSES), "occupancy": list(OCCUPANCY_CLASSES)},
        "anchors": {
            "layout": f"{BOX_STATE} numbers: x, y, z, log w, log l, log h, sin yaw, cos yaw, vx, vy, vz; fixed anchors, then temporal slots",
            "temporal_slots": model.config.detection.temporal_instances,
            "boxes": rounded(model.box_anchors),
        },
        "point_scale_m": POINT_SCALE_M,
        "trained_tasks": list(saved.trained_tasks),
        "model": model.config.model_dump(mode="json"),
        "heads": {task: [f"/{task}/", f"/task_bev.{task}/"] for task in model.config.tasks}
        | {"shared": ["/backbone/", "/neck/", "/depth_head/", "/view_transform/"]},
        "max_difference_to_torch": float(f"{difference:.1e}"),
    }  # fmt: skip


def rounded(values: Tensor) -> list[list[float]]:
    """float32 values as decimals that read back to the same float32."""
    return [[float(str(number)) for number in row] for row in values.numpy()]


def describe(value: onnx.ValueInfoProto, units: dict[str, str]) -> dict[str, Any]:
    """Name, shape, type and meaning of an input or output."""
    tensor = value.type.tensor_type
    shape = [dimension.dim_value for dimension in tensor.shape.dim]
    return {"name": value.name, "shape": shape, "dtype": onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, "meaning": units[value.name]}
