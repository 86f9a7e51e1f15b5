"""Roundings and biases chosen from what each layer reads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import QuantizationConfig, RepairConfig
from pipeline.quantization.calibrate import Calibration
from pipeline.quantization.layers import as_rows, from_rows, layer_moments, patches, weighted_nodes
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import make_plan
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.repair import choose_rounding, output_errors, repair
from pipeline.quantization.sessions import Runner
from tests.quantization.networks import image_batches

Build = Callable[..., QuantizationConfig]
NOTHING = RepairConfig(equalize=False, bias_correction=False, rounding=False)


def objective(error: np.ndarray, gram: np.ndarray) -> float:
    return float(np.einsum("ok,kl,ol->", error, gram, error))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 12))
def test_chosen_roundings_are_neighbours_and_never_worse_than_nearest(seed: int, outputs: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    exact = rng.uniform(-100, 100, (outputs, size))
    inputs = rng.normal(size=(30, size)) @ rng.normal(size=(size, size))
    gram = inputs.T @ inputs / 30
    ridged = gram + 0.01 * np.trace(gram) / size * np.eye(size)
    nearest = np.rint(exact)
    chosen = choose_rounding(exact, nearest, gram)
    assert np.array_equal(chosen, np.rint(chosen)) and (np.abs(chosen - exact) <= 1.0).all()
    assert objective(chosen - exact, ridged) <= objective(nearest - exact, ridged) * (1 + 1e-9)


def test_correlated_inputs_make_the_errors_cancel() -> None:
    """Two equal inputs: both weights at 0.4 are stored as 0 and 1, not as 0 and 0."""
    chosen = choose_rounding(np.array([[0.4, 0.4]]), np.zeros((1, 2)), np.ones((2, 2)))
    assert sorted(chosen[0]) == [0.0, 1.0]


def test_uncorrelated_inputs_keep_nearest() -> None:
    exact = np.random.default_rng(0).uniform(-5, 5, (4, 9))
    assert np.array_equal(choose_rounding(exact, np.rint(exact), np.eye(9)), np.rint(exact))


def test_patches_times_rows_is_the_layer(conv_model: FloatModel) -> None:
    """What roundings are judged on is what the layer computes: convolution, depthwise convolution, linear layer."""
    batch = image_batches(1, seed=4)[0]
    nodes = weighted_nodes(conv_model)
    assert {"/stem/Conv", "/depthwise/Conv", "/fc/Gemm"} <= {node.name for node in nodes}
    for node in nodes:
        values = Runner(conv_model.proto, [node.input[0], node.output[0]], 1).run(batch)
        weight = conv_model.constants[node.input[1]]
        seen = patches(node, values[node.input[0]], weight.shape)  # [groups, n, K]; small enough that all are seen
        rows = as_rows(node, weight).reshape(len(seen), -1, seen.shape[2])
        result = np.concatenate(list(np.matmul(seen, rows.transpose(0, 2, 1))), axis=1) + conv_model.constants[node.input[2]]
        output = values[node.output[0]]
        expected = np.moveaxis(output, 1, -1).reshape(-1, output.shape[1])
        np.testing.assert_allclose(result, expected, atol=1e-4)
        assert np.array_equal(from_rows(node, as_rows(node, weight), weight.shape), weight)


def test_rounding_lowers_the_error_of_every_layer_on_its_patches(
    conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig
) -> None:
    plan = make_plan(conv_model, config, conv_calibration.statistics)
    moments = layer_moments(conv_model, conv_calibration.analysis, 1)
    repaired = repair(conv_model, plan, RepairConfig(bias_correction=False, rounding=True), conv_calibration.analysis, 1)
    before, after = output_errors(conv_model, plan, moments), output_errors(conv_model, repaired, moments)
    assert all(after[name] <= before[name] * 1.001 for name in before)
    assert sum(after.values()) < 0.8 * sum(before.values())


@pytest.mark.parametrize("switch", ["rounding", "bias_correction"])
def test_each_step_helps_where_only_weights_are_rounded(
    conv_model: FloatModel, conv_calibration: Calibration, with_config: Build, switch: str
) -> None:
    plan = make_plan(conv_model, with_config(rules=[{"pattern": "*", "dtype": "int16"}]), conv_calibration.statistics)
    repaired = repair(conv_model, plan, NOTHING.model_copy(update={switch: True}), conv_calibration.analysis, 1)
    batches = image_batches(6, seed=31)  # not those of the calibration
    exact, nearest, better = (
        np.concatenate([Runner(proto, ["logits"], 1).run(batch)["logits"] for batch in batches])
        for proto in (conv_model.proto, write_qdq(conv_model, plan), write_qdq(conv_model, repaired))
    )
    assert np.square(better - exact).sum() < np.square(nearest - exact).sum()


def test_bias_correction_takes_the_mean_error_out(conv_model: FloatModel, conv_calibration: Calibration, with_config: Build) -> None:
    plan = make_plan(conv_model, with_config(rules=[{"pattern": "*", "dtype": "int16"}]), conv_calibration.statistics)
    repaired = repair(conv_model, plan, RepairConfig(bias_correction=True, rounding=False), conv_calibration.analysis, 1)
    assert "/stem/Conv" in repaired.bias_shifts

    def mean_error(candidate: object) -> float:
        proto = write_qdq(conv_model, candidate)  # type: ignore[arg-type]
        name = "/depthwise/Conv_output_0"
        runs = [(Runner(conv_model.proto, [name], 1).run(b)[name], Runner(proto, [name], 1).run(b)[name]) for b in conv_calibration.analysis]
        return float(np.abs(np.mean([q - x for x, q in runs], axis=(0, 1, 3, 4))).sum())

    assert mean_error(repaired) < 0.5 * mean_error(plan)


def test_switched_off_changes_nothing(conv_model: FloatModel, conv_calibration: Calibration, config: QuantizationConfig) -> None:
    plan = make_plan(conv_model, config, conv_calibration.statistics)
    assert repair(conv_model, plan, NOTHING, conv_calibration.analysis, 1) is plan
