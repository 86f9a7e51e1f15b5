"""An integer-only machine computes what the QDQ file says, to one step where a value falls between two integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import QuantizationConfig
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.integer import compare_layers, fixed_point, requantize
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import make_plan
from tests.quantization.networks import deformable_batches, image_batches


@given(st.integers(-(2**31), 2**31 - 1), st.floats(1e-6, 0.9))
def test_requantization_is_multiplication_to_half_a_step(accumulator: int, factor: float) -> None:
    (result,) = requantize(np.array([accumulator], np.int64), np.array([factor]), "int16")
    assert abs(int(result) - np.clip(accumulator * factor, -32768, 32767)) <= 0.5 + abs(accumulator * factor) * 2.0**-29


def test_fixed_point_golden_values() -> None:
    """0.75 = 0.75 x 2^0 and 0.001 = 0.512 x 2^-9, mantissas in 31 bits."""
    multipliers, shifts = fixed_point(np.array([0.75, 0.001]))
    assert multipliers.tolist() == [1610612736, 1099511628] and shifts.tolist() == [31, 40]


def test_halves_round_up_and_ends_saturate() -> None:
    values = requantize(np.array([1, 3, -1, 1000, -1000], np.int64), np.array([0.5]), "int8")
    assert values.tolist() == [1, 2, 0, 127, -128]


@pytest.mark.parametrize("kind", ["conv", "deformable"])
def test_layers_equal_the_qdq_model(
    kind: str, conv_model: FloatModel, conv_calibration: Calibration, deformable_model: FloatModel, deformable_calibration: Calibration,
    config: QuantizationConfig,
) -> None:  # fmt: skip
    model, calibration = (conv_model, conv_calibration) if kind == "conv" else (deformable_model, deformable_calibration)
    batch = (image_batches if kind == "conv" else deformable_batches)(1, seed=21)[0]
    rows = compare_layers(model, make_plan(model, config, calibration.statistics), batch, threads=1)
    expected = {"conv": {"Conv", "ConvTranspose", "Gemm", "Add"}, "deformable": {"Conv", "MatMul", "Add"}}[kind]
    assert {row.op for row in rows} == expected
    for row in rows:
        assert row.largest_steps <= 1 or row.dtype == "int16", row
        assert row.share < 0.02 or row.dtype == "int16", row  # halves: QuantizeLinear rounds them to even, the chip's shift up
        assert row.largest_steps <= 2, row
