"""Accuracy of the hardware model: measured against simulated latency, in sample and with each model family held out.

    python benchmarks/j6_accuracy.py --measured CSV --zoo DIR [--sweep-l1m]

Writes docs/j6-accuracy.csv (every row) and docs/j6-accuracy.svg (the picture of docs/j6-model.md), prints the summary. `--sweep-l1m`
fits again for on-chip memories of 0.5 to 4 MiB, because the size is not published.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline.j6.fit import Simulator, fit_values
from pipeline.j6.measured import CHIP_OF_MARCH, read_measured
from pipeline.j6.validate import error_document, leave_out, validate

DOCS = Path(__file__).resolve().parents[1] / "docs"
BOOTSTRAP_DRAWS = 2000
SUMMARY = ("count", "median_pct", "p90_pct", "mape_pct", "max_pct", "bias_pct", "spearman")


def write_rows(document: dict[str, Any], path: Path) -> None:
    fields = ("model", "march", "threads", "bpu_only", "measured_ms", "simulated_ms", "error_pct", "held_out_ms", "held_out_error_pct")
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fields, lineterminator="\n")
        writer.writeheader()
        for row, held_out in zip(document["rows"], document["cross_validation"]["rows"], strict=True):
            values = {name: row[name] for name in fields if name in row}
            writer.writerow({**values, "held_out_ms": held_out["simulated_ms"], "held_out_error_pct": held_out["error_pct"]})


def draw(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "j6-accuracy"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 6))
    for march, colour in (("nash-e", "#c98a1b"), ("nash-m", "#2f6fb0")):
        for threads, marker in ((1, "o"), (2, "s")):
            rows = [r for r in document["cross_validation"]["rows"] if r["march"] == march and r["threads"] == threads]
            label = f"{march}, {threads} in flight"
            axes.scatter(
                [r["measured_ms"] for r in rows], [r["simulated_ms"] for r in rows], s=18, marker=marker, color=colour, alpha=0.6, label=label
            )
    limits = [0.15, 60]
    axes.plot(limits, limits, color="#777", linewidth=1)
    axes.fill_between(limits, [0.88 * v for v in limits], [1.12 * v for v in limits], color="#777", alpha=0.12, label="within 12 %")
    axes.set(
        xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel="measured latency (ms)", ylabel="simulated latency (ms), model family held out"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def print_held_out(options: argparse.Namespace) -> None:
    """Errors with every third model, each model and each board held out."""
    rows, _ = read_measured(options.measured, options.zoo)
    models = sorted({row.model for row in rows})
    groups = {
        "every third model": [str(models.index(row.model) % 3) for row in rows],
        "each model": [row.model for row in rows],
        "each board": [row.march for row in rows],
    }
    simulator = Simulator(rows)
    for name, of_row in groups.items():
        document = error_document(rows, leave_out(simulator, of_row), [])
        print(f"{name} held out", json.dumps({key: document[key] for key in SUMMARY}))


def print_bootstrap(document: dict[str, Any]) -> None:
    """95 % intervals of median and p90 of the error with families held out: models and, harder, whole families drawn with replacement."""
    rows, random = document["cross_validation"]["rows"], np.random.default_rng(0)
    for key in ("model", "family"):
        names = sorted({row[key] for row in rows})
        errors = {name: [abs(row["error_pct"]) for row in rows if row[key] == name] for name in names}
        draws = [np.concatenate([errors[name] for name in random.choice(names, len(names))]) for _ in range(BOOTSTRAP_DRAWS)]
        intervals = {f"p{share}": np.percentile([np.percentile(draw, share) for draw in draws], [2.5, 97.5]).round(2).tolist() for share in (50, 90)}
        print(f"bootstrap over each {key}", json.dumps(intervals))


def sweep_l1m(options: argparse.Namespace) -> None:
    """Errors of a fit for each assumed size of on-chip memory, in sample."""
    rows, _ = read_measured(options.measured, options.zoo)
    for mib in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
        with tempfile.TemporaryDirectory() as folder:
            chips = {march: str(changed_chip(Path(folder), name, mib * 2**20)) for march, name in CHIP_OF_MARCH.items()}
            simulator = Simulator(rows, chips=chips)
        document = error_document(rows, simulator.simulated_ms(fit_values(simulator)), [])
        print(f"L1M {mib} MiB", json.dumps({name: document[name] for name in SUMMARY}), flush=True)


def changed_chip(folder: Path, base: str, l1m_bytes: float) -> Path:
    quantity = {"value": l1m_bytes, "unit": "B", "source": "sweep", "confidence": "assumed"}
    march = {name: march for march, name in CHIP_OF_MARCH.items()}[base]
    path = folder / f"{base}.yaml"
    path.write_text(yaml.safe_dump({"name": base, "march": march, "base": base, "quantities": {"l1m_bytes": quantity}}), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--zoo", type=Path, required=True)
    parser.add_argument("--sweep-l1m", action="store_true")
    options = parser.parse_args()
    if options.sweep_l1m:
        sweep_l1m(options)
        return
    document = validate(options.measured, options.zoo, cross_validate=True)
    write_rows(document, DOCS / "j6-accuracy.csv")
    draw(document, DOCS / "j6-accuracy.svg")
    print_held_out(options)
    print_bootstrap(document)
    for title, part in (("in sample", document), ("family held out", document["cross_validation"])):
        print(title, json.dumps({name: part[name] for name in SUMMARY}))
        for name, group in part["groups"].items():
            print(f"  {name:24s}", json.dumps({key: group[key] for key in SUMMARY}))


if __name__ == "__main__":
    main()
