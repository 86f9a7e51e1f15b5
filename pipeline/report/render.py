"""The release report: one HTML file without script or outside resource, equal bytes for equal content."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.report.charts import bars, curve
from pipeline.report.content import Content, class_rows, range_rows, score_rows
from pipeline.taxonomy import TASKS

NOTHING = "–"


def render(content: Content) -> str:
    """The report as HTML text."""
    environment = Environment(
        loader=PackageLoader("pipeline.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(num=number, percent=percent, times=times, count=count, size=size, words=words)
    heads = [head for head in TASKS if head in content.eval_float]
    return environment.get_template("release.html.j2").render(
        content=content,
        scores=score_rows(content),
        heads=heads,
        by_class={head: class_rows(content, head) for head in heads},
        by_range=range_rows(content) if "detection" in heads else [],
        loss=_loss_chart(content),
        by_head=bars(content.profile["by_head_ms"], "ms") if content.profile else None,
        by_module=bars(content.profile.get("by_module_ms", {}), "ms") if content.profile else None,
    )


def number(value: float | None, digits: int = 3) -> str:
    """A number with fixed digits; a dash for None."""
    return NOTHING if value is None else f"{float(value):.{digits}f}"


def percent(ratio: float | None, digits: int = 1) -> str:
    """A ratio as per cent; a dash for None."""
    return NOTHING if ratio is None else f"{100 * float(ratio):.{digits}f} %"


def times(ratio: float | None) -> str:
    """A ratio as a factor; a dash for None."""
    return NOTHING if ratio is None else f"{float(ratio):.1f} ×"


def count(value: int | None) -> str:
    """A count with thin spaces between thousands; a dash for None."""
    return NOTHING if value is None else f"{int(value):,}".replace(",", "\u2009")


def size(value: float | None) -> str:
    """Bytes in MB (1e6); a dash for None."""
    return NOTHING if value is None else f"{float(value) / 1e6:.2f} MB"


def words(name: str) -> str:
    """A class or field name as words."""
    return name.replace("_", " ")


def _loss_chart(content: Content) -> str:
    points = [(float(row["step"]), float(row["loss"])) for row in content.curves if row.get("step") and row.get("loss")]
    return curve(points, "step", "loss")
