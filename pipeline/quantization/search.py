"""Mixed precision: which int8 tensors become int16 so that every output reaches its signal-to-noise target at the least simulated time.

Greedy. A move promotes one tensor, or all candidates around one operator, because a lone int16 operand costs a requantization that its neighbours
share. Its gain is the predicted fall of the outputs' shortfall, from the noise that each tensor causes alone (independent noises add up); its price
is what the J6 model charges for it beside what is promoted already, conversions at int8/int16 borders included. The best gain for the price is taken
and measured. The walk goes on beyond the target, so that the log is the front of accuracy against time; the answer is its cheapest point that
reaches the target, from which promotions that turned out to be unnecessary are taken back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.j6.chip import ChipProfile
from pipeline.j6.search import DtypeSearch
from pipeline.progress import track
from pipeline.quantization.compare import sqnr_db
from pipeline.quantization.model import FloatModel
from pipeline.quantization.plan import QuantPlan
from pipeline.quantization.qdq import write_qdq
from pipeline.quantization.sensitivity import Sensitivity

MAX_STEPS = 40
BEYOND_DB = 2.0
"""The walk ends when every output is that far beyond its target: enough to see what more accuracy would cost."""
SMALLEST_GAIN = 0.01
"""Share of the outputs' noise / target that a move must be predicted to remove."""
FREE_US = 0.5
"""Prices below it count as this much, us: otherwise the walk would begin with everything that is free and useless."""
MAX_TRIALS = 12
"""Promotions that are tried without, dearest first."""

Noise = Mapping[str, float]
Measure = Callable[[Collection[str]], Noise]


class Prices(Protocol):
    """What promotions cost."""

    def extra_us(self, promoted: Collection[str]) -> float:
        """Simulated time that storing these tensors as int16 adds to the INT8 model, us."""


