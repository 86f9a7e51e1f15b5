"""The vector map of one location, ready to be asked for the surroundings of an ego pose."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import shapely
from numpy.typing import NDArray

from pipeline.maps.lines import LineSet


@dataclass
class MapFindings:
    """What was odd in a map file and what was done about it; counts, and a few examples of dropped elements."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def count(self, what: str, number: int = 1) -> None:
        """Add to a count; nothing is noted for zero."""
        if number:
            self.counts[what] = self.counts.get(what, 0) + number

    def dropped(self, what: str, example: str) -> None:
        """Count a dropped element and keep the first ten as examples."""
        self.count(what)
        if len(self.examples) < 10:
            self.examples.append(example)


@dataclass(frozen=True, eq=False)
class VectorMap:
    """Map elements of one location, global frame, m.

    `dividers` and `boundary` are lines; the road is on the left of a boundary. `crossings` and `lanes` are arrays of shapely polygons with
    counter-clockwise shells. `labelled` says for each of MAP_CLASSES whether this map knows the class at all.
    """

    location: str
    dividers: LineSet
    crossings: NDArray[np.object_]  # (C,)
    road: shapely.Geometry  # the area that the boundary is the edge of
    boundary: LineSet
    lanes: NDArray[np.object_]  # (R,)
    lane_edges: NDArray[np.int64]  # (E, 2) indices of lanes
    labelled: NDArray[np.bool_]  # (3,)
    boundary_source: str  # layer(s) the boundary comes from
    findings: MapFindings

    @cached_property
    def crossing_tree(self) -> shapely.STRtree:
        """Spatial index of the crossings."""
        return shapely.STRtree(self.crossings)

    @cached_property
    def lane_tree(self) -> shapely.STRtree:
        """Spatial index of the lanes."""
        return shapely.STRtree(self.lanes)


def polygon_array(polygons: list[shapely.Polygon]) -> NDArray[np.object_]:
    """Polygons as an object array (N,)."""
    array = np.empty(len(polygons), dtype=object)
    array[:] = polygons
    return array
