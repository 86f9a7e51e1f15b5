"""Everything the release report shows, read from files: nothing is computed here but hashes, ratios and the order of tables."""

from __future__ import annotations

import base64
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.errors import file_error
from pipeline.io import canonical_hash, read_json, sha256_file
from pipeline.paths import Paths
from pipeline.taxonomy import TASKS

WORST_LAYERS = 15
# Label and JSON name of the headline scores of each head, in the order of the table.
SCORES: dict[str, tuple[tuple[str, str], ...]] = {
    "detection": (("mAP", "mAP"), ("NDS", "NDS")),
    "map": (("Chamfer AP", "AP"),),
    "occupancy": (("mIoU", "mIoU"), ("geometric IoU", "geometric_IoU")),
}
CLASS_SCORE = {"detection": "AP", "map": "AP", "occupancy": "IoU"}


@dataclass(frozen=True)
class ScoreRow:
    """One score in its float and INT8 form and for the constant prior. None: not measured."""

    head: str
    label: str
    float_value: float | None
    int8_value: float | None
    prior: float | None

    @property
    def kept(self) -> float | None:
        """INT8 / float."""
        return self.int8_value / self.float_value if self.int8_value is not None and self.float_value else None

    @property
    def times_prior(self) -> float | None:
        """float / prior."""
        return self.float_value / self.prior if self.float_value is not None and self.prior else None


@dataclass(frozen=True)
class Content:
    """The report's input. Optional parts are None or empty where their file does not exist."""

    gate: dict[str, Any]
    dataset: dict[str, Any]
    validation: dict[str, Any] | None
    topology: dict[str, Any] | None
    eval_float: dict[str, Any]
    eval_int8: dict[str, Any] | None
    robustness: dict[str, Any] | None
    profile: dict[str, Any] | None
    training: dict[str, Any] | None
    curves: list[dict[str, str]]
    layer_errors: list[dict[str, str]]
    sensitivity: dict[str, Any] | None
    picture_base64: str | None
    provenance: list[tuple[str, str]]


def read_content(config: Config, paths: Paths) -> Content:
    """Read all files of the report.

    Raises:
        DataError: gate.json, dataset.json or eval_float.json is missing, or any file is damaged.
    """
    profile = _optional_json(paths.report("profile.json"))
    dataset = read_json(paths.dataset_json)
    picture = paths.report("predictions_float.png")
    return Content(
        gate=read_json(paths.report("gate.json")),
        dataset=dataset,
        validation=_optional_json(paths.report("validation.json")),
        topology=_optional_json(paths.report("topology.json")),
        eval_float=read_json(paths.report("eval_float.json")),
        eval_int8=_optional_json(paths.report("eval_int8.json")),
        robustness=_optional_json(paths.report("robustness.json")),
        profile=profile,
        training=_optional_json(paths.float_dir / "metrics.json"),
        curves=_optional_csv(paths.float_dir / "curves.csv"),
        layer_errors=_optional_csv(paths.report("layer_wise_error.csv"))[:WORST_LAYERS],
        sensitivity=_optional_json(paths.report("sensitivity.json")),
        picture_base64=base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else None,
        provenance=_provenance(config, paths, dataset, profile),
    )


def score_rows(content: Content) -> list[ScoreRow]:
    """Headline scores of the heads that were evaluated."""
    prior = content.eval_float.get("prior", {})
    return [
        ScoreRow(head, label, *(_value(report, head, key) for report in (content.eval_float, content.eval_int8 or {}, prior)))
        for head in TASKS
        if head in content.eval_float
        for label, key in SCORES[head]
    ]


def class_rows(content: Content, head: str) -> list[ScoreRow]:
    """AP or IoU of every class of a head that occurs in the ground truth."""
    score = CLASS_SCORE[head]
    reports = (content.eval_float, content.eval_int8 or {}, content.eval_float.get("prior", {}))
    classes = content.eval_float[head]["per_class"]
    return [
        ScoreRow(head, name, *(_value(report, head, "per_class", name, score) for report in reports))
        for name, row in classes.items()
        if row["ground_truth"]
    ]


def range_rows(content: Content) -> list[ScoreRow]:
    """Detection mAP by distance, then by size."""
    reports = (content.eval_float, content.eval_int8 or {}, content.eval_float.get("prior", {}))
    detection = content.eval_float["detection"]
    return [
        ScoreRow("detection", name, *(_value(report, "detection", table, name, "mAP") for report in reports))
        for table in ("per_range", "per_size")
        for name in detection.get(table, {})
    ]


def _value(report: dict[str, Any], *keys: str) -> float | None:
    node: Any = report
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, int | float) else None


def _optional_json(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.is_file() else None


def _optional_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, empty where there is none."""
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return list(csv.DictReader(stream))
    except (csv.Error, UnicodeDecodeError) as error:
        raise file_error(path, f"not a readable CSV table ({error})") from error


def _provenance(config: Config, paths: Paths, dataset: dict[str, Any], profile: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What this release was made from. The git commit is not among them: it would change the report without changing the release."""
    rows = [("data fingerprint", str(dataset.get("fingerprint", "unknown"))), ("parameters (params.yaml)", parameters_hash(config))]
    files: Sequence[tuple[str, Path]] = (
        ("float model (models/float/model.pt)", paths.float_dir / "model.pt"),
        ("float ONNX (models/multitask.onnx)", paths.onnx),
        ("INT8 ONNX (models/multitask_int8.onnx)", paths.int8_onnx),
    )
    rows += [(label, sha256_file(path)) for label, path in files if path.is_file()]
    if profile is not None:
        rows.append((f"chip profile ({profile['chip']})", str(profile["profile_hash"])))
    return rows


def parameters_hash(config: Config) -> str:
    """Hex sha256 of all parameters; layout and comments of the file do not matter."""
    return canonical_hash(config.model_dump(mode="json"))