class J6Prices:
    """Prices by the J6 model's incremental cost; `base_us` is the time of all blocks without promotions."""

    def __init__(self, model: FloatModel, plan: QuantPlan, chip: ChipProfile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "int8.onnx"
            path.write_bytes(write_qdq(model, plan).SerializeToString())
            self._search = DtypeSearch(path, chip)
        known = set(self._search.tensors)
        self._members: dict[str, list[str]] = {}
        for name, decision in plan.quantized().items():
            if name in known:
                self._members.setdefault(decision.root, []).append(name)
        self._memory: dict[frozenset[str], float] = {}
        self.base_us = 1e3 * self._search.total_ms

    def extra_us(self, promoted: Collection[str]) -> float:
        """See `Prices`; a tensor that no block of the chip stores costs nothing."""
        key = frozenset(promoted)
        if key not in self._memory:
            changes = {member: "int16" for name in sorted(key) for member in self._members.get(name, [])}
            self._memory[key] = 1e3 * self._search.extra_ms(changes) if changes else 0.0
        return self._memory[key]


@dataclass(frozen=True)
class Step:
    """One line of the search log: what was changed, and what the model then is. Times are simulated us, `sqnr_db` by output, dB."""

    number: int
    added: tuple[str, ...]
    promoted: frozenset[str]
    extra_us: float
    sqnr_db: dict[str, float]
    margin_db: float

    @property
    def reached(self) -> bool:
        """True when every output reaches its target."""
        return self.margin_db >= 0.0


@dataclass(frozen=True)
class SearchResult:
    """The walk and its answer, which is one of its steps."""

    steps: tuple[Step, ...]
    chosen: Step
    base_us: float

    def front(self) -> list[Step]:
        """Steps that no other step beats in both time and margin, by time."""
        ordered = sorted(self.steps, key=lambda step: (step.extra_us, -step.margin_db))
        best, front = -np.inf, []
        for step in ordered:
            if step.margin_db > best:
                front.append(step)
                best = step.margin_db
        return front


class Search:
    """State of one search."""

    def __init__(
        self, moves: Sequence[frozenset[str]], effects: Mapping[str, Noise], targets_db: Mapping[str, float], prices: Prices, measure: Measure
    ) -> None:
        """Args:
        moves: sets of candidates that may be promoted together.
        effects: candidate -> noise ratio that it causes alone at each output.
        targets_db: output -> signal to noise to reach, dB.
        measure: noise ratio at each output of the model with the given candidates promoted.
        """
        self._outputs = list(targets_db)
        self._targets = np.array([10.0 ** (-targets_db[name] / 10.0) for name in self._outputs])
        self._moves, self._prices, self._measure = moves, prices, measure
        self._effects = {name: np.array([noise[out] for out in self._outputs]) for name, noise in effects.items()}
        self.steps: list[Step] = []

    def run(self, max_extra_us: float | None = None, max_steps: int = MAX_STEPS) -> Step:
        """Walk, choose, take back; the log is in `steps`."""
        noise = self._record(frozenset(), ())
        for _ in track(range(max_steps), "mixed precision", max_steps):
            move = self._best_move(noise, max_extra_us)
            if move is None or self.steps[-1].margin_db >= BEYOND_DB:
                break
            noise = self._record(self.steps[-1].promoted | move, tuple(sorted(move - self.steps[-1].promoted)))
        return self._taken_back(self._choice())

    def _record(self, promoted: frozenset[str], added: tuple[str, ...]) -> NDArray[np.float64]:
        noise = self._measure(promoted)
        levels = {name: sqnr_db(1.0, noise[name]) for name in self._outputs}
        margin = float(min(10.0 * np.log10(target / max(noise[name], 1e-20)) for name, target in zip(self._outputs, self._targets, strict=True)))
        self.steps.append(Step(len(self.steps), added, promoted, self._prices.extra_us(promoted), levels, margin))
        return np.array([noise[name] for name in self._outputs])

    def _best_move(self, noise: NDArray[np.float64], max_extra_us: float | None) -> frozenset[str] | None:
        """Most gain for the price beside what is promoted; None when nothing gains or can be paid."""
        last = self.steps[-1]
        smallest = SMALLEST_GAIN * self._shortfall(noise)
        best: tuple[float, frozenset[str]] | None = None
        for move in self._moves:
            added = move - last.promoted
            gain = self._gain(noise, added)
            if gain < smallest or not added:
                continue
            price = self._prices.extra_us(last.promoted | move)
            if max_extra_us is not None and price > max_extra_us:
                continue
            worth = gain / max(price - last.extra_us, FREE_US)
            if best is None or worth > best[0]:
                best = (worth, move)
        return best[1] if best else None

    def _gain(self, noise: NDArray[np.float64], added: Collection[str]) -> float:
        """Predicted fall of the shortfall when `added` are promoted."""
        removed = np.minimum(sum((self._effects[name] for name in added), np.zeros(len(noise))), 0.95 * noise)
        return self._shortfall(noise) - self._shortfall(noise - removed)

    def _shortfall(self, noise: NDArray[np.float64]) -> float:
        """Sum over outputs of noise / target; what an output has to spare counts for a tenth, so that the walk can go beyond the target."""
        ratio = noise / self._targets
        return float(np.sum(np.maximum(ratio - 1.0, 0.0) + 0.1 * np.minimum(ratio, 1.0)))

    def _choice(self) -> Step:
        """The cheapest step that reaches the target, or else the one that comes nearest."""
        reached = [step for step in self.steps if step.reached]
        if reached:
            return min(reached, key=lambda step: (step.extra_us, step.number))
        return max(self.steps, key=lambda step: (step.margin_db, -step.extra_us))

    def _taken_back(self, step: Step) -> Step:
        """Try without each of the dearest promotions; keep what is cheaper and still reaches the target (or loses nothing where none did)."""
        floor = min(step.margin_db, 0.0)
        savings = {name: step.extra_us - self._prices.extra_us(step.promoted - {name}) for name in step.promoted}
        dearest = sorted((name for name in savings if savings[name] > FREE_US), key=lambda name: (-savings[name], name))
        for name in dearest[:MAX_TRIALS]:
            self._record(step.promoted - {name}, ())
            trial = self.steps[-1]
            if trial.margin_db >= floor and trial.extra_us < step.extra_us:
                step = trial
        return step


def moves_of(model: FloatModel, plan: QuantPlan, candidates: Collection[str]) -> list[frozenset[str]]:
    """Every candidate alone, and the candidates around every operator that joins at least two of them."""
    moves = {frozenset([name]) for name in candidates}
    for node in model.nodes:
        around = {plan.tensors[name].root for name in (*node.input, *node.output) if name in plan.tensors}
        joined = frozenset(around & set(candidates))
        if len(joined) > 1:
            moves.add(joined)
    return sorted(moves, key=lambda move: (len(move), sorted(move)))


def search(
    model: FloatModel,
    plan: QuantPlan,
    ranking: Sequence[Sensitivity],
    targets_db: Mapping[str, float],
    prices: J6Prices,
    measure: Measure,
    max_extra_us: float | None = None,
) -> SearchResult:
    """The cheapest set of promotions among the ranked tensors that reaches `targets_db`."""
    effects = {row.tensor: row.by_output for row in ranking}
    walk = Search(moves_of(model, plan, set(effects)), effects, targets_db, prices, measure)
    chosen = walk.run(max_extra_us)
    return SearchResult(tuple(walk.steps), chosen, prices.base_us)
