"""Golden values: worked cases of the J6 manual 3.0.17 (alignment_rule) and the S100 manual (dynamic_input_introduction)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ModelError
from pipeline.j6.align import aligned_bytes, aligned_strides, nv12_layout


def test_official_nv12_220x220():
    layout = nv12_layout(220, 220, 32)
    assert layout.y_strides == (49280, 224, 1, 1)
    assert layout.uv_strides == (24640, 224, 2, 1)
    assert layout.bytes == 49280 + 24640


def test_official_u16_212x212():
    assert aligned_strides((1, 3, 212, 212), 2, 32, planar=True) == (301056, 100352, 448, 2)
    assert aligned_bytes((1, 3, 212, 212), 2, 32, 64, planar=True) == 301056


def test_alignment_differs_per_chip():
    assert nv12_layout(220, 220, 64).y_strides[1] == 256
    assert aligned_bytes((1, 2), 1, 64, 256) == 256
    assert aligned_bytes((1, 2), 1, 32, 64) == 64


def test_odd_nv12_is_refused():
    with pytest.raises(ModelError, match="even height and width, got 221x220"):
        nv12_layout(221, 220, 32)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([1, 2, 4]), st.sampled_from([32, 64]), st.sampled_from([64, 128, 256]))
def test_allocation_holds_the_data_and_is_aligned(shape, element, stride, smallest):
    size = aligned_bytes(tuple(shape), element, stride, smallest)
    count = element
    for dim in shape:
        count *= dim
    assert size >= max(count, smallest)
    assert size % smallest == 0
