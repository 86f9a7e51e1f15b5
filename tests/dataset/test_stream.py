"""Laws of the stream sampler."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.dataset.build import IndexTables, with_verdicts
from pipeline.dataset.index import Index, write_index
from pipeline.dataset.stream import StreamItem, epoch_batches, epoch_streams, segments, walk


def make_runs(lengths: list[int]) -> list[list[str]]:
    return [[f"{scene}:{i}" for i in range(length)] for scene, length in enumerate(lengths)]


run_lengths = st.lists(st.integers(1, 12), min_size=1, max_size=20)
layout = {
    "lengths": run_lengths,
    "seed": st.integers(0, 5),
    "epoch": st.integers(0, 5),
    "ranks": st.integers(1, 4),
    "batch": st.integers(1, 4),
}


@given(**layout)
def test_streams_keep_time_order_and_never_cross_a_scene(lengths, seed, epoch, ranks, batch) -> None:
    for stream in epoch_streams(make_runs(lengths), seed, epoch, ranks, batch):
        before = None
        for item in stream:
            scene, position = map(int, item.token.split(":"))
            if position == 0:
                assert item.previous == ""
            else:
                assert item.previous == f"{scene}:{position - 1}"
                assert before is not None and before.token == item.previous
            before = item


@given(**layout)
def test_every_sample_is_seen_and_ranks_take_equal_steps(lengths, seed, epoch, ranks, batch) -> None:
    runs = make_runs(lengths)
    per_rank = [list(epoch_batches(runs, seed, epoch, rank, ranks, batch)) for rank in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1
    assert all(len(step) == batch for batches in per_rank for step in batches)
    seen = {item.token for batches in per_rank for step in batches for item in step}
    assert seen == {token for run in runs for token in run}


@given(lengths=run_lengths, seed=st.integers(0, 5))
def test_one_stream_sees_each_sample_exactly_once(lengths, seed) -> None:
    (stream,) = epoch_streams(make_runs(lengths), seed, 0, 1, 1)
    assert max(Counter(item.token for item in stream).values()) == 1
    assert len(stream) == sum(lengths)


@given(scenes=st.integers(1, 6), length=st.integers(1, 8), ranks=st.integers(1, 3), batch=st.integers(1, 3))
def test_equal_scenes_are_shared_without_repeats(scenes, length, ranks, batch) -> None:
    runs = make_runs([length] * scenes * ranks * batch)
    seen = Counter(item.token for stream in epoch_streams(runs, 0, 0, ranks, batch) for item in stream)
    assert set(seen.values()) == {1}


@given(**layout)
def test_order_depends_on_seed_and_epoch_alone(lengths, seed, epoch, ranks, batch) -> None:
    runs = make_runs(lengths)
    assert epoch_streams(runs, seed, epoch, ranks, batch) == epoch_streams(runs, seed, epoch, ranks, batch)


def test_epochs_differ() -> None:
    runs = make_runs([3] * 12)
    assert epoch_streams(runs, 0, 0, 1, 1) != epoch_streams(runs, 0, 1, 1, 1)
    assert epoch_streams(runs, 0, 0, 1, 1) != epoch_streams(runs, 1, 0, 1, 1)


def test_nothing_to_read_gives_no_batches() -> None:
    assert list(epoch_batches([], 0, 0)) == []


def test_walk_resets_between_runs() -> None:
    assert list(walk([["a", "b"], ["c"]])) == [StreamItem("a", ""), StreamItem("b", "a"), StreamItem("c", "")]


@settings(max_examples=10)
@given(drop=st.sets(st.integers(0, 40), max_size=6))
def test_a_dropped_sample_breaks_the_stream(real_minival: IndexTables, tmp_path_factory, drop) -> None:
    tokens = real_minival.samples["token"].to_pylist()
    dropped = {tokens[i]: "image" for i in drop}
    directory = tmp_path_factory.mktemp("p") / "data" / "index"
    write_index(with_verdicts(real_minival, dropped, {}), directory, ".", "v", "f")
    index = Index.open(directory)
    for item in walk(segments(index, "val")):
        assert item.token not in dropped
        if item.previous:
            assert index.sample(item.token).prev == item.previous
