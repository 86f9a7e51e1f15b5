"""What share of the float model's task metrics a quantized model keeps: the question that decides whether it has to be trained.

Asked on the scenes that the gate judges on, and only for that yes or no: training itself sees training scenes, and its result is taken or left by
the noise at the outputs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from onnx import ModelProto

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.io import read_json
from pipeline.maps.store import MapStore
from pipeline.paths import Paths


def share_kept(proto: ModelProto, config: Config, paths: Paths) -> dict[str, float | None]:
    """Headline metric / that of reports/eval_float.json, by head; None where the float metric is 0.

    Raises:
        DataError: an input is missing or damaged, or nothing is held out.
        ModelError: the model predicts something impossible.
    """
    from pipeline.evaluation.retention import retention
    from pipeline.evaluation.runner import HEADLINES, evaluate
    from pipeline.models.predictor import onnx_predictor

    reference = read_json(paths.report("eval_float.json"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "int8.onnx"
        file.write_bytes(proto.SerializeToString())
        predictor = onnx_predictor(file, paths.contract, config)
    result = evaluate(predictor, Index.open(paths.index_dir), MapStore.open(paths.maps_dir), config.evaluate)
    return {head: kept[HEADLINES[head]] for head, kept in retention(result.report, reference).items()}
