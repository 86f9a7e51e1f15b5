from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import ModelError
from pipeline.j6.compiler import CompileOptions, compile_model
from pipeline.j6.search import DtypeSearch
from tests.j6.conftest import Net


@pytest.fixture
def island(tmp_path: Path) -> Path:
    """conv a feeds conv b and, beside it, a sum with b: a width change of one operand shows."""
    net = Net()
    a = net.conv(net.input("x", (1, 64, 32, 32)), "a", 64, 64)
    b = net.conv(a, "b", 64, 64)
    total = net.op("Max", [a, b], "sum")
    net.conv(total, "c", 64, 64)
    return net.save(tmp_path / "m.onnx", "c")


def test_total_is_the_makespan_of_the_plan(island: Path, j6m):
    assert DtypeSearch(island, j6m).total_ms == pytest.approx(compile_model(island, j6m).schedule.makespan_ms, abs=1e-7)


def test_all_int16_by_query_equals_a_new_compilation(island: Path, j6m):
    search = DtypeSearch(island, j6m)
    changed = dict.fromkeys(("x", "a", "b", "sum"), "int16")
    wide = DtypeSearch(island, j6m, CompileOptions(assume_dtype="int16"))
    assert search.total_ms + search.extra_ms(changed) == pytest.approx(wide.total_ms, rel=0.03)


def test_an_island_pays_for_requantization(island: Path, j6m):
    """Widening one operand of the maximum alone costs a conversion that widening both does not."""
    search = DtypeSearch(island, j6m)
    conversion = 64 * 32 * 32 * 1e3 / (j6m.number("requantize_gelements_per_s") * 1e9)
    both = search.extra_ms({"a": "int16", "b": "int16"})
    alone = search.extra_ms({"b": "int16"})
    assert search.extra_ms({}) == 0.0
    assert alone >= conversion > 0
    assert both != pytest.approx(alone + search.extra_ms({"a": "int16"}), rel=1e-3)


def test_unknown_tensor_is_refused(island: Path, j6m):
    with pytest.raises(ModelError, match="no block touches a tensor 'nope'"):
        DtypeSearch(island, j6m).extra_ms({"nope": "int16"})


def test_a_changed_layer_is_priced_like_a_new_compilation(island: Path, tmp_path: Path, j6m):
    """Convolution c with 512 instead of 64 output channels."""
    search = DtypeSearch(island, j6m)
    weight, result = search.tensor("c.w"), search.tensor("c")
    wider = {"c.w": replace(weight, shape=(512, 64, 3, 3)), "c": replace(result, shape=(1, 512, 32, 32))}
    net = Net()
    a = net.conv(net.input("x", (1, 64, 32, 32)), "a", 64, 64)
    net.conv(net.op("Max", [a, net.conv(a, "b", 64, 64)], "sum"), "c", 64, 512)
    other = DtypeSearch(net.save(tmp_path / "wide.onnx", "c"), j6m)
    assert search.total_ms + search.extra_ms_of(wider) == pytest.approx(other.total_ms, rel=1e-6)
