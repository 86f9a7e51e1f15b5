"""Raster base maps around the samples to vector maps, and how well they agree with the map expansion.

    python -m pipeline.stages.vectorize

Reads data/index and the raster maps that the data set's map.json names. Writes data/maps_vectorized/<location>.geojson and
reports/vectorize.json. Only strips of a raster map are in memory; a location without one is reported and left out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.dataset.index import Index
from pipeline.io import write_json
from pipeline.maps.build import samples_by_location
from pipeline.maps.vectorize.base_map import vectorize_base_maps
from pipeline.paths import Paths
from pipeline.stages.main import stage_main


@dataclass(frozen=True)
class Result:
    """What the stage did; printed as one line."""

    vectorized: tuple[str, ...]
    without_raster: tuple[str, ...]
    areas: int

    def __str__(self) -> str:
        missing = f"; no raster map for {', '.join(self.without_raster)}" if self.without_raster else ""
        return f"{self.areas} areas in {len(self.vectorized)} locations{missing}"


def run(config: Config, paths: Paths) -> Result:
    """Vectorize the raster map of every location of the index.

    Raises:
        DataError: the index, map.json, log.json or an image is missing or damaged.
    """
    index = Index.open(paths.index_dir)
    samples = samples_by_location(index)
    report = vectorize_base_maps(index.dataroot, index.version, samples, paths.vectorized_dir, config.maps, config.execution.workers)
    write_json(paths.report("vectorize.json"), report)
    done = {name: location for name, location in report["locations"].items() if "areas" in location}
    return Result(tuple(done), tuple(sorted(set(report["locations"]) - set(done))), sum(location["areas"] for location in done.values()))


def main() -> int:
    """Entry point of `python -m pipeline.stages.vectorize`."""
    return stage_main("vectorize", run)


if __name__ == "__main__":
    sys.exit(main())
