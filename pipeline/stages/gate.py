"""Judge the release rules.

    python -m pipeline.stages.gate

Reads the JSON files in reports/ that the rules of params.yaml (section gate) name, and release/champion.json. Writes reports/gate.json. The stage
succeeds whatever the verdict, so that the report can show it: a release that did not pass is refused where it would have an effect, at promotion.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.champion import read_champion, registered_name
from pipeline.config import Config
from pipeline.gate import judge
from pipeline.io import write_json
from pipeline.paths import Paths
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """The verdict; printed as one line."""

    passed: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "passed" if self.passed else f"not passed ({'; '.join(self.reasons)})"


def run(config: Config, paths: Paths) -> Result:
    """Judge all rules."""
    champion = read_champion(paths, registered_name(config, config.j6.chip))
    verdict = judge(config.gate.rules, paths.reports, config.model.tasks, champion.reports if champion else None, config.gate.checklist)
    write_json(paths.report("gate.json"), verdict)
    return Result(verdict["passed"], tuple(verdict["reasons"]))


def main() -> int:
    """Entry point of `python -m pipeline.stages.gate`."""
    return stage_main("gate", run)


if __name__ == "__main__":
    sys.exit(main())
