"""A model in segments computes what it computes in one piece, each operator once, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import QuantizationConfig
from pipeline.errors import ModelError
from pipeline.quantization.calibrate import Calibration, calibrate, merge
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import observed_tensors
from pipeline.quantization.segments import SegmentedRunner, split
from pipeline.quantization.sessions import Runner
from tests.quantization.networks import deformable_batches, image_batches


def nbytes(model: FloatModel, name: str) -> int:
    return 4 * int(np.prod(model.shapes[name]))


@pytest.mark.parametrize("budget", [1, 5_000, 1 << 20])
def test_segments_compute_the_model(deformable_model: FloatModel, budget: int) -> None:
    tensors = observed_tensors(deformable_model)
    runner = SegmentedRunner(deformable_model, tensors, 1, budget)
    for batch in deformable_batches(2):  # buffers are used again
        whole = Runner(deformable_model.proto, tensors, 1).run(batch)
        seen = {name: value.copy() for name, value in runner.run(batch)}
        assert set(seen) == set(tensors)
        for name, value in seen.items():
            np.testing.assert_allclose(value, whole[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 5_000])
def test_each_node_runs_once_and_segments_keep_the_budget(deformable_model: FloatModel, budget: int) -> None:
    tensors = observed_tensors(deformable_model)
    segments = split(deformable_model, tensors, budget)
    assert len(segments) > 3
    assert [node.name for segment in segments for node in segment.nodes] == [node.name for node in deformable_model.nodes]
    for segment in segments:
        wanted = [name for name in segment.writes if name in tensors]
        assert len(wanted) <= 1 or sum(nbytes(deformable_model, name) for name in wanted) <= budget


def test_shards_add_up_to_one_calibration(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    batches = image_batches(8)
    half = config.model_copy(update={"calibration_batches": 4})
    merged = merge([calibrate(conv_model, batches[4:], half), calibrate(conv_model, batches[:4], half)])
    assert merged.batches == 8
    for name, value in merged.statistics.items():
        whole = conv_calibration.statistics[name]
        assert np.array_equal(value.histogram, whole.histogram) and (value.minimum, value.maximum) == (whole.minimum, whole.maximum)


def test_calibrations_of_two_models_do_not_merge(conv_calibration: Calibration, deformable_calibration: Calibration) -> None:
    with pytest.raises(ModelError, match="all of one model"):
        merge([conv_calibration, deformable_calibration])
    with pytest.raises(ModelError, match="all of one model"):
        merge([])
