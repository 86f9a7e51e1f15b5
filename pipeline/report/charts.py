"""Small charts as inline SVG. Colours are CSS variables of the page, so that they follow its light, dark and print styles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

WIDTH = 720
_LABEL = 250
_ROW = 24


def bars(values: Mapping[str, float], unit: str) -> Markup:
    """Horizontal bars, largest first, with the value and its share of the sum written beside each; values below 0.05 % of the sum are left out."""
    total = sum(values.values()) or 1.0
    shown = sorted(((name, value) for name, value in values.items() if value / total >= 5e-4), key=lambda item: (-item[1], item[0]))
    longest = max((value for _, value in shown), default=1.0)
    space = WIDTH - _LABEL - 150
    rows = []
    for i, (name, value) in enumerate(shown):
        y = i * _ROW
        length = space * value / longest
        rows.append(
            f'<text x="{_LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{_LABEL}" y="{y + 4}" width="{length:.1f}" height="14" rx="2" class="bar"/>'
            f'<text x="{_LABEL + length + 6:.1f}" y="{y + 15}" class="value">{value:.3f} {escape(unit)} · {100 * value / total:.1f} %</text>'
        )
    return Markup(f'<svg class="chart" viewBox="0 0 {WIDTH} {max(1, len(shown)) * _ROW}" role="img">{"".join(rows)}</svg>')


def curve(points: Sequence[tuple[float, float]], x_label: str, y_label: str) -> Markup:
    """A line chart with the first, last and extreme values on its axes; nothing for fewer than two points."""
    if len(points) < 2:
        return Markup("")
    height, left, bottom = 170, 60, 28
    x_low, x_high = points[0][0], points[-1][0]
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    x_scale = (WIDTH - left - 20) / ((x_high - x_low) or 1.0)
    y_scale = (height - bottom - 12) / ((y_high - y_low) or 1.0)
    path = " ".join(f"{left + (x - x_low) * x_scale:.1f},{height - bottom - (y - y_low) * y_scale:.1f}" for x, y in points)
    base = height - bottom
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img">'
        f'<line x1="{left}" x2="{WIDTH - 20}" y1="{base}" y2="{base}" class="axis"/><line x1="{left}" x2="{left}" y1="12" y2="{base}" class="axis"/>'
        f'<polyline points="{path}" class="line"/>'
        f'<text x="{left - 6}" y="18" text-anchor="end">{y_high:.3g}</text><text x="{left - 6}" y="{base}" text-anchor="end">{y_low:.3g}</text>'
        f'<text x="{left}" y="{height - 10}">{x_low:.0f}</text><text x="{WIDTH - 20}" y="{height - 10}" text-anchor="end">{x_high:.0f}</text>'
        f'<text x="{(WIDTH + left) / 2:.0f}" y="{height - 10}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text x="{left + 8}" y="18">{escape(y_label)}</text></svg>'
    )
