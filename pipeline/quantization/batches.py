"""Calibration batches of the pipeline's own model: training samples spread evenly over all scenes, with a lived-in temporal state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.quantization.calibrate import check_count

if TYPE_CHECKING:
    from pipeline.models.predictor import Predictor

SPLIT = "train"  # never the held-out scenes: the gate judges on them


@dataclass(frozen=True)
class Pick:
    """A sample to calibrate on and the key frames of its scene that come right before it, oldest first."""

    token: str
    before: tuple[str, ...]


def calibration_batches(config: Config, index: Index, onnx_path: Path, contract_path: Path) -> Iterator[dict[str, NDArray]]:
    """`training_batches` of `calibration_batches` samples. Raises `DataError` also when there are too few of them."""
    settings = config.quantization
    check_count(min(len(index.tokens(SPLIT)), settings.calibration_batches), settings)
    return training_batches(config, index, onnx_path, contract_path, settings.calibration_batches)


def training_batches(config: Config, index: Index, onnx_path: Path, contract_path: Path, count: int) -> Iterator[dict[str, NDArray]]:
    """Network inputs of at most `count` training samples, in scene and time order.

    The float model runs over up to `warmup_steps` earlier frames of the scene first, so that the temporal inputs hold what they hold on the
    road and not only empty slots.

    Raises:
        DataError: an unusable image.
        ModelError: the model or its contract cannot be read.
    """
    from pipeline.models.predictor import onnx_predictor

    tokens = index.tokens(SPLIT)
    scenes = {token: index.sample(token).scene_token for token in tokens}
    predictor = onnx_predictor(onnx_path, contract_path, config)
    predictor.tasks = ()  # only the temporal state is wanted: decoding boxes, lines and voxels takes longer than the network
    # Without pairs the model is trained and judged on single frames, and its memory is empty on the road, too.
    warmup_steps = config.quantization.warmup_steps if index.paired else 0
    yield from _inputs(predictor, index, spread(tokens, scenes, count, warmup_steps))


def spread(tokens: Sequence[str], scenes: Mapping[str, str], count: int, warmup_steps: int) -> list[Pick]:
    """At most `count` evenly spaced samples of `tokens` (scene by scene in time order), each with its predecessors of the same scene."""
    number = min(count, len(tokens))
    positions = [index * len(tokens) // number for index in range(number)]
    picks = []
    for position in positions:
        earlier = tokens[max(position - warmup_steps, 0) : position]
        picks.append(Pick(tokens[position], tuple(token for token in earlier if scenes[token] == scenes[tokens[position]])))
    return picks


def _inputs(predictor: Predictor, index: Index, picks: Sequence[Pick]) -> Iterator[dict[str, NDArray]]:
    for pick in picks:
        predictor.reset()
        for token in pick.before:
            predictor.step(index.sample(token))
        yield predictor.inputs(index.sample(pick.token))
