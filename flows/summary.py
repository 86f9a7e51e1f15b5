"""Pages that flows show in Prefect, as Markdown."""

from __future__ import annotations


def stage_table(lines: list[tuple[str, str, float | None]]) -> str:
    """One row per stage: name, what happened, seconds (empty where not measured by itself)."""
    rows = [f"| {name} | {state} | {'' if seconds is None else f'{seconds:.1f}'} |" for name, state, seconds in lines]
    return "\n".join(["| stage | state | seconds |", "|---|---|---|", *rows])
