"""Figures as PNG files. Equal inputs give equal bytes: no time stamp and no version is stored in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.io import atomic_path

DPI = 100


def new_figure(width_in: float, height_in: float) -> Any:
    """An empty matplotlib figure that is drawn without a window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})
