"""Training order: scenes are shuffled, the samples inside a scene never are.

A temporal model reads each scene as a stream. Every slot of every rank's batch walks its own scenes from beginning to end and its state
is reset whenever `StreamItem.previous` is "". The order depends on the seed and the epoch alone, so a restarted run sees the same one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.dataset.index import Index

Segment = Sequence[str]


@dataclass(frozen=True)
class StreamItem:
    """One step of a stream: a sample and the sample just before it in the same scene ("" where the temporal state must be reset)."""

    token: str
    previous: str


def segments(index: Index, split: str) -> list[list[str]]:
    """Unbroken runs of kept samples, scene by scene in time order.

    A dropped sample ends a run: what follows must not be paired across the hole. Where the index has no pairs, every sample is a run.
    """
    columns = ["token", "scene_token", "index_in_scene", "split", "keep"]
    runs: list[list[str]] = []
    last: tuple[str, int] | None = None
    for row in index.samples.select(columns).to_pylist():
        if row["split"] != split or not row["keep"]:
            continue
        here = (row["scene_token"], row["index_in_scene"])
        if last is None or not index.paired or here != (last[0], last[1] + 1):
            runs.append([])
        runs[-1].append(row["token"])
        last = here
    return runs


def walk(runs: Sequence[Segment]) -> Iterator[StreamItem]:
    """Items of runs read one after another, each run from its beginning."""
    for run in runs:
        previous = ""
        for token in run:
            yield StreamItem(token, previous)
            previous = token


def epoch_streams(runs: Sequence[Segment], seed: int, epoch: int, world_size: int, batch_size: int) -> list[list[StreamItem]]:
    """All `world_size * batch_size` streams of an epoch, equally long.

    Runs are shuffled by (seed, epoch) and dealt to the stream that is shortest so far. Shorter streams start their own runs again until
    all are as long as the longest, so every sample occurs at least once and the ranks take the same number of steps. A stream that got
    no run (more streams than runs) repeats another's.
    """
    if not runs:
        return []
    order = np.random.default_rng([seed, epoch]).permutation(len(runs))
    dealt: list[list[Segment]] = [[] for _ in range(world_size * batch_size)]
    lengths = [0] * len(dealt)
    for position in order:
        shortest = lengths.index(min(lengths))
        dealt[shortest].append(runs[position])
        lengths[shortest] += len(runs[position])
    filled = [own for own in dealt if own]
    steps = max(lengths)
    return [_cycle(own or filled[i % len(filled)], steps) for i, own in enumerate(dealt)]


def epoch_batches(
    runs: Sequence[Segment], seed: int, epoch: int, rank: int = 0, world_size: int = 1, batch_size: int = 1
) -> Iterator[list[StreamItem]]:
    """The batches of one rank in one epoch: slot `b` of successive batches is one stream."""
    streams = epoch_streams(runs, seed, epoch, world_size, batch_size)
    for batch in zip(*streams[rank * batch_size : (rank + 1) * batch_size], strict=True):
        yield list(batch)


def _cycle(own: Sequence[Segment], steps: int) -> list[StreamItem]:
    items: list[StreamItem] = []
    while len(items) < steps:
        items.extend(walk(own))
    return items[:steps]
