"""`bevj6 vectorize`: mask images to one GeoJSON or map expansion file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import shapely

from pipeline.config import VectorizeConfig
from pipeline.errors import DataError, file_error
from pipeline.maps.frames import FloatArray
from pipeline.maps.vectorize.expansion_json import write_expansion
from pipeline.maps.vectorize.geojson import CLASSES, LINE_CLASSES, VectorFeatures, write_geojson
from pipeline.maps.vectorize.raster import MaskSource, open_mask
from pipeline.maps.vectorize.thinning import MaskArray
from pipeline.maps.vectorize.tiles import AreaCollector, StrokeCollector, mean_width_px, tiles

# Values of a class mask; any other value is background.
CLASS_VALUES = {1: "divider", 2: "ped_crossing", 3: "drivable_area"}
HIGHEST_CLASS_VALUE = 31  # a mask with a larger value is a gray image
WIDEST_LINE_PX = 12.0  # a mask without a class whose mean width is larger shows areas


@dataclass(frozen=True)
class MaskSummary:
    """What one mask gave."""

    mask: str
    width_px: int
    height_px: int
    classes: tuple[str, ...]
    lines: int
    closed_lines: int
    areas: int
    holes: int
    note: str  # why there is nothing, or ""


@dataclass(frozen=True)
class VectorizeSummary:
    """What `vectorize_files` wrote."""

    out: str
    masks: tuple[MaskSummary, ...]

    def __str__(self) -> str:
        lines, areas = sum(mask.lines for mask in self.masks), sum(mask.areas for mask in self.masks)
        notes = "".join(f"; {mask.mask}: {mask.note}" for mask in self.masks if mask.note)
        return f"{lines} lines and {areas} areas from {len(self.masks)} masks -> {self.out}{notes}"


def vectorize_files(
    masks: Sequence[Path],
    resolution_m: float,
    out: Path,
    *,
    classes: Sequence[str] | None = None,
    origin_m: tuple[float, float] = (0.0, 0.0),
    config: VectorizeConfig | None = None,
) -> VectorizeSummary:
    """Vectorize mask images into one file.

    A mask is binary (any gray image: bright is on) or a class mask (values of `CLASS_VALUES`). The class of a binary mask is the one given,
    else the one its file name ends with (`left_ped_crossing.png`), else divider for thin and drivable_area for wide shapes.
    Row 0 is the largest y, as in nuScenes raster maps.

    Args:
        masks: image files; PNGs of any size, other formats up to 64 million pixels.
        resolution_m: size of a pixel.
        out: `.geojson`, or `.json` for a nuScenes map expansion.
        classes: one of `CLASSES` for each mask.
        origin_m: map coordinates of the lower left corner.
        config: thresholds in pixels; the defaults if None.

    Raises:
        DataError: a mask is missing, empty, cut or no image; a class or the output format is unknown; the resolution is not positive.
    """
    if out.suffix not in (".geojson", ".json"):
        raise file_error(out, f"suffix {out.suffix!r}: must be .geojson, or .json for a map expansion")
    if not (np.isfinite(resolution_m) and resolution_m > 0.0):
        raise DataError(f"resolution_m = {resolution_m!r}: must be a positive number")
    if not masks or (classes is not None and len(classes) != len(masks)):
        raise DataError(f"{len(masks)} masks and {0 if classes is None else len(classes)} classes: give at least one mask, and one class each")
    unknown = sorted(set(classes or ()) - set(CLASSES))
    if unknown:
        raise DataError(f"class {unknown[0]!r}: unknown; known classes: {', '.join(CLASSES)}")
    config = config or VectorizeConfig()
    results = [_vectorize_file(path, None if classes is None else classes[i], config) for i, path in enumerate(masks)]
    placed = [to_map(features, summary.height_px, resolution_m, origin_m) for features, summary in results]
    together = VectorFeatures([line for part in placed for line in part.lines], [area for part in placed for area in part.areas])
    if out.suffix == ".geojson":
        write_geojson(out, together, resolution_m)
    else:
        width_px, height_px = (max(getattr(summary, side) for _, summary in results) for side in ("width_px", "height_px"))
        write_expansion(out, together, (origin_m[0] + width_px * resolution_m, origin_m[1] + height_px * resolution_m))
    return VectorizeSummary(str(out), tuple(summary for _, summary in results))


@dataclass(frozen=True)
class Layer:
    """One class of a mask: pixels with a value from `low` to `high` are on."""

    name: str
    low: int
    high: int

    def select(self, values: MaskArray) -> MaskArray:
        """1 where the class is, 0 elsewhere."""
        return ((values >= self.low) & (values <= self.high)).view(np.uint8)


def vectorize_layers(source: MaskSource, layers: Sequence[Layer], config: VectorizeConfig) -> VectorFeatures:
    """Lines and areas of the classes of one mask, pixel frame (x right, y down, the first pixel covers 0..1)."""
    collectors = [StrokeCollector(source.height, source.width, config) if layer.name in LINE_CLASSES else AreaCollector(config) for layer in layers]
    for tile in tiles(source, config.tile_px):
        for layer, collector in zip(layers, collectors, strict=True):
            mask = layer.select(tile.values)
            if mask.any():
                collector.add(tile, mask)
    features = VectorFeatures([], [])
    for layer, collector in zip(layers, collectors, strict=True):
        if isinstance(collector, StrokeCollector):
            features.lines.extend((layer.name, line) for line in collector.result().polylines)
        else:
            features.areas.extend((layer.name, area) for area in collector.result())
    return features


def to_map(features: VectorFeatures, height_px: int, resolution_m: float, origin_m: tuple[float, float]) -> VectorFeatures:
    """Features in the pixel frame moved to the map frame: metres, y up, row 0 is the largest y."""

    def moved(points: FloatArray) -> FloatArray:
        return np.array(origin_m) + np.stack([points[:, 0], height_px - points[:, 1]], axis=1) * resolution_m

    return VectorFeatures(
        [(name, moved(line)) for name, line in features.lines], [(name, shapely.transform(area, moved)) for name, area in features.areas]
    )


def _vectorize_file(path: Path, class_name: str | None, config: VectorizeConfig) -> tuple[VectorFeatures, MaskSummary]:
    source = open_mask(path)
    layers = layers_of(source, class_name or _class_in_name(path), config)
    features = vectorize_layers(source, layers, config)
    closed = sum(len(line) > 3 and bool((line[0] == line[-1]).all()) for _, line in features.lines)
    holes = sum(len(area.interiors) for _, area in features.areas)
    note = "" if features.lines or features.areas else ("nothing but noise" if layers else "no pixel is on")
    names = tuple(layer.name for layer in layers)
    summary = MaskSummary(path.name, source.width, source.height, names, len(features.lines), closed, len(features.areas), holes, note)
    return features, summary


def layers_of(source: MaskSource, class_name: str | None, config: VectorizeConfig) -> list[Layer]:
    """Classes of a mask: the given one, or those of a class mask, or one judged by the mean width of what is on. None if nothing is on."""
    counts = np.zeros(256, dtype=np.int64)
    for strip in source.strips(config.tile_px):
        counts += np.bincount(strip.ravel(), minlength=256)
    present = np.flatnonzero(counts[1:]) + 1
    if len(present) == 0:
        return []
    if class_name is None and len(present) > 1 and present[-1] <= HIGHEST_CLASS_VALUE:
        return [Layer(name, value, value) for value, name in CLASS_VALUES.items() if value in present]
    on = Layer(class_name or "", int(present[-1]) // 2 + 1, 255)  # half of the brightest: the edge of anti-aliased shapes
    if class_name is None:
        thin = mean_width_px(source, on.select, config.tile_px) <= WIDEST_LINE_PX
        return [Layer("divider" if thin else "drivable_area", on.low, on.high)]
    return [on]


def _class_in_name(path: Path) -> str | None:
    return next((name for name in CLASSES if path.stem == name or path.stem.endswith(f"_{name}")), None)
