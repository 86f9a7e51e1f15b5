"""The profile as one self-contained HTML page: no script, no outside resource. Every figure on it is simulated and says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import log10
from typing import Any

from pipeline.j6.plan import Plan

WIDTH, LANE_HEIGHT, LABEL = 1100, 22, 70
MIN_SLICE = 2e-4  # share of the makespan below which a slice is not drawn
COLORS = {
    "TAE": "#2f6fb0", "VAE": "#3a9b74", "AAE": "#7b5ea7", "DTE": "#c98a1b", "SPU": "#a44a6b", "VPU": "#6b8e23", "CPU": "#b23b3b",
    "LOAD": "#5f7f95", "STREAM": "#8fa8b8", "STORE": "#46616f", "APM": "#9a9a9a",
}  # fmt: skip
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:1180px;padding:0 16px;color:#1c2733;background:#fff}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:28px 0 8px}small,.muted{color:#5b6874}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:16px 0}.tile{border:1px solid #d5dce2;border-radius:6px;padding:10px 14px;min-width:130px}
.tile b{display:block;font-size:20px}table{border-collapse:collapse;width:100%;font-size:12.5px}
th,td{padding:3px 8px;border-bottom:1px solid #e6ebef;text-align:right;white-space:nowrap}th:first-child,td:first-child{text-align:left}
td.text{text-align:left;white-space:normal;word-break:break-all}.scroll{overflow-x:auto}svg{max-width:100%;height:auto}
.note{background:#fff6e0;border:1px solid #ecd9a0;border-radius:6px;padding:8px 12px}
"""


def html_report(plan: Plan, document: dict[str, Any]) -> str:
    """Render a profile document (`profile.profile`) and its plan."""
    body = "".join(
        (
            _header(document),
            _tiles(document),
            f"<p><b>Bottleneck.</b> {escape(document['bottleneck'])}.</p>",
            "<ul>" + "".join(f"<li>{escape(words)}</li>" for words in document["findings"]) + "</ul>",
            _section("What would pay most", _suggestions(document["suggestions"])),
            _section("Time by head", _bars(document["by_head_ms"])),
            _section("Time by module", _bars(document["by_module_ms"])),
            _section("Time by operator, fused pieces together", _bars(_largest(document["by_op_ms"]))),
            _section("Units and memory bus", _units(document["by_unit"])),
            _section("Conditions", _conditions(document["conditions"])),
            _section("Timeline", _timeline(plan)),
            _section("On-chip memory while each block runs", _staircase(plan)),
            _section("DDR bandwidth over the frame", _bandwidth(document["summary"]["interval info"])),
            _section("Roofline", _roofline(plan)),
            _section("Chains that run in pieces", _chains(document["chains"])),
            _section("Segments", _segments(document["summary"]["performance"]["by segment"])),
            _section("Memory", _memory(document["memory"])),
            _section("Operators on the CPU", _cpu(document["cpu_blocks"])),
            _section("Layers in execution order", _layers(document["layers"])),
            _section("Notes", "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in document["notes"]) + "</ul>"),
        )
    )
    title = escape(f"{document['model']['name']} on {document['chip']}: simulated profile")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head><body>{body}</body></html>\n'
    )


def _header(document: dict[str, Any]) -> str:
    model = document["model"]
    return (
        f"<h1>{escape(model['name'])} on {escape(document['chip'])} ({escape(document['march'])})</h1>"
        f"<small>model {model['hash'][:12]} · opset {model['opset']} · chip profile {document['profile_hash'][:12]} · "
        f"plan schema {document['plan_schema']} · {escape(_options(document['options']))}</small>"
        '<p class="note">All figures are <b>simulated</b> by a hardware model fitted to public measurements; none was measured on a chip.</p>'
    )


