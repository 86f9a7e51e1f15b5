"""Profile the compiled plan: simulated latency by head, module, layer and unit, bandwidth, memory, timeline.

    python -m pipeline.stages.profile

Reads build/<chip>/plan.json. Writes reports/profile.json, reports/profile.html and reports/trace.json (opens in ui.perfetto.dev).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import Config
from pipeline.io import write_json, write_text
from pipeline.j6.chip import load_chip
from pipeline.j6.conditions import load_scenario
from pipeline.j6.plan import read_plan
from pipeline.j6.profile import profile
from pipeline.j6.report import html_report
from pipeline.j6.trace import trace_document
from pipeline.paths import Paths
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """What the stage found; printed as one line."""

    chip: str
    latency_ms: float
    fps: float
    profile_hash: str

    def __str__(self) -> str:
        return f"simulated {self.latency_ms:.2f} ms, {self.fps:.1f} FPS on {self.chip}, chip profile {self.profile_hash[:12]}"


def run(config: Config, paths: Paths) -> Result:
    """Profile the plan of `config.j6.chip`.

    Raises:
        DataError: the plan is missing or damaged.
        ConfigError: the scenario file has a wrong field.
    """
    plan = read_plan(paths.build_dir(load_chip(config.j6.chip).name) / "plan.json")
    scenario = load_scenario(Path(config.j6.scenario)) if config.j6.scenario else None
    document = profile(plan, scenario, config.j6.design_fps)
    write_json(paths.report("profile.json"), document)
    write_text(paths.report("profile.html"), html_report(plan, document))
    write_json(paths.report("trace.json"), trace_document(plan))
    return Result(plan.chip["name"], document["latency_ms"], document["fps"], plan.profile_hash)


def main() -> int:
    """Entry point of `python -m pipeline.stages.profile`."""
    return stage_main("profile", run)


if __name__ == "__main__":
    sys.exit(main())
