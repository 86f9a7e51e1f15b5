"""Streaming observers: what calibration remembers about a tensor, and how a threshold follows from it.

One pass fills a `TensorStatistics`: extremes, counts and a histogram of magnitudes with logarithmic bins. The bins are the leading bits of the
float32 representation (exponent and 7 bits of mantissa), so they are the same for every tensor and every batch: no first pass to find a
range, no loss when a late outlier appears, and statistics of shards add up to exactly those of one pass. Memory is fixed: 48 KB a tensor.

Every rule (`minmax`, `percentile`, `mse`, `kl`, and `auto`, the best of them by tensor) is a function of these statistics, so the rule can be
changed without another pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ModelError
from pipeline.quantization.convention import STEPS, covering_threshold

BINS_PER_OCTAVE = 128  # 7 mantissa bits: neighbouring bins differ by 0.8 %
LOWEST_OCTAVE, OCTAVES = -24, 48  # magnitudes from 2^-24 to 2^24; smaller ones count as the first bin, larger ones as the last
BINS = OCTAVES * BINS_PER_OCTAVE
_FIRST_CODE = (127 + LOWEST_OCTAVE) * BINS_PER_OCTAVE  # code of 2^LOWEST_OCTAVE: float32 exponents are biased by 127
_BLOCK = 1 << 16  # elements handled at once, so that temporaries stay in the cache
SAMPLES = 1 << 18  # magnitudes counted of one tensor in one batch; of larger ones every n-th, n odd so that it walks through all columns

_OCTAVE, _PART = np.divmod(np.arange(BINS + 1), BINS_PER_OCTAVE)
EDGES: NDArray[np.float64] = np.exp2(_OCTAVE + float(LOWEST_OCTAVE)) * (1.0 + _PART / BINS_PER_OCTAVE)
"""Magnitudes between the bins, [BINS + 1]."""
CENTRES: NDArray[np.float64] = (EDGES[:-1] + EDGES[1:]) / 2

OBSERVERS = ("minmax", "percentile", "mse", "kl")
AUTO = "auto"


@dataclass
class TensorStatistics:
    """Statistics of the values a tensor took.

    `minimum`, `maximum` and `nonfinite` are over all values; `count`, `zeros` (subnormal numbers among them) and `histogram` (int64 [BINS],
    finite magnitudes) over those that were counted, see `SAMPLES`.
    """

    minimum: float
    maximum: float
    count: int
    zeros: int
    nonfinite: int
    histogram: NDArray[np.int64]

    @classmethod
    def empty(cls) -> TensorStatistics:
        """Statistics of no values."""
        return cls(np.inf, -np.inf, 0, 0, 0, np.zeros(BINS, np.int64))

    def update(self, values: NDArray[np.float32]) -> None:
        """Add a batch of values of any shape."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            finite = flat[np.isfinite(flat)]
            self.nonfinite += flat.size - finite.size
            self.update(finite)
            return
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        step = flat.size // SAMPLES | 1
        counted = np.ascontiguousarray(flat[::step])
        self.count += counted.size
        for start in range(0, counted.size, _BLOCK):
            self._count_magnitudes(counted[start : start + _BLOCK])

    def _count_magnitudes(self, block: NDArray[np.float32]) -> None:
        codes = (block.view(np.uint32) >> 16).astype(np.intp) & 0x7FFF  # sign dropped: 8 exponent and 7 mantissa bits remain
        counts = np.bincount(codes)
        self.zeros += int(counts[0])
        top = _FIRST_CODE + BINS
        inside = counts[_FIRST_CODE:top]
        self.histogram[: inside.size] += inside
        self.histogram[0] += counts[1:_FIRST_CODE].sum()
        self.histogram[-1] += counts[top:].sum()

    def share_beyond(self, threshold: float) -> float:
        """Share of the non-zero values, 0..1, with a magnitude beyond `threshold` (to the edge of its bin); 0 for no values."""
        total = int(self.histogram.sum())
        first = int(np.searchsorted(EDGES[:-1], threshold))
        return float(self.histogram[first:].sum()) / total if total else 0.0

    def merge(self, other: TensorStatistics) -> TensorStatistics:
        """Statistics of both sets of values; exact, in any order."""
        return TensorStatistics(
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.count + other.count,
            self.zeros + other.zeros,
            self.nonfinite + other.nonfinite,
            self.histogram + other.histogram,
        )

    @property
    def magnitude(self) -> float:
        """Largest magnitude; 0 for no values."""
        return max(-self.minimum, self.maximum, 0.0) if self.count else 0.0


def threshold_of(statistics: TensorStatistics, observer: str, dtype: str, percentile: float = 99.99) -> float:
    """Threshold of a tensor; 0 when it never left zero.

    int16 always covers the whole range: it has the resolution to spare, so clipping could only lose.
    """
    largest = covering_threshold(statistics.minimum, statistics.maximum, dtype) if statistics.count else 0.0
    if largest == 0.0 or observer == "minmax" or dtype == "int16":
        return largest
    if observer == "percentile":
        return min(percentile_threshold(statistics, percentile), largest)
    if observer == "mse":
        return mse_threshold(statistics, largest, dtype)
    if observer == "kl":
        return kl_threshold(statistics, largest, dtype)
    if observer == AUTO:
        return automatic_threshold(statistics, dtype, percentile)[1]
    raise ModelError(f"observer {observer!r}: unknown; known observers: {', '.join((*OBSERVERS, AUTO))}")