def _tiles(document: dict[str, Any]) -> str:
    conditions = document["conditions"]
    entries = (
        ("latency", f"{document['latency_ms']:.2f} ms"),
        ("frames/s, one in flight", f"{document['fps']:.1f}"),
        ("frames/s, two in flight", f"{document['fps_two_in_flight']:.1f}"),
        (f"p50 / p99, {conditions['scenario']}", f"{conditions['p50_ms']:.2f} / {conditions['p99_ms']:.2f} ms"),
        ("DDR a frame", f"{document['ddr_bytes_per_frame'] / 1e6:.1f} MB"),
        ("DDR at design rate", f"{document['ddr_gbps_at_design_fps']:.2f} GB/s"),
    )
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{value}</b>{escape(label)}<br><small>simulated</small></div>' for label, value in entries)
        + "</div>"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: frozenset[int] = frozenset()) -> str:
    cells = "".join(
        "<tr>" + "".join(f"<td{' class=text' if i in text_columns else ''}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{"".join(f"<th>{escape(name)}</th>" for name in head)}</tr>{cells}</table></div>'


def _suggestions(entries: Sequence[dict[str, Any]]) -> str:
    if not entries:
        return '<p class="muted">Nothing stands out.</p>'
    return _table(
        ("worst layer", "layers", "saves at most (ms, simulated)", "change"),
        ((e["layer"], str(e["layers"]), f"{e['saves_ms']:.3f}", e["change"]) for e in entries),
        frozenset({0, 3}),
    )


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _largest(values: dict[str, float], count: int = 12) -> dict[str, float]:
    """The largest entries, and the sum of the rest."""
    ranked = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(value for _, value in ranked[count:])
    return dict(ranked[:count]) | ({"(others)": rest} if rest else {})


def _conditions(conditions: dict[str, Any]) -> str:
    """Latency under the scenario, by step where it has steps, and what its rules did."""
    entries = [
        ("all frames", conditions),
        *((f"{step['temperature_c']:g} C, clock x {step['compute_scale']:g}", step) for step in conditions.get("steps", ())),
    ]
    keys = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms")
    rows = [(name, *(f"{values[key]:.2f}" if key in values else "-" for key in keys)) for name, values in entries]
    counts = [
        f"{conditions['dropped_frames']} of {conditions['frames']} frames dropped",
        f"{conditions['held_frames']} answered with the last result",
    ]
    counts += [f"rule '{name}': {count} frames" for name, count in conditions["rule_frames"].items()]
    title = f"<p>{escape(conditions['scenario'])} ({escape(conditions['source'])}), seed {conditions['seed']}: {escape('; '.join(counts))}.</p>"
    return title + _table(("conditions", "mean (ms)", "p50", "p90", "p99", "max"), rows)


def _chains(chains: Sequence[dict[str, Any]]) -> str:
    if not chains:
        return '<p class="muted">None.</p>'
    head = ("first block", "last block", "blocks", "pieces", "kind", "halo (kB)", "workspace (kB)", "weight loads")
    return _table(
        head,
        (
            (
                c["first"], c["last"], str(c["blocks"]), str(c["pieces"]), c["kind"], f"{c['halo_bytes'] / 1e3:.1f}",
                f"{c['workspace_bytes'] / 1e3:.1f}", str(c["weight_passes"]),
            )
            for c in chains
        ),
        frozenset({0, 1}),
    )  # fmt: skip


def _segments(segments: Sequence[dict[str, Any]]) -> str:
    return _table(("segment", "blocks", "time (us)"), ((str(s["segment"]), str(s["blocks"]), f"{s['latency (us)']:.1f}") for s in segments))


def _bandwidth(intervals: Sequence[dict[str, Any]]) -> str:
    """Bars of loaded and stored GB/s in equal parts of the makespan."""
    if not intervals:
        return '<p class="muted">Nothing runs.</p>'
    totals = [entry["ddr loading bandwidth (GB/s)"] + entry["ddr storing bandwidth (GB/s)"] for entry in intervals]
    top, width = max(*totals, 1e-9), (WIDTH - LABEL) / len(intervals)
    bars = []
    for entry, total in zip(intervals, totals, strict=True):
        x, load = LABEL + entry["number"] * width, entry["ddr loading bandwidth (GB/s)"]
        title = escape(f"load {load:.1f}, store {total - load:.1f} GB/s")
        for value, color in ((total, COLORS["STORE"]), (load, COLORS["LOAD"])):
            bars.append(
                f'<rect x="{x:.1f}" y="{110 - 100 * value / top:.1f}" width="{width - 2:.1f}" height="{100 * value / top:.1f}" fill="{color}">'
            )
            bars.append(f"<title>{title}</title></rect>")
    return f'<svg viewBox="0 0 {WIDTH} 120" width="{WIDTH}"><text x="0" y="18" font-size="11">{top:.1f} GB/s</text>{"".join(bars)}</svg>'


def _bars(values: dict[str, float]) -> str:
    total = sum(values.values()) or 1.0
    rows = []
    for row, (name, value) in enumerate(sorted(values.items(), key=lambda item: (-item[1], item[0]))):
        y, length = 4 + row * LANE_HEIGHT, 620 * value / total
        rows.append(
            f'<text x="0" y="{y + 13}" font-size="12">{escape(name)}</text>'
            f'<rect x="300" y="{y}" width="{length:.1f}" height="16" fill="{COLORS["TAE"]}"/>'
            f'<text x="{306 + length:.1f}" y="{y + 13}" font-size="12">{value:.3f} ms · {100 * value / total:.1f} %</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {8 + len(values) * LANE_HEIGHT}" width="{WIDTH}">{"".join(rows)}</svg>'


def _units(by_unit: dict[str, dict[str, float]]) -> str:
    return _table(
        ("lane", "busy (ms)", "share of makespan"), ((name, f"{u['busy_ms']:.3f}", f"{100 * u['utilization']:.1f} %") for name, u in by_unit.items())
    )


def _timeline(plan: Plan) -> str:
    makespan = plan.schedule.makespan_ms or 1.0
    lanes = [lane for lane in COLORS if any(task.lane == lane for task in plan.schedule.tasks)]
    parts = [f'<text x="0" y="{16 + i * LANE_HEIGHT}" font-size="12">{lane}</text>' for i, lane in enumerate(lanes)]
    scale = (WIDTH - LABEL) / makespan
    for task in plan.schedule.tasks:
        length = task.end_ms - task.start_ms
        if length < MIN_SLICE * makespan:
            continue
        x, y = LABEL + task.start_ms * scale, 4 + lanes.index(task.lane) * LANE_HEIGHT
        label = escape(f"{plan.blocks[task.block].name}: {length * 1e3:.1f} us")
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(length * scale, 0.3):.2f}" height="16" fill="{COLORS[task.lane]}"><title>{label}</title></rect>'
        )
    bottom = 4 + len(lanes) * LANE_HEIGHT
    ticks = "".join(
        f'<text x="{LABEL + (WIDTH - LABEL - 40) * i / 5:.0f}" y="{bottom + 14}" font-size="11">{makespan * i / 5:.2f} ms</text>' for i in range(6)
    )
    return f'<svg viewBox="0 0 {WIDTH} {bottom + 20}" width="{WIDTH}">{"".join(parts)}{ticks}</svg>'


def _staircase(plan: Plan) -> str:
    makespan, top = plan.schedule.makespan_ms or 1.0, max([block.onchip_bytes for block in plan.blocks] + [plan.memory.onchip_capacity_bytes, 1])
    points, start = [], 0.0
    for block, end in zip(plan.blocks, plan.schedule.finish_ms, strict=True):
        level = 130 - 120 * block.onchip_bytes / top
        points += [f"{LABEL + (WIDTH - LABEL) * start / makespan:.1f},{level:.1f}", f"{LABEL + (WIDTH - LABEL) * end / makespan:.1f},{level:.1f}"]
        start = end
    limit = 130 - 120 * plan.memory.onchip_capacity_bytes / top
    return (
        f'<svg viewBox="0 0 {WIDTH} 140" width="{WIDTH}"><polyline points="{" ".join(points)}" fill="none" stroke="{COLORS["TAE"]}"/>'
        f'<line x1="{LABEL}" x2="{WIDTH}" y1="{limit:.1f}" y2="{limit:.1f}" stroke="{COLORS["CPU"]}" stroke-dasharray="4"/>'
        f'<text x="0" y="{limit + 4:.1f}" font-size="11">{plan.memory.onchip_capacity_bytes / 2**20:.1f} MiB</text></svg>'
    )


def _roofline(plan: Plan) -> str:
    """Blocks by MACs per DDR byte (x) and achieved TOPS (y), both logarithmic, under the chip's two nominal limits."""
    peak, bandwidth = (
        plan.chip["peak_tops_int8"] / plan.chip["cores"] * plan.options["core_num"],
        plan.chip["ddr_peak_gbps"] * plan.chip["ddr_efficiency"] / 1e3,
    )
    x_range, y_range = (-1.0, 5.0), (-3.0, 3.0)

    def place(intensity: float, tops: float) -> tuple[float, float]:
        x = (min(max(log10(intensity), x_range[0]), x_range[1]) - x_range[0]) / (x_range[1] - x_range[0])
        y = (min(max(log10(tops), y_range[0]), y_range[1]) - y_range[0]) / (y_range[1] - y_range[0])
        return LABEL + 700 * x, 290 - 280 * y

    dots = []
    for block, share in zip(plan.blocks, plan.schedule.increments_ms(), strict=True):
        if block.macs and share > 0:
            x, y = place(2 * block.macs / max(block.ddr_bytes, 1), 2 * block.macs / share / 1e9)
            dots.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLORS["TAE"]}" fill-opacity=".5"><title>{escape(block.name)}</title></circle>'
            )
    corners = [place(10 ** x_range[0], bandwidth * 10 ** x_range[0]), place(peak / bandwidth, peak), place(10 ** x_range[1], peak)]
    roof = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return (
        f'<svg viewBox="0 0 {WIDTH} 310" width="{WIDTH}"><polyline points="{roof}" fill="none" stroke="{COLORS["CPU"]}"/>{"".join(dots)}'
        f'<text x="{LABEL}" y="306" font-size="11">0.1 operation a DDR byte</text><text x="{LABEL + 640}" y="306" font-size="11">100,000</text>'
        f'<text x="0" y="14" font-size="11">1000 TOPS</text><text x="0" y="290" font-size="11">0.001</text></svg>'
    )


