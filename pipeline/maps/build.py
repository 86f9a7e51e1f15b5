"""Map labels for all samples of an index: which map a location has, the work over scenes, and the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import MapsConfig
from pipeline.dataset.index import Index
from pipeline.errors import file_error
from pipeline.execution import map_ordered
from pipeline.io import atomic_dir, inside
from pipeline.maps.expansion import load_expansion
from pipeline.maps.frames import FloatArray
from pipeline.maps.store import write_index, write_labels
from pipeline.maps.topology import LabelCounts, label_sample
from pipeline.maps.vector_map import VectorMap
from pipeline.maps.vectorize.base_map import LocationSamples
from pipeline.maps.vectorize.geojson import load_geojson
from pipeline.progress import track
from pipeline.taxonomy import MAP_CLASSES


@dataclass(frozen=True)
class MapSources:
    """Where maps are looked for. `vectorized` is None unless vectorized raster maps may stand in for a missing expansion."""

    dataroot: Path
    vectorized: Path | None
    node_tolerance_m: float

    def path(self, location: str) -> tuple[str, Path | None]:
        """("expansion" | "raster" | "none", file) of a location."""
        expansion = inside(self.dataroot / "maps" / "expansion", f"{location}.json")
        if expansion.is_file():
            return "expansion", expansion
        if self.vectorized is not None:
            raster = inside(self.vectorized, f"{location}.geojson")
            if raster.is_file():
                return "raster", raster
        return "none", None

    def load(self, location: str) -> VectorMap | None:
        """The map of a location; None if there is none. Read once per process. Raises `DataError` for a damaged file."""
        kind, path = self.path(location)
        if path is None:
            return None
        return load_expansion(path, self.node_tolerance_m) if kind == "expansion" else load_geojson(path)


@dataclass(frozen=True)
class SceneSamples:
    """Samples of one scene in time order."""

    name: str
    location: str
    tokens: tuple[str, ...]
    ego2global: FloatArray  # (S, 4, 4)


def build_map_labels(index: Index, directory: Path, sources: MapSources, config: MapsConfig, workers: int) -> dict[str, Any]:
    """Write the label store for every sample of the index, kept or not, and return the report.

    A location without a map is no error: its samples get no label, and the report names it.

    Args:
        index: samples with location and pose.
        directory: replaced as a whole by the new store.
        sources: where maps are looked for.
        config: map parameters.
        workers: processes.

    Raises:
        DataError: a map file is damaged, a scene or location name is no file name, or a pose is not finite.
    """
    scenes = scenes_of(index)
    places: dict[str, tuple[str, int] | None] = {}
    counts: list[LabelCounts] = []
    with atomic_dir(directory) as temporary:
        work = partial(_label_scene, directory=temporary, sources=sources, config=config)
        results = map_ordered(work, scenes, min(workers, max(1, len(scenes))))
        for scene, result in zip(scenes, track(results, "map labels", len(scenes)), strict=True):
            file_name = _file_name(scene.name)
            places |= {token: (file_name, i) if result else None for i, token in enumerate(scene.tokens)}
            counts += result or []
        write_index(temporary, places)
    return _report(scenes, sources, config, counts)


def scenes_of(index: Index) -> list[SceneSamples]:
    """All scenes of an index with location and poses of their samples."""
    table = index.samples.select(["token", "location", "ego2global"])
    row = {token: (location, pose) for token, location, pose in zip(*(table[name].to_pylist() for name in table.column_names), strict=True)}
    scenes = []
    for name, tokens in index.scenes(kept_only=False).items():
        poses = np.array([row[token][1] for token in tokens], dtype=np.float64).reshape(-1, 4, 4)
        scenes.append(SceneSamples(name, row[tokens[0]][0], tuple(tokens), poses))
    return scenes


def samples_by_location(index: Index) -> list[LocationSamples]:
    """Positions of all samples by location, locations in alphabetic order."""
    positions: dict[str, list[FloatArray]] = {}
    for scene in scenes_of(index):
        positions.setdefault(scene.location, []).append(scene.ego2global[:, :2, 3])
    return [LocationSamples(location, np.concatenate(positions[location])) for location in sorted(positions)]


def _label_scene(scene: SceneSamples, directory: Path, sources: MapSources, config: MapsConfig) -> list[LabelCounts] | None:
    """Write the labels of one scene; None if its location has no map."""
    vector_map = sources.load(scene.location)
    if vector_map is None:
        return None
    labelled = [label_sample(vector_map, pose, config.topology) for pose in scene.ego2global]
    write_labels(inside(directory, _file_name(scene.name)), [label for label, _ in labelled])
    return [counts for _, counts in labelled]


def _file_name(scene_name: str) -> str:
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", scene_name):
        raise file_error("scene.json", f"name = {scene_name!r}: a scene name may hold letters, digits, '_', '-' and '.' only")
    return f"scenes/{scene_name}.npz"


def _report(scenes: Sequence[SceneSamples], sources: MapSources, config: MapsConfig, counts: Sequence[LabelCounts]) -> dict[str, Any]:
    """reports/topology.json."""
    samples: Counter[str] = Counter()
    for scene in scenes:
        samples[scene.location] += len(scene.tokens)
    elements = np.array([label.by_class for label in counts], dtype=np.int64).reshape(-1, len(MAP_CLASSES)).sum(axis=0)
    clipped, total = sum(label.clipped for label in counts), int(elements.sum())
    return {
        "source": config.source,
        "samples": {"total": sum(samples.values()), "with_map": len(counts), "without_map": sum(samples.values()) - len(counts)},
        "samples_without_elements": sum(sum(label.by_class) == 0 for label in counts),
        "locations": {location: _location_report(location, samples[location], sources) for location in sorted(samples)},
        "elements": dict(zip(MAP_CLASSES, elements.tolist(), strict=True)),
        "clipped_elements": clipped,
        "clip_rate": clipped / total if total else 0.0,
        "line_segments": sum(label.segments for label in counts),
        "polygons": sum(label.polygons for label in counts),
        "incidences": sum(label.incidences for label in counts),
        "lane_edges": sum(label.lane_edges for label in counts),
    }


def _location_report(location: str, samples: int, sources: MapSources) -> dict[str, Any]:
    kind, _ = sources.path(location)
    vector_map = sources.load(location)
    if vector_map is None:
        return {"samples": samples, "source": kind, "labelled": []}
    return {
        "samples": samples,
        "source": kind,
        "labelled": [name for name, known in zip(MAP_CLASSES, vector_map.labelled.tolist(), strict=True) if known],
        "boundary_source": vector_map.boundary_source,
        "findings": vector_map.findings.counts,
        "dropped_examples": vector_map.findings.examples,
    }
