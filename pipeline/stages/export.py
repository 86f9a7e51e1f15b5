"""Export the trained model to ONNX: python -m pipeline.stages.export

Reads models/float/model.pt; writes models/multitask.onnx and models/contract.json.
"""

from __future__ import annotations

import sys

from pipeline.config import Config
from pipeline.models.export import ExportResult, export
from pipeline.models.weights import load_model
from pipeline.paths import Paths
from pipeline.stages.main import stage_main


def run(config: Config, paths: Paths) -> ExportResult:
    """Export; the network is the one that was trained, whatever params.yaml says now."""
    return export(load_model(paths.float_dir / "model.pt"), paths.onnx, paths.contract)


def main() -> int:
    """Command line."""
    return stage_main("export", run)


if __name__ == "__main__":
    sys.exit(main())
