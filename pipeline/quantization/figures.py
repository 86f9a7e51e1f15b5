"""Figures of a quantization, PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.figures import new_figure, save_figure
from pipeline.quantization.compare import LayerError
from pipeline.quantization.observers import BINS_PER_OCTAVE, EDGES, TensorStatistics
from pipeline.quantization.plan import QuantPlan
from pipeline.quantization.search import SearchResult

WORST = 12
BIN = BINS_PER_OCTAVE // 8  # histogram bins drawn as one bar: an eighth of an octave


def draw_front(path: Path, found: SearchResult | None) -> None:
    """Accuracy against simulated time: every step of the search, the front, the choice."""
    figure = new_figure(7.0, 4.5)
    axes = figure.add_subplot()
    if found is None:
        axes.text(0.5, 0.5, "no search: promotion.method is not search", ha="center", transform=axes.transAxes)
    else:
        _scatter(axes, found)
    axes.set_xlabel("simulated time of all blocks, ms")
    axes.set_ylabel("worst output against its target, dB")
    axes.set_title("int16 promotions: accuracy against simulated time")
    save_figure(figure, path)


def _scatter(axes: Any, found: SearchResult) -> None:
    def at(steps: Sequence[Any]) -> tuple[list[float], list[float]]:
        return [(found.base_us + step.extra_us) / 1e3 for step in steps], [step.margin_db for step in steps]

    axes.axhline(0.0, color="0.6", linewidth=1, label="target")
    axes.plot(*at(found.steps), "o", color="0.75", markersize=4, label="steps of the search")
    axes.plot(*at(found.front()), "o-", color="#2e86ab", markersize=4, label="front")
    axes.plot(*at([found.chosen]), "*", color="#e4572e", markersize=13, label="chosen")
    axes.legend(fontsize=8)


def draw_distributions(path: Path, errors: Sequence[LayerError], plan: QuantPlan, statistics: Mapping[str, TensorStatistics]) -> None:
    """Magnitudes in calibration of the tensors that lose most by their own rounding, with the stored range: smallest step to threshold."""
    worst = sorted((row for row in errors if row.tensor in statistics), key=lambda row: (row.local_sqnr_db, row.tensor))[:WORST]
    figure = new_figure(13.0, 9.0)
    for index, row in enumerate(worst):
        axes = figure.add_subplot(4, 3, index + 1)
        counts = statistics[row.tensor].histogram.reshape(-1, BIN).sum(axis=1)
        axes.stairs(counts, EDGES[::BIN], fill=True, color="#2e86ab")
        axes.axvline(plan.tensors[row.tensor].scale, color="#1b998b", linewidth=1)
        axes.axvline(row.threshold, color="#e4572e", linewidth=1)
        _zoom(axes, counts)
        axes.set_title(f"{row.module or row.tensor} {row.op}\n{row.dtype}, own SQNR {row.local_sqnr_db:.1f} dB", fontsize=7)
        axes.tick_params(labelsize=6)
    figure.suptitle("Magnitudes in calibration; green: one integer step, red: threshold", fontsize=10)
    save_figure(figure, path)


def _zoom(axes: Any, counts: np.ndarray) -> None:
    """Logarithmic axes over the magnitudes that occur."""
    filled = np.flatnonzero(counts)
    edges = EDGES[::BIN]
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog")
    if filled.size:
        axes.set_xlim(edges[max(filled[0], filled[-1] - 8 * 20)], edges[filled[-1] + 1] * 2)
