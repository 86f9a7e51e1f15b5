"""The release report: complete, self-contained, repeatable, and honest about what is missing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.gate import judge
from pipeline.io import read_json, sha256_file, write_json
from pipeline.paths import Paths
from pipeline.report.charts import bars, curve
from pipeline.report.content import read_content, score_rows
from pipeline.report.render import render
from pipeline.stages.report import run

Release = tuple[Config, Paths]
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Balance(HTMLParser):
    """Checks that every element that opens closes in order, and collects text and outside references."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(html: str) -> Balance:
    page = Balance()
    page.feed(html)
    assert page.open == []
    return page


def text_of(release: Release) -> str:
    return re.sub(r"\s+", " ", " ".join(parsed(render(read_content(*release))).text))


def test_everything_an_engineer_needs_is_on_the_page(release: Release) -> None:
    text = text_of(release)
    heads = ("detection mAP", "Chamfer AP", "mIoU", "kept by INT8", "constant prior", "driveable surface", "0-20m")
    for words in ("Gate passed", *heads, "one camera lost", "CAM_FRONT"):
        assert words in text
    for words in ("9.87 ms", "simulated", "blocks limited by the DDR bus", "map_head.decoder.0", "210 int8", "camera phase", "400"):
        assert words in text
    assert "cd" * 32 in text and "ab" * 32 in text
    assert sha256_file(release[1].int8_onnx) in text


def test_the_page_needs_no_network_and_no_script(release: Release) -> None:
    html = render(read_content(*release))
    page = parsed(html)
    assert page.references and all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert "<script" not in html and "http" not in html and "url(" not in html


def test_equal_inputs_give_equal_bytes(release: Release) -> None:
    config, paths = release
    run(config, paths)
    first = paths.report("release.html").read_bytes()
    run(config, paths)
    assert paths.report("release.html").read_bytes() == first
    assert str(paths.root).encode() not in first


def test_a_failed_gate_leads_with_its_reasons(release: Release) -> None:
    config, paths = release
    profile = read_json(paths.report("profile.json"))
    write_json(paths.report("profile.json"), {**profile, "latency_ms": 41.5})
    write_json(paths.report("gate.json"), judge(config.gate.rules, paths.reports, config.model.tasks))
    text = text_of(release)
    assert "Gate not passed" in text and "must not be promoted" in text
    assert "simulated latency, ms: 41.5 is above 35" in text


def test_names_from_data_are_escaped(release: Release) -> None:
    html = render(read_content(*release))
    assert "backbone.stages.3.&lt;b&gt;" in html and "3.<b>" not in html


def test_scores_hold_retention_and_prior(release: Release) -> None:
    rows = {(row.head, row.label): row for row in score_rows(read_content(*release))}
    detection = rows["detection", "mAP"]
    assert detection.kept == pytest.approx(1.0)
    assert detection.times_prior == pytest.approx(detection.float_value / detection.prior)
    assert rows["map", "Chamfer AP"].float_value == pytest.approx(1.0)


def test_missing_optional_parts_and_heads_are_said(release: Release) -> None:
    _, paths = release
    for name in (
        "eval_int8.json",
        "profile.json",
        "validation.json",
        "topology.json",
        "sensitivity.json",
        "layer_wise_error.csv",
        "predictions_float.png",
    ):
        paths.report(name).unlink()
    report = read_json(paths.report("eval_float.json"))
    del report["map"], report["prior"]
    report["skipped"]["map"] = {"has_labels": False, "reason": "no held-out sample has a label"}
    write_json(paths.report("eval_float.json"), report)
    text = text_of(release)
    assert "map was not evaluated: no held-out sample has a label" in text
    assert "No validation report" in text and "No table of layer errors" in text and "no INT8 result" in text


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_input_is_named_and_the_last_page_stays(release: Release, damage: str) -> None:
    config, paths = release
    run(config, paths)
    before = paths.report("release.html").read_bytes()
    gate: Path = paths.report("gate.json")
    if damage == "missing":
        gate.unlink()
    else:
        gate.write_text('{"passed": tr')
    with pytest.raises(DataError, match=r"gate\.json"):
        run(config, paths)
    assert paths.report("release.html").read_bytes() == before


def test_bars_are_sorted_and_in_proportion() -> None:
    svg = str(bars({"small": 1.0, "large": 3.0, "nothing": 0.0}, "ms"))
    assert svg.index("large") < svg.index("small") and "nothing" not in svg
    large, small = (float(width) for width in re.findall(r'<rect x="250" y="\d+" width="([\d.]+)"', svg))
    assert large == pytest.approx(3 * small, abs=0.2)
    assert "75.0 %" in svg


def test_a_curve_needs_two_points() -> None:
    assert str(curve([(0.0, 1.0)], "step", "loss")) == ""
    assert "polyline" in str(curve([(0.0, 2.0), (10.0, 1.0)], "step", "loss"))
