"""Memory plan: offsets of tensors in an arena from their lifetimes.

Two arenas are planned: on-chip residents, and temporaries in DDR. Placement is greedy by size (largest first, lowest offset that is free during the
whole life), the method that is rarely far from the lower bound (peak of live bytes); the plan also reports what placing in order of creation
("first fit") would have needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.j6.align import round_up


@dataclass(frozen=True)
class Buffer:
    """A tensor to place: alive while blocks `start`..`end` (inclusive) run."""

    name: str
    bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Placed:
    """A buffer at its offset, both multiples of the alignment."""

    name: str
    offset: int
    bytes: int
    start: int
    end: int


@dataclass(frozen=True)
class Arena:
    """Result of planning one memory. `peak_bytes` >= `lower_bound_bytes`; first fit is the baseline."""

    buffers: tuple[Placed, ...]
    peak_bytes: int
    lower_bound_bytes: int
    first_fit_bytes: int


def plan_arena(buffers: Sequence[Buffer], alignment: int) -> Arena:
    """Place buffers so that no two that live at the same time overlap. Offsets and sizes are multiples of `alignment`."""
    aligned = [Buffer(b.name, round_up(b.bytes, alignment), b.start, b.end) for b in buffers]
    by_size = sorted(aligned, key=lambda b: (-b.bytes, b.start, b.name))
    in_order = sorted(aligned, key=lambda b: (b.start, b.name))
    candidates = [_place(by_size), _place(in_order), _place(sorted(aligned, key=lambda b: (b.start - b.end, -b.bytes, b.name)))]
    best = min(candidates, key=_peak)
    placed = tuple(sorted(best, key=lambda b: (b.start, b.offset, b.name)))
    return Arena(placed, _peak(best), lower_bound(aligned), _peak(candidates[1]))


def _peak(placed: Iterable[Placed]) -> int:
    return max((b.offset + b.bytes for b in placed), default=0)


def _place(buffers: Sequence[Buffer]) -> list[Placed]:
    """Give each buffer, in the order given, the lowest offset that is free during its life."""
    placed: list[Placed] = []
    alive: dict[int, list[Placed]] = {}  # block -> buffers that live while it runs
    for buffer in buffers:
        moments = range(buffer.start, buffer.end + 1)
        rivals = {other.name: other for moment in moments for other in alive.get(moment, ())}
        offset = 0
        for other in sorted(rivals.values(), key=lambda p: p.offset):
            if offset + buffer.bytes <= other.offset:
                break
            offset = max(offset, other.offset + other.bytes)
        result = Placed(buffer.name, offset, buffer.bytes, buffer.start, buffer.end)
        placed.append(result)
        for moment in moments:
            alive.setdefault(moment, []).append(result)
    return placed


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """Largest sum of bytes alive at one time; no plan needs less."""
    change: dict[int, int] = {}
    for buffer in buffers:
        change[buffer.start] = change.get(buffer.start, 0) + buffer.bytes
        change[buffer.end + 1] = change.get(buffer.end + 1, 0) - buffer.bytes
    level = peak = 0
    for moment in sorted(change):
        level += change[moment]
        peak = max(peak, level)
    return peak
