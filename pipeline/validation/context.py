"""What the checks look at, and the helpers they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config import ValidationConfig
from pipeline.dataset.build import IndexTables
from pipeline.dataset.tables import Tables, positions

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """One data set under validation."""

    dataroot: Path
    tables: Tables
    index: IndexTables
    config: ValidationConfig
    workers: int


def problems(count: int, cases: Sequence[tuple[str, BoolArray]]) -> pa.Array:
    """A text column: for each of `count` rows the first problem whose mask is set, "" where none is."""
    codes = np.zeros(count, dtype=np.int32)
    for code, (_, mask) in reversed(list(enumerate(cases, start=1))):
        codes[mask] = code
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(["", *(text for text, _ in cases)])).cast(pa.string())


def chain_problems(table: pa.Table, owner: IntArray, timestamp_us: IntArray) -> pa.Array:
    """Problem of each record's prev/next links, "" where the chain is sound.

    Args:
        table: a table with token, prev and next.
        owner: what a chain must not leave (scene of a sample, instance of an annotation), by row.
        timestamp_us: time of each row; a chain must run forward.
    """
    rows = np.arange(table.num_rows)
    has = {side: pc.not_equal(table[side], "").to_numpy() for side in ("prev", "next")}
    to = {side: positions(table[side], table) for side in ("prev", "next")}
    known = {side: has[side] & (to[side] >= 0) for side in ("prev", "next")}
    forward = {side: np.where(known[side], to[side], rows) for side in ("prev", "next")}
    return problems(
        table.num_rows,
        [
            ("prev is an unknown token", has["prev"] & ~known["prev"]),
            ("next is an unknown token", has["next"] & ~known["next"]),
            ("chain is circular", _endless(to["next"]) | _endless(to["prev"])),
            ("chain leaves its scene or instance", (owner[forward["next"]] != owner) | (owner[forward["prev"]] != owner)),
            ("next does not point back", known["next"] & (to["prev"][forward["next"]] != rows)),
            ("prev does not point forward", known["prev"] & (to["next"][forward["prev"]] != rows)),
            ("chain runs back in time", known["next"] & (timestamp_us[forward["next"]] <= timestamp_us)),
        ],
    )


def _endless(following: IntArray) -> BoolArray:
    """Rows whose chain never ends.

    Pointer doubling: after k rounds each pointer has made 2^k steps, so a finite chain has left the table.
    """
    pointer = np.append(following, -1)
    for _ in range(max(1, len(pointer).bit_length())):
        if (pointer < 0).all():
            break
        pointer = pointer[pointer]
    return pointer[:-1] >= 0


def scene_of_sample(context: Context) -> IntArray:
    """Scene number of each sample of the index (samples of a scene are adjacent)."""
    tokens = context.index.samples["scene_token"].to_numpy(zero_copy_only=False)
    return np.unique(tokens, return_inverse=True)[1].reshape(-1).astype(np.int64)


def frame_sample(context: Context) -> IntArray:
    """Index position of the sample of each key frame."""
    return positions(context.index.frames["sample_token"], context.index.samples)


def vehicle_of_sample(context: Context) -> NDArray[np.object_]:
    """Vehicle (rig) of each sample of the index."""
    tables = context.tables
    scene = positions(context.index.samples["scene_token"], tables.scene)
    log = positions(tables.scene["log_token"], tables.log)[scene]
    return np.array(tables.log["vehicle"].to_pylist(), dtype=object)[log]
