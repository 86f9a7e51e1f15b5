"""Where each stage reads and writes, relative to the project root. The table in docs/architecture.md says what the files hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Paths:
    """Files of one working tree; `root` is the directory that holds dvc.yaml (stages run with it as current directory)."""

    root: Path

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def synthetic_dataroot(self) -> Path:
        return self.root / "data" / "nuscenes"

    @property
    def dataset_json(self) -> Path:
        return self.root / "data" / "dataset.json"

    @property
    def index_dir(self) -> Path:
        return self.root / "data" / "index"

    @property
    def maps_dir(self) -> Path:
        return self.root / "data" / "maps"

    @property
    def vectorized_dir(self) -> Path:
        return self.root / "data" / "maps_vectorized"

    @property
    def image_cache_dir(self) -> Path:
        """Decoded, resized images; a cache keyed by content, outside DVC's outputs, safe to delete."""
        return self.root / "data" / "cache"

    @property
    def float_dir(self) -> Path:
        return self.root / "models" / "float"

    @property
    def checkpoint_dir(self) -> Path:
        """Resumable training state, outside DVC's outputs because DVC deletes outputs before a run."""
        return self.root / "models" / "checkpoints"

    @property
    def onnx(self) -> Path:
        return self.root / "models" / "multitask.onnx"

    @property
    def contract(self) -> Path:
        return self.root / "models" / "contract.json"

    @property
    def calibration(self) -> Path:
        return self.root / "models" / "calibration.npz"

    @property
    def int8_onnx(self) -> Path:
        return self.root / "models" / "multitask_int8.onnx"

    @property
    def release_dir(self) -> Path:
        """What this checkout knows about releases: champion.json and log.jsonl, both kept in git."""
        return self.root / "release"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    def report(self, name: str) -> Path:
        """A file in reports/, for example `report("gate.json")`."""
        return self.reports / name

    def build_dir(self, chip: str) -> Path:
        return self.root / "build" / chip
