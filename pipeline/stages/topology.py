"""Map labels of every sample: clipped polylines, segments, polygons and the topology matrix in the ego BEV frame.

    python -m pipeline.stages.topology

Reads data/index, the map expansion under the data set's root and, where `maps.source` is raster, data/maps_vectorized. Writes data/maps and
reports/topology.json. A data set without maps gives an empty store and a report that says so.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.io import write_json
from pipeline.maps.build import MapSources, build_map_labels
from pipeline.paths import Paths
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """What the stage did; printed as one line."""

    samples: int
    with_map: int
    elements: int
    locations_without_map: tuple[str, ...]

    def __str__(self) -> str:
        missing = f"; no map for {', '.join(self.locations_without_map)}" if self.locations_without_map else ""
        return f"{self.with_map} of {self.samples} samples labelled, {self.elements} elements{missing}"


def run(config: Config, paths: Paths) -> Result:
    """Label every sample of the index.

    Raises:
        DataError: the index or a map file is missing or damaged.
    """
    index = Index.open(paths.index_dir)
    vectorized = paths.vectorized_dir if config.maps.source == "raster" else None
    sources = MapSources(index.dataroot, vectorized, config.maps.topology.node_tolerance_m)
    report = build_map_labels(index, paths.maps_dir, sources, config.maps, config.execution.workers)
    write_json(paths.report("topology.json"), report)
    missing = tuple(name for name, location in report["locations"].items() if location["source"] == "none")
    return Result(report["samples"]["total"], report["samples"]["with_map"], sum(report["elements"].values()), missing)


def main() -> int:
    """Entry point of `python -m pipeline.stages.topology`."""
    return stage_main("topology", run)


if __name__ == "__main__":
    sys.exit(main())