def automatic_threshold(statistics: TensorStatistics, dtype: str, percentile: float = 99.99) -> tuple[str, float]:
    """(observer, threshold) with the smallest expected squared error of reconstruction; of equal ones the first of `OBSERVERS`."""
    thresholds = np.array([threshold_of(statistics, name, dtype, percentile) for name in OBSERVERS])
    if not thresholds.all():
        return OBSERVERS[0], 0.0
    best = int(np.argmin(expected_squared_errors(statistics, thresholds, dtype)))
    return OBSERVERS[best], float(thresholds[best])


def percentile_threshold(statistics: TensorStatistics, percentile: float) -> float:
    """Magnitude that `percentile` per cent of all values (zeros included) do not exceed, to the upper edge of its bin (0.8 %)."""
    cumulative = statistics.zeros + np.cumsum(statistics.histogram)
    index = int(np.searchsorted(cumulative, statistics.count * percentile / 100.0))
    return float(EDGES[min(index, BINS - 1) + 1])


def _candidates(largest: float) -> NDArray[np.float64]:
    """Thresholds from the covering one down to 2^-6 of it, 16 an octave."""
    return largest * np.exp2(-np.arange(0, 6 * 16) / 16.0)


def expected_squared_errors(statistics: TensorStatistics, thresholds: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Sum over all values of the squared quantization error at each of `thresholds`, same shape.

    Inside the range an error is uniform in one step (step^2/12); values below half a step become 0 and lose themselves; values beyond the
    largest integer lose their distance to it. Running sums of n, n*x and n*x^2 over the bins make each threshold a look-up.
    """
    counts = statistics.histogram.astype(np.float64)
    moments = [np.concatenate([[0.0], np.cumsum(counts * CENTRES**power)]) for power in (0, 1, 2)]
    steps = thresholds / STEPS[dtype]
    limits = thresholds - steps  # value of the largest integer
    first = np.searchsorted(CENTRES, steps / 2)
    last = np.maximum(np.searchsorted(CENTRES, limits + steps / 2), first)
    beyond = [moment[-1] - moment[last] for moment in moments]
    lost = moments[2][first]
    rounded = steps**2 / 12.0 * (moments[0][last] - moments[0][first])
    clipped = beyond[2] - 2.0 * limits * beyond[1] + limits**2 * beyond[0]
    return lost + rounded + clipped


def mse_threshold(statistics: TensorStatistics, largest: float, dtype: str) -> float:
    """Candidate with the smallest expected squared error."""
    candidates = _candidates(largest)
    return float(candidates[int(np.argmin(expected_squared_errors(statistics, candidates, dtype)))])


KL_BINS = 2048


def kl_threshold(statistics: TensorStatistics, largest: float, dtype: str) -> float:
    """Threshold that loses least information (Migacz, "8-bit Inference with TensorRT", GTC 2017).

    The clipped distribution of magnitudes is compared with itself quantized to 128 levels, by Kullback-Leibler divergence. The logarithmic
    histogram is spread over linear bins first.
    """
    linear = _linear_histogram(statistics, largest)
    levels = STEPS["int8"]
    best, best_divergence = KL_BINS, np.inf
    for stop in range(levels, KL_BINS + 1, 8):
        reference = linear[:stop].copy()
        reference[-1] += linear[stop:].sum()
        divergence = _divergence(reference, _levelled(linear[:stop], levels))
        if divergence < best_divergence:
            best, best_divergence = stop, divergence
    return largest * best / KL_BINS


def _linear_histogram(statistics: TensorStatistics, largest: float) -> NDArray[np.float64]:
    """Counts in KL_BINS equal bins of [0, largest]; each logarithmic bin is spread evenly over the linear ones it touches."""
    cumulative = np.concatenate([[0.0], np.cumsum(statistics.histogram)])
    return np.diff(np.interp(np.linspace(0.0, largest, KL_BINS + 1), EDGES, cumulative, left=0.0))


def _levelled(counts: NDArray[np.float64], levels: int) -> NDArray[np.float64]:
    """`counts` merged into `levels` groups and spread back over the non-empty bins of each group."""
    groups = (np.arange(counts.size) * levels) // counts.size
    filled = counts > 0
    totals = np.bincount(groups, counts, levels)
    sizes = np.bincount(groups, filled, levels)
    return np.where(filled, (totals / np.maximum(sizes, 1))[groups], 0.0)


def _divergence(reference: NDArray[np.float64], model: NDArray[np.float64]) -> float:
    """Kullback-Leibler divergence of two histograms; empty model bins are smoothed so that it stays finite."""
    p = reference / max(reference.sum(), 1e-30)
    q = model / max(model.sum(), 1e-30)
    mask = p > 0
    return float(np.sum(p[mask] * np.log(p[mask] / np.maximum(q[mask], 1e-9))))
