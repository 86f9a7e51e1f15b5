"""The raster base maps of a nuScenes data set (`map.json`) vectorized around its samples, and compared with the vector map where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from pipeline.config import MapsConfig
from pipeline.errors import file_error
from pipeline.execution import map_ordered
from pipeline.io import atomic_dir, inside, read_json
from pipeline.maps.expansion import load_expansion
from pipeline.maps.frames import FloatArray
from pipeline.maps.vector_map import VectorMap
from pipeline.maps.vectorize.command import Layer, to_map, vectorize_layers
from pipeline.maps.vectorize.geojson import load_geojson, write_geojson
from pipeline.maps.vectorize.raster import MaskSource, open_mask
from pipeline.maps.vectorize.thinning import MaskArray

CELL_PX = 256  # the part of a base map that is read is made of squares of this size
SAMPLING_M = 0.5  # distance between the points at which boundaries are compared


@dataclass(frozen=True)
class LocationSamples:
    """Where samples of a data set are in one location."""

    location: str
    positions_m: FloatArray  # (S, 2) ego positions, map frame


def vectorize_base_maps(
    dataroot: Path, version: str, samples: Sequence[LocationSamples], directory: Path, config: MapsConfig, workers: int
) -> dict[str, Any]:
    """Write `<location>.geojson` for every location that has a raster map, and return the report.

    Args:
        dataroot, version: the data set.
        samples: where its samples are.
        directory: replaced as a whole.
        config: map parameters; the BEV range decides how far around the samples the map is read.
        workers: processes.

    Raises:
        DataError: map.json or log.json is malformed, or an image is cut or damaged.
    """
    rasters = raster_of_location(dataroot, version)
    with atomic_dir(directory) as temporary:
        work = partial(_vectorize_location, dataroot=dataroot, rasters=rasters, directory=temporary, config=config)
        reports = list(map_ordered(work, samples, min(workers, max(1, len(samples)))))
    return {"locations": {place.location: report for place, report in zip(samples, reports, strict=True)}}


def raster_of_location(dataroot: Path, version: str) -> dict[str, str]:
    """Location -> file name of its raster map under the dataroot, by way of the logs that map.json lists."""
    folder = dataroot / version
    try:
        location = {log["token"]: log["location"] for log in read_json(folder / "log.json")}
        maps = [(str(row["filename"]), list(row["log_tokens"])) for row in read_json(folder / "map.json")]
    except (KeyError, TypeError) as error:
        raise file_error(folder, f"log.json or map.json: missing or malformed field ({error!r})") from None
    return {location[log]: file_name for file_name, logs in maps for log in logs if log in location}


@dataclass(frozen=True)
class RegionMask:
    """The part of a mask around some places: squares of CELL_PX pixels; what lies between them reads as 0."""

    source: MaskSource
    row: int  # of the first row, in the source
    column: int
    cells: NDArray[np.bool_]  # (rows, columns) of squares that are wanted

    @classmethod
    def around(cls, source: MaskSource, positions_px: FloatArray, radius_px: float) -> RegionMask | None:
        """The squares that come within `radius_px` of a place (S, 2) x and y in pixels; None if none of them lies in the mask."""
        shape = -(-source.height // CELL_PX), -(-source.width // CELL_PX)
        centers = [(np.arange(count) + 0.5) * CELL_PX for count in (shape[1], shape[0])]
        wanted = np.zeros(shape, dtype=bool)
        for place in positions_px:
            from_x, from_y = (np.maximum(np.abs(center - at) - CELL_PX / 2, 0.0) for center, at in zip(centers, place, strict=True))
            wanted |= np.hypot(from_x[None, :], from_y[:, None]) <= radius_px
        rows, columns = np.flatnonzero(wanted.any(axis=1)), np.flatnonzero(wanted.any(axis=0))
        if len(rows) == 0:
            return None
        cells = wanted[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        return cls(source, int(rows[0]) * CELL_PX, int(columns[0]) * CELL_PX, cells)

    @property
    def height(self) -> int:
        """Rows."""
        return min(self.cells.shape[0] * CELL_PX, self.source.height - self.row)

    @property
    def width(self) -> int:
        """Columns."""
        return min(self.cells.shape[1] * CELL_PX, self.source.width - self.column)

    def strips(self, rows: int, first_row: int = 0) -> Iterator[MaskArray]:
        """See `MaskSource`. Rows below the region are not read."""
        done = first_row
        for strip in self.source.strips(min(rows, CELL_PX), self.row + first_row):
            own = strip[: self.height - done, self.column : self.column + self.width]
            wanted = np.repeat(self.cells[np.arange(done, done + len(own)) // CELL_PX], CELL_PX, axis=1)
            yield own * wanted[:, : self.width]
            done += len(own)
            if done == self.height:
                return


def _vectorize_location(place: LocationSamples, dataroot: Path, rasters: dict[str, str], directory: Path, config: MapsConfig) -> dict[str, Any]:
    """Vectorize one location; what was done, for the report."""
    file_name = rasters.get(place.location)
    path = inside(dataroot, file_name) if file_name else None
    if path is None or not path.is_file():
        return {"raster": file_name, "note": "no raster map"}
    source, resolution_m = open_mask(path), config.vectorize.raster_resolution_m
    radius_m = bev_radius_m(config)
    to_pixel = np.array([1.0, -1.0]) / resolution_m
    region = RegionMask.around(source, place.positions_m * to_pixel + (0.0, source.height), radius_m / resolution_m)
    if region is None:
        return {"raster": file_name, "note": "no sample lies on the raster map"}
    features = vectorize_layers(region, [Layer("drivable_area", 1, 255)], config.vectorize)
    origin_m = region.column * resolution_m, (source.height - region.row - region.height) * resolution_m
    target = inside(directory, f"{place.location}.geojson")
    write_geojson(target, to_map(features, region.height, resolution_m, origin_m), resolution_m)
    return {
        "raster": file_name,
        "raster_px": [source.width, source.height],
        "region_px": [region.width, region.height],
        "areas": len(features.areas),
        "holes": sum(len(area.interiors) for _, area in features.areas),
        "vertices": sum(int(shapely.get_num_coordinates(area)) for _, area in features.areas),
        "round_trip": _round_trip(place, load_geojson(target), dataroot, radius_m, config),
    }


def bev_radius_m(config: MapsConfig) -> float:
    """Distance from the ego to the farthest corner of the BEV range."""
    return float(max(np.hypot(x, y) for x in config.topology.x_range_m for y in config.topology.y_range_m))


def _round_trip(place: LocationSamples, raster: VectorMap, dataroot: Path, radius_m: float, config: MapsConfig) -> dict[str, float] | None:
    """Agreement with the map expansion around the samples; None where there is none."""
    path = inside(dataroot / "maps" / "expansion", f"{place.location}.json")
    if not path.is_file():
        return None
    vector = load_expansion(path, config.topology.node_tolerance_m)
    return (
        compare_roads(raster, vector, shapely.union_all(shapely.buffer(shapely.points(place.positions_m), radius_m)))
        if len(vector.boundary)
        else None
    )


def compare_roads(first: VectorMap, second: VectorMap, region: shapely.Geometry) -> dict[str, float]:
    """Agreement of two maps' road areas and boundaries inside a region: intersection over union, and distances between the boundaries, m.

    The distances are those of points every SAMPLING_M on either boundary to the other one, both directions together.
    """
    roads = [shapely.intersection(road.road, region) for road in (first, second)]
    union = shapely.area(shapely.union(*roads))
    apart = np.concatenate([_distances(first, second, region), _distances(second, first, region)])
    return {
        "iou": round(float(shapely.area(shapely.intersection(*roads)) / union), 4) if union else 1.0,
        "boundary_distance_mean_m": round(float(apart.mean()), 4) if len(apart) else 0.0,
        "boundary_distance_median_m": round(float(np.median(apart)), 4) if len(apart) else 0.0,
        "boundary_distance_p95_m": round(float(np.percentile(apart, 95)), 4) if len(apart) else 0.0,
    }


def _distances(first: VectorMap, second: VectorMap, region: shapely.Geometry) -> FloatArray:
    """Distances from points on the first map's boundary inside the region to the second map's boundary."""
    points = shapely.points(shapely.get_coordinates(shapely.segmentize(shapely.boundary(first.road), SAMPLING_M)))
    shapely.prepare(region)
    points = points[shapely.contains(region, points)]
    if len(points) == 0 or len(second.boundary) == 0:
        return np.empty(0)
    (which, _), distance = second.boundary.tree.query_nearest(points, return_distance=True, all_matches=False)
    return distance[np.argsort(which)]
