from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.errors import ChipError
from pipeline.j6.chip import CONFIDENCES, known_chips, load_chip


def test_five_chips_ship_and_every_number_has_a_source():
    assert known_chips() == ("j6b", "j6e", "j6h", "j6m", "j6p")
    for name in known_chips():
        for key, quantity in load_chip(name).quantities.items():
            assert quantity.source and quantity.unit and quantity.confidence in CONFIDENCES, (name, key)


@pytest.mark.parametrize(
    ("chip", "march", "tops", "l2m", "stride", "smallest"),
    [
        ("j6b", "nash-b", 18, 0, 32, 128),
        ("j6e", "nash-e", 80, 0, 32, 64),
        ("j6m", "nash-m", 128, 0, 32, 64),
        ("j6p", "nash-p", 560, 25165824, 64, 256),
    ],
)
def test_documented_facts(chip, march, tops, l2m, stride, smallest):
    profile = load_chip(chip)
    facts = [profile.number(key) for key in ("peak_tops_int8", "l2m_bytes", "stride_align", "min_alloc")]
    assert profile.march == march
    assert facts == [tops, l2m, stride, smallest]


def test_unknown_chip_lists_the_known_ones():
    with pytest.raises(ChipError, match=r"'j7x' is unknown; known: j6b, j6e, j6h, j6m, j6p"):
        load_chip("j7x")


def test_unpublished_number_stays_null_and_is_refused_where_needed():
    chip = load_chip("j6b")
    assert chip.value("ddr_peak_gbps") is None
    with pytest.raises(ChipError, match=r"chip j6b: ddr_peak_gbps is unknown .* --set ddr_peak_gbps=VALUE"):
        chip.number("ddr_peak_gbps")
    assert load_chip("j6b", {"ddr_peak_gbps": 25.6}).number("ddr_peak_gbps") == 25.6


def test_hash_follows_values_not_wording(j6m):
    assert j6m.hash == load_chip("j6m").hash
    assert j6m.hash != load_chip("j6m", {"ddr_efficiency": 0.5}).hash
    assert len(j6m.hash) == 64


def test_user_chip_inherits_from_a_base(tmp_path: Path, j6m):
    path = tmp_path / "mine.yaml"
    quantity = {"value": 51.2, "unit": "GB/s", "source": "our board", "confidence": "derived"}
    path.write_text(yaml.safe_dump({"name": "mine", "march": "nash-m", "base": "j6m", "quantities": {"ddr_peak_gbps": quantity}}))
    chip = load_chip(path)
    assert chip.number("ddr_peak_gbps") == 51.2
    assert chip.number("peak_tops_int8") == j6m.number("peak_tops_int8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: x\nmarch: nash-m\nquantitys: {}\n", "unknown key 'quantitys'"),
        ("name: x\n", "key 'march' is missing"),
        ("name: x\nmarch: m\nquantities: {a: {value: 1}}\n", "quantity 'a' needs exactly the keys"),
        ("name: x\nmarch: m\nquantities: {a: {value: 1, unit: B, source: s, confidence: sure}}\n", "confidence 'sure'"),
        ("name: [x\n", "cannot be read as YAML"),
    ],
)
def test_malformed_profile_names_file_and_field(tmp_path: Path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ChipError, match=message) as error:
        load_chip(path)
    assert str(path) in str(error.value)


def test_override_of_unknown_key_is_refused():
    with pytest.raises(ChipError, match="override of 'ddr', which no profile has"):
        load_chip("j6m", {"ddr": 1.0})


@pytest.mark.parametrize(
    "key, value, rule",
    [("ddr_peak_gbps", 0, "> 0"), ("ddr_peak_gbps", float("nan"), "> 0"), ("channel_align", -16, "> 0"), ("l1m_bytes", -1, ">= 0")],
)
def test_number_outside_its_range_is_refused_where_needed(key, value, rule):
    with pytest.raises(ChipError, match=f"{key} is .*, a finite number {rule} is needed"):
        load_chip("j6m", {key: value}).number(key)
    assert load_chip("j6m", {"l2m_bytes": 0}).number("l2m_bytes") == 0
