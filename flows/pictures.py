"""Pictures for Prefect's pages. They travel inside the page, as data URIs: a page that is read without a login to MLflow, or while MLflow is away,
shows them all the same. Nothing here knows Prefect.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

from flows.pages import stage_outputs
from pipeline.figures import new_figure
from pipeline.paths import Paths
from pipeline.tracking.release import read_curves

WIDEST_PX = 1000
JPEG_QUALITY = 80
CURVES = ("loss", "detection", "map", "occupancy")


def stage_pictures(paths: Paths, stage: str) -> dict[str, str]:
    """{name: data URI} of what a stage of dvc.lock has drawn, and of the curves of a training."""
    outputs = stage_outputs(paths.root, stage)
    pictures = {output.stem: picture_uri(paths.root / output) for output in outputs if output.suffix == ".png"}
    curves = paths.float_dir / "curves.csv"
    trained = any(curves.is_relative_to(paths.root / output) for output in outputs)
    return pictures | ({"training_curves": curves_uri(curves)} if trained else {})


def picture_uri(file: Path) -> str:
    """A picture, made smaller where it is wider than `WIDEST_PX`."""
    from PIL import Image

    with Image.open(file) as picture:
        small = picture.convert("RGB")
        small.thumbnail((WIDEST_PX, WIDEST_PX * 4))
    content = io.BytesIO()
    small.save(content, "JPEG", quality=JPEG_QUALITY)
    return _uri("jpeg", content.getvalue())


def curves_uri(file: Path) -> str:
    """Loss of a training, the whole and by head, over its steps."""
    figure = new_figure(width_in=9, height_in=4)
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    points = list(read_curves(file))
    for name in CURVES:
        line = [(point.step, point.value) for point in points if point.name == f"curve/{name}"]
        if line:
            axes.plot(*zip(*line, strict=True), label=name)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return _uri("png", content.getvalue())


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
