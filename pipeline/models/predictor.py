"""The model as its users see it: sample in, boxes, map and occupancy out, in time order. The same host code drives torch and onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config import Config, ModelConfig
from pipeline.dataset.images import load_cameras, network_ego2img
from pipeline.dataset.records import SampleRecord
from pipeline.errors import ModelError
from pipeline.io import read_json
from pipeline.models.decode import decode_boxes, decode_map, decode_occupancy, sigmoid
from pipeline.models.instance_bank import InstanceBank
from pipeline.models.multitask import Inputs, MultitaskModel
from pipeline.models.point_maps import point_maps
from pipeline.models.prediction import Prediction
from pipeline.models.preprocess import normalise
from pipeline.models.weights import channels_last, load_model

Arrays = Mapping[str, NDArray[Any]]
# Runs the network once: inputs by name to outputs by name, as models/contract.json lists them.
Session = Callable[[Arrays], Arrays]
ImageSource = Callable[[SampleRecord], NDArray[np.uint8]]


class Predictor:
    """Steps through a scene and carries the temporal state."""

    def __init__(
        self, session: Session, config: ModelConfig, box_anchors: NDArray[np.float32], tasks: tuple[str, ...], polygon_corners: int,
        images: ImageSource | None = None,
    ) -> None:  # fmt: skip
        """Use `torch_predictor` or `onnx_predictor`.

        Args:
            session: runs the network.
            config: model section of the parameters the network was built with.
            box_anchors: (N, 11).
            tasks: heads that were trained; the others' outputs are not reported.
            polygon_corners: K of the map's polygons.
            images: gives the (6, H, W, 3) RGB images of a sample; by default they are decoded.
        """
        self.session, self.config, self.tasks, self.polygon_corners = session, config, tasks, polygon_corners
        self._images = images or self._decode
        self.bank = InstanceBank(config.detection, box_anchors, config.neck.channels)

    def reset(self) -> None:
        """Forget the temporal state: a new scene begins."""
        self.bank.reset()

    def step(self, record: SampleRecord) -> Prediction:
        """Predict the next sample of the scene. Raises `DataError` for an unusable image."""
        outputs = self.session(self.inputs(record))
        if "detection" in self.config.tasks:
            scores = sigmoid(outputs["det_logits"][0]).max(axis=-1)
            self.bank.update(outputs["det_boxes"][0], scores, outputs["det_features_out"][0])
        return self.decode(record.token, outputs)

    def inputs(self, record: SampleRecord) -> dict[str, NDArray[Any]]:
        """Network inputs of a sample, with the present temporal state (which is moved to the sample's frame and time)."""
        size = self.config.image_size
        ego2img = network_ego2img(record, size).astype(np.float32)
        map_feature, map_depth = point_maps(ego2img, size, self.config.view)
        anchors, features = self.bank.inputs(record.ego2global, record.timestamp_us)
        return {
            "images": normalise(self._images(record)), "ego2img": ego2img, "point_map_feature": map_feature, "point_map_depth": map_depth,
            "det_anchors": anchors[None], "det_features": features[None],
        }  # fmt: skip

    def decode(self, token: str, outputs: Arrays) -> Prediction:
        """Outputs of the network to predictions."""
        config = self.config
        boxes = decode_boxes(outputs["det_logits"][0], outputs["det_boxes"][0], config.detection) if "detection" in self.tasks else None
        elements = decode_map(outputs["map_logits"][0], outputs["map_states"][0], config.map, self.polygon_corners) if "map" in self.tasks else None
        occupancy = decode_occupancy(outputs["occupancy_logits"][0], config) if "occupancy" in self.tasks else None
        return Prediction(token, boxes, elements, occupancy)

    def _decode(self, record: SampleRecord) -> NDArray[np.uint8]:
        return load_cameras(record, self.config.image_size)


def torch_session(model: MultitaskModel) -> Session:
    """Run a torch model; its outputs get the names of the ONNX model."""

    def run(arrays: Arrays) -> Arrays:
        with torch.inference_mode():
            return {name: value.numpy() for name, value in named_outputs(model, to_inputs(arrays)).items()}

    return run


def to_inputs(arrays: Arrays) -> Inputs:
    """Arrays of one sample, as the ONNX model takes them, to a batch of one."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in arrays.items()}
    return Inputs(
        tensors["images"].to(memory_format=torch.channels_last), tensors["ego2img"][None], tensors["point_map_feature"][None],
        tensors["point_map_depth"][None], tensors["det_anchors"], tensors["det_features"],
    )  # fmt: skip


def named_outputs(model: MultitaskModel, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Outputs that leave the graph, by name."""
    outputs = model(inputs)
    named: dict[str, torch.Tensor] = {}
    if outputs.det_features is not None:
        named |= {"det_logits": outputs.det_logits[-1], "det_boxes": outputs.det_boxes[-1], "det_features_out": outputs.det_features}
    if outputs.map_logits:
        named |= {"map_logits": outputs.map_logits[-1], "map_states": outputs.map_states[-1]}
    if outputs.occupancy_logits is not None:
        named["occupancy_logits"] = outputs.occupancy_logits
    return named


def torch_predictor(model_path: Path, config: Config, images: ImageSource | None = None) -> Predictor:
    """Predictor on models/float/model.pt. Raises `ModelError` for a bad file."""
    torch.set_num_threads(config.evaluate.threads)
    saved = load_model(model_path)
    model = channels_last(saved.model)
    corners = config.maps.topology.polygon_corners
    return Predictor(torch_session(model), model.config, model.box_anchors.numpy(), saved.trained_tasks, corners, images)


def onnx_session(path: Path, threads: int) -> Session:
    """Run an ONNX file with onnxruntime on `threads` CPU threads. Raises `ModelError` if it cannot be loaded."""
    import onnxruntime

    if not path.is_file():
        raise ModelError(f"{path}: file not found. Run the stage that writes it first")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(f"{path}: onnxruntime cannot load it ({str(error).splitlines()[0]})") from error
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]

    def run(arrays: Arrays) -> Arrays:
        results = session.run(names, {name: value for name, value in arrays.items() if name in wanted})
        return dict(zip(names, results, strict=True))

    return run


def onnx_predictor(onnx_path: Path, contract_path: Path, config: Config, images: ImageSource | None = None) -> Predictor:
    """Predictor on an ONNX file and the contract that was exported with it. Raises `ModelError` or `DataError` for bad files."""
    contract = read_json(contract_path)
    model = ModelConfig.model_validate(contract["model"])
    anchors = np.asarray(contract["anchors"]["boxes"], dtype=np.float32)
    session = onnx_session(onnx_path, config.evaluate.threads)
    return Predictor(session, model, anchors, tuple(contract["trained_tasks"]), config.maps.topology.polygon_corners, images)