def _memory(memory: dict[str, Any]) -> str:
    rows = [(name.removesuffix("_bytes"), f"{value / 1e6:.3f}", "", "") for name, value in memory.items() if isinstance(value, int)]
    rows += [
        (
            name,
            f"{memory[name]['peak_bytes'] / 1e6:.3f}",
            f"{memory[name]['lower_bound_bytes'] / 1e6:.3f}",
            f"{memory[name]['first_fit_bytes'] / 1e6:.3f}",
        )
        for name in ("temporary", "onchip")
    ]
    return _table(("memory", "MB", "lower bound (MB)", "first fit (MB)"), rows)


def _cpu(blocks: Sequence[dict[str, Any]]) -> str:
    if not blocks:
        return '<p class="muted">None.</p>'
    return _table(
        ("layer", "operator", "reason", "ms (simulated)"), ((b["name"], b["kind"], b["reason"], f"{b['ms']:.3f}") for b in blocks), frozenset({0, 2})
    )


def _layers(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "layer", "operator", "unit", "output", "dtype", "ms", "%", "compute", "load", "stream", "store", "bound by", "MMAC", "of peak", "padding",
        "in kB", "weights kB", "out kB", "on chip kB", "pieces",
    )  # fmt: skip
    judged = bool(rows) and "own_sqnr_db" in rows[0]
    quality = ("SQNR own dB", "SQNR dB") if judged else ()
    body = (
        (
            r["layer"], r["op"], r["unit"], r["output_shape"], r["dtype"], f"{r['ms']:.4f}", f"{r['percent']:.2f}",
            f"{r['computing cost (no DDR)']:.4f}", f"{r['load cost']:.4f}", f"{r['stream cost']:.4f}", f"{r['store cost']:.4f}",
            r["bound_by"], f"{r['macs'] / 1e6:.2f}", f"{100 * r['utilization']:.1f} %", f"{100 * r['padding_waste']:.0f} %",
            f"{(r['loaded_bytes'] - r['weight_bytes']) / 1e3:.1f}", f"{r['weight_bytes'] / 1e3:.1f}", f"{r['stored_bytes'] / 1e3:.1f}",
            f"{r['onchip_bytes'] / 1e3:.0f}", str(r["pieces"]), *(_decibel(r[name]) for name in ("own_sqnr_db", "accumulated_sqnr_db") if judged),
        )
        for r in rows
    )  # fmt: skip
    return _table((*head, *quality), body, frozenset({0, 1}))


def _decibel(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
