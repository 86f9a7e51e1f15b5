"""Raster-to-vector: thinning, lines, areas, files. Masks are rendered from known lines, so the right answer is known."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from pipeline.config import VectorizeConfig
from pipeline.errors import DataError
from pipeline.maps.vectorize import truth
from pipeline.maps.vectorize.areas import edge_rings, pixel_edges, signed_area, trace_areas
from pipeline.maps.vectorize.command import Layer, vectorize_files, vectorize_layers
from pipeline.maps.vectorize.geojson import load_geojson, read_geojson
from pipeline.maps.vectorize.raster import ArrayMask, open_mask
from pipeline.maps.vectorize.skeleton import SkeletonPixels, trace
from pipeline.maps.vectorize.strokes import trace_strokes
from pipeline.maps.vectorize.thinning import remove_noise, thin
from pipeline.maps.vectorize.truth import LineTopology

CONFIG = VectorizeConfig()
small_masks = arrays(np.uint8, st.tuples(st.integers(1, 24), st.integers(1, 70)), elements=st.integers(0, 1))
DRAWINGS = {
    "line": [np.array([(20.0, 30.0), (150.0, 120.0)])],
    "crossing": [np.array([(10.0, 100.0), (190.0, 90.0)]), np.array([(95.0, 15.0), (110.0, 185.0)])],
    "T": [np.array([(10.0, 60.0), (100.0, 60.0), (190.0, 60.0)]), np.array([(100.0, 60.0), (90.0, 180.0)])],
    "ring": [100 + 60 * np.array([(np.cos(t), np.sin(t)) for t in np.linspace(0, 2 * np.pi, 60)])],
    "to the border": [np.array([(-20.0, 80.0), (220.0, 130.0)])],
}
EXPECTED = {
    "line": LineTopology(1, (), 0, 2),
    "crossing": LineTopology(1, (4,), 0, 4),
    "T": LineTopology(1, (3,), 0, 3),
    "ring": LineTopology(1, (), 1, 0),
    "to the border": LineTopology(1, (), 0, 2),
}


def parts(mask: np.ndarray, connectivity: int) -> int:
    return cv2.connectedComponents(np.pad(mask, 1), connectivity=connectivity)[0]


# --------------------------------------------------------------------------------------------------------------- skeletons
@settings(max_examples=60, deadline=None)
@given(mask=small_masks)
def test_thinning_keeps_parts_and_holes(mask: np.ndarray) -> None:
    skeleton = thin(mask)
    assert (skeleton <= mask).all()
    assert parts(skeleton, 8) == parts(mask, 8)
    assert cv2.connectedComponents(1 - np.pad(skeleton, 1), connectivity=4)[0] == cv2.connectedComponents(1 - np.pad(mask, 1), connectivity=4)[0]
    np.testing.assert_array_equal(thin(skeleton), skeleton)


@settings(max_examples=100, deadline=None)
@given(mask=small_masks)
def test_traced_paths_cover_the_skeleton_once(mask: np.ndarray) -> None:
    rows, columns = np.nonzero(thin(mask))
    traced = trace(SkeletonPixels(rows, columns, np.ones(len(rows))))
    paths = np.split(traced.pixels, traced.offsets[1:-1]) if len(traced.ends) else []
    inner = [pixel for path in paths for pixel in path[1:-1]]
    assert sorted([*inner, *traced.nodes.tolist()]) == list(range(len(rows)))
    for path, ends in zip(paths, traced.ends, strict=True):
        steps = np.maximum(np.abs(np.diff(rows[path])), np.abs(np.diff(columns[path])))
        assert (steps == 1).all() and traced.nodes[ends].tolist() == [path[0], path[-1]]


def test_noise_goes_and_thin_lines_stay() -> None:
    mask = np.zeros((60, 60), np.uint8)
    mask[20:26, 5:55] = 1  # a bar
    mask[40, 5:55] = 1  # a line one pixel wide
    clean = mask.copy()
    mask[5:8, 5:8] = 1  # speck
    mask[22:24, 30:32] = 0  # hole
    mask[19, 40] = 1  # bump
    mask[20, 15] = 0  # dent
    difference = remove_noise(mask, 4) != clean
    corners = np.zeros_like(difference)
    corners[[20, 20, 25, 25], [5, 54, 5, 54]] = True
    assert not (difference & ~corners).any()
    np.testing.assert_array_equal(remove_noise(mask, 0), mask)


# ------------------------------------------------------------------------------------------------------------------- lines
@pytest.mark.parametrize("width_px", [1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("name", sorted(DRAWINGS))
def test_lines_of_any_width(name: str, width_px: float) -> None:
    """Topology exact, junctions, ends and lines within two pixels of the truth."""
    graph = truth.noded(DRAWINGS[name], 200, 200, 0.01)
    threshold = 60 if width_px == 1.0 else 128
    found = truth.graph_of_polylines(trace_strokes((truth.render(graph.edges, width_px, 200, 200) >= threshold).astype(np.uint8), CONFIG).polylines)
    assert found.topology() == EXPECTED[name]
    for point in graph.special_points():
        assert np.hypot(*(found.special_points() - point).T).min() < 2.0
    assert shapely.hausdorff_distance(shapely.MultiLineString(found.edges), shapely.MultiLineString(graph.edges), densify=0.1) < 2.0


@pytest.mark.parametrize("name", sorted(DRAWINGS))
def test_damaged_lines(name: str) -> None:
    rng = np.random.default_rng(5)
    graph = truth.noded(DRAWINGS[name], 200, 200, 0.01)
    gray = truth.render(graph.edges, 4.0, 200, 200)
    clean = truth.binary(gray)
    turned, _ = truth.rotated(gray, 90.0)
    for mask in (
        truth.with_noise(clean, rng),
        truth.with_gaps(clean, graph, 4.0, rng, (3.0, 8.0)),
        truth.dashed(clean, graph, 4.0, 18.0, 8.0),
        truth.binary(turned),
    ):
        assert truth.graph_of_polylines(trace_strokes(mask, CONFIG).polylines).topology() == EXPECTED[name]


def test_a_crossing_of_wide_roads_is_one_four_way_node() -> None:
    """The case in which a plain skeleton gives two three-way nodes."""
    for degrees in range(40, 141, 10):
        turn = np.radians(degrees)
        lines = [np.array([(10.0, 100.0), (190.0, 100.0)]), 100 + 85 * np.array([(-np.cos(turn), -np.sin(turn)), (np.cos(turn), np.sin(turn))])]
        graph = truth.noded(lines, 200, 200, 0.01)
        found = truth.graph_of_polylines(trace_strokes(truth.binary(truth.render(graph.edges, 14.0, 200, 200)), CONFIG).polylines)
        assert found.topology() == EXPECTED["crossing"], degrees
        assert np.hypot(*(found.node_xy[found.degree == 4][0] - 100.0)) < 2.0


def test_two_side_streets_stay_two_junctions() -> None:
    lines = [np.array([(10.0, 100.0), (80.0, 100.0), (120.0, 100.0), (190.0, 100.0)])]
    lines += [np.array([(80.0, 100.0), (80.0, 20.0)]), np.array([(120.0, 100.0), (120.0, 180.0)])]
    mask = truth.binary(truth.render(lines, 10.0, 200, 200))
    assert truth.graph_of_polylines(trace_strokes(mask, CONFIG).polylines).topology() == LineTopology(1, (3, 3), 0, 4)


def found_topology(mask: np.ndarray) -> LineTopology:
    return truth.graph_of_polylines(trace_strokes(mask, CONFIG).polylines).topology()


def test_noise_that_touches_two_lines_is_no_rung() -> None:
    mask = truth.binary(truth.render([np.array([(-5.0, y), (205.0, y + 30.0)]) for y in (80.0, 88.0)], 3.5, 200, 200))
    assert found_topology(mask) == LineTopology(2, (), 0, 4)
    mask[88:96, 49:52] = 1
    assert cv2.connectedComponents(mask)[0] == 2
    assert found_topology(mask) == LineTopology(2, (), 0, 4)


def test_a_line_broken_beside_a_junction_is_mended() -> None:
    mask = truth.binary(truth.render(DRAWINGS["T"], 3.0, 200, 200))
    mask[68:71, 85:115] = 0  # leaves a stub no longer than a spur
    assert found_topology(mask) == EXPECTED["T"]


def test_torn_paint_fills_a_gap_that_is_too_long_without_it() -> None:
    mask = truth.binary(truth.render(DRAWINGS["line"], 4.0, 200, 200))
    mask[:, 70:94] = 0
    assert found_topology(mask) == LineTopology(2, (), 0, 4)
    torn = truth.binary(truth.render(DRAWINGS["line"], 4.0, 200, 200))
    torn[:, 70:79] = torn[:, 85:94] = 0
    assert found_topology(torn) == EXPECTED["line"]


@pytest.mark.parametrize("offset", [0.0, 12.0, 20.0])
def test_a_line_through_a_ring_crosses_it_twice(offset: float) -> None:
    """Off the centre it meets the ring at a small angle, and the skeleton shares a stretch with either."""
    ring = 100 + 30 * np.array([(np.cos(t), np.sin(t)) for t in np.linspace(0, 2 * np.pi, 60)])
    lines = [ring, np.array([(-20.0, 100.0 + offset), (220.0, 100.0 + offset)])]
    for width_px in (3.0, 5.0):
        graph = truth.noded(lines, 200, 200, 0.01)
        assert graph.topology() == LineTopology(1, (4, 4), 2, 2)
        assert found_topology(truth.binary(truth.render(graph.edges, width_px, 200, 200))) == graph.topology()


def test_a_short_road_beyond_a_wide_crossing_is_kept() -> None:
    ring = 100 + 34 * np.array([(np.cos(t), np.sin(t)) for t in np.linspace(0, 2 * np.pi, 60)])
    lines = [ring, np.array([(-20.0, 112.0), (165.0, 112.0)])]
    graph = truth.noded(lines, 200, 200, 0.01)
    assert found_topology(truth.binary(truth.render(graph.edges, 11.0, 200, 200))) == graph.topology() == LineTopology(1, (4, 4), 2, 2)


def test_small_parts_follow_their_connectivity() -> None:
    """Specks hang together at corners, holes do not; what touches the border of the mask is no hole."""
    mask = np.zeros((40, 40), np.uint8)
    for k in range(4):
        mask[3 + k, 3 + k] = 1  # a diagonal of four: fits
        mask[30 - k, 20 + k] = mask[26, 24] = 1  # of five: does not
    mask[10:24, 0:14] = 1
    mask[14:16, 5:7] = mask[12, 0:3] = 0  # a hole, and a bay at the border
    cleaned = remove_noise(mask, 4)
    assert not cleaned[3:7, 3:7].any() and cleaned[26:31, 20:25].sum() >= 3
    assert cleaned[14:16, 5:7].all() and not cleaned[12, 0]


def test_lines_that_leave_the_mask_are_not_joined_across_its_border() -> None:
    lines = [np.array([(100.0, 100.0), (210.0, 60.0)]), np.array([(100.0, 20.0), (210.0, 56.0)])]
    mask = truth.binary(truth.render(lines, 3.0, 196, 200))
    assert truth.graph_of_polylines(trace_strokes(mask, CONFIG).polylines).topology().components == 2


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (3, 3), (200, 200)])
@pytest.mark.parametrize("on", [0, 1, 2])
def test_masks_of_no_and_one_pixel(shape: tuple[int, int], on: int) -> None:
    mask = np.zeros(shape, np.uint8)
    mask.ravel()[:on] = 1
    assert trace_strokes(mask, CONFIG).polylines == [] and trace_areas(mask, CONFIG) == []


# ------------------------------------------------------------------------------------------------------------------- areas
@settings(max_examples=60, deadline=None)
@given(mask=small_masks)
def test_rings_are_simple_and_hold_the_area(mask: np.ndarray) -> None:
    rings = edge_rings(pixel_edges(mask))
    assert sum(len(ring) - 1 for ring in rings) == len(pixel_edges(mask).rows)
    shells = [ring for ring in rings if signed_area(ring) < 0]
    assert len(shells) == parts(mask, 4) - 1
    assert len(rings) - len(shells) == cv2.connectedComponents(1 - np.pad(mask, 1), connectivity=8)[0] - 2
    assert all(shapely.Polygon(ring).is_valid for ring in rings)


def test_area_with_hole_and_island() -> None:
    shapes = [shapely.box(20, 20, 150, 160).difference(shapely.box(50, 50, 120, 120)), shapely.Point(85, 85).buffer(20)]
    areas = trace_areas(truth.binary(truth.render_areas(shapes, 200, 200)), CONFIG)
    assert sorted(len(area.interiors) for area in areas) == [0, 1]
    assert shapely.union_all(areas).symmetric_difference(shapely.union_all(shapes)).area < 0.02 * shapely.union_all(shapes).area


def test_real_drivable_area_round_trip(shared: Path) -> None:
    """400 m x 400 m of the real Boston map: polygons drawn again cover the mask."""
    source = open_mask(shared / "data" / "nuscenes-subset" / "maps" / "crops" / "boston-seaport.png")
    mask = np.concatenate(list(source.strips(1024)))[:2000, :2000]
    areas = trace_areas(mask, CONFIG)
    again = truth.binary(truth.render_areas(areas, 2000, 2000))
    assert (again & mask).sum() / (again | mask).sum() > 0.99 and all(area.is_valid for area in areas)


# ------------------------------------------------------------------------------------------------------- files and tiles
def messy(seed: int, height: int = 700, width: int = 777) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mask = np.zeros((height, width), np.uint8)
    for _ in range(20):
        first, second = rng.integers(0, width, (2, 2)).tolist()
        cv2.line(mask, first, second, 1, int(rng.integers(2, 14)))
    return mask ^ (rng.random(mask.shape) < 0.005).astype(np.uint8)


def test_tiles_leave_no_trace() -> None:
    mask = messy(0)
    for name in ("divider", "drivable_area"):
        whole, tiled = (vectorize_layers(ArrayMask(mask), [Layer(name, 1, 255)], VectorizeConfig(tile_px=side)) for side in (4096, 200))
        assert len(whole.lines) == len(tiled.lines) and len(whole.areas) == len(tiled.areas)
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(whole.lines, tiled.lines, strict=True))
        assert all(a.equals(b) for (_, a), (_, b) in zip(whole.areas, tiled.areas, strict=True))


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA"])
def test_png_strips_equal_pillow(tmp_path: Path, mode: str) -> None:
    rng = np.random.default_rng(2)
    channels = {"LA": 2, "RGB": 3, "RGBA": 4}.get(mode)
    values = rng.integers(0, 256, (57, 83, channels)[: 3 if channels else 2], dtype=np.uint8)
    values = {"1": values > 127, "P": values % 4}.get(mode, values)
    image = Image.fromarray(values, mode="P") if mode == "P" else Image.fromarray(values)
    if mode == "P":
        image.putpalette(list(range(12)))
    image.save(tmp_path / "mask.png")
    wanted = values.astype(np.uint8) if channels is None else values[..., : 1 if channels == 2 else 3].max(axis=2)
    source = open_mask(tmp_path / "mask.png")
    np.testing.assert_array_equal(np.concatenate(list(source.strips(10))), wanted)
    np.testing.assert_array_equal(np.concatenate(list(source.strips(7, first_row=23))), wanted[23:])


def test_files_to_geojson_and_back(tmp_path: Path) -> None:
    crossing = np.zeros((100, 200), np.uint8)
    crossing[20:60, 50:90] = 255
    divider = np.zeros((100, 200), np.uint8)
    divider[49:52, 10:190] = 255
    cv2.imwrite(str(tmp_path / "left_ped_crossing.png"), crossing)
    cv2.imwrite(str(tmp_path / "paint.png"), divider)
    masks = [tmp_path / "left_ped_crossing.png", tmp_path / "paint.png"]
    summary = vectorize_files(masks, 0.1, tmp_path / "out.geojson", origin_m=(100.0, 50.0))
    assert [mask.classes for mask in summary.masks] == [("ped_crossing",), ("divider",)] and "1 lines and 1 areas" in str(summary)
    features = read_geojson(tmp_path / "out.geojson")
    (_, line), (_, area) = features.lines[0], features.areas[0]
    np.testing.assert_allclose(line[np.argsort(line[:, 0])][[0, -1]], [(101.0, 54.95), (119.0, 54.95)], atol=0.1)
    np.testing.assert_allclose(area.bounds, (105.0, 54.0, 109.0, 58.0), atol=0.01)
    assert load_geojson(tmp_path / "out.geojson").labelled.tolist() == [True, True, False]
    before = (tmp_path / "out.geojson").read_bytes()
    vectorize_files(masks, 0.1, tmp_path / "out.geojson", origin_m=(100.0, 50.0))
    assert (tmp_path / "out.geojson").read_bytes() == before


def test_class_mask_to_an_expansion_that_the_devkit_opens(tmp_path: Path) -> None:
    from nuscenes.map_expansion.map_api import NuScenesMap

    mask = np.zeros((300, 400), np.uint8)
    mask[100:200] = 3
    mask[149:152, 20:380] = 1
    mask[100:200, 250:290] = 2
    cv2.imwrite(str(tmp_path / "classes.png"), mask)
    out = tmp_path / "maps" / "expansion" / "boston-seaport.json"
    summary = vectorize_files([tmp_path / "classes.png"], 0.1, out)
    assert summary.masks[0].classes == ("divider", "ped_crossing", "drivable_area")
    theirs = NuScenesMap(str(tmp_path), "boston-seaport")
    assert len(theirs.ped_crossing) == 1 and theirs.extract_polygon(theirs.ped_crossing[0]["polygon_token"]).area == pytest.approx(40.0, rel=0.02)
    assert len(theirs.road_divider) >= 1 and len(theirs.drivable_area) == 1
    assert json.loads(out.read_text())["canvas_edge"] == [40.0, 30.0]


def test_empty_masks_are_noted(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "empty.png"), np.zeros((50, 50), np.uint8))
    speck = np.zeros((50, 50), np.uint8)
    speck[10, 10] = 255
    cv2.imwrite(str(tmp_path / "speck.png"), speck)
    summary = vectorize_files([tmp_path / "empty.png", tmp_path / "speck.png"], 0.1, tmp_path / "out.geojson")
    assert [mask.note for mask in summary.masks] == ["no pixel is on", "nothing but noise"]
    assert read_geojson(tmp_path / "out.geojson").areas == []


def test_bad_masks_are_named(tmp_path: Path) -> None:
    good = tmp_path / "good.png"
    cv2.imwrite(str(good), messy(1) * 255)
    (tmp_path / "zero.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    broken = bytearray(good.read_bytes())
    broken[60:90] = zlib.compress(b"junk" * 10)[:30]
    (tmp_path / "broken.png").write_bytes(bytes(broken))
    out = tmp_path / "out.geojson"
    for name, message in (
        ("zero.png", "empty"), ("text.png", "not a readable image"), ("cut.png", "cut"), ("broken.png", "damaged|cut"), ("none.png", "not found"),
        (".", "directory"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            vectorize_files([tmp_path / name], 0.1, out)
    assert not out.exists()


def test_bad_arguments(tmp_path: Path) -> None:
    mask = tmp_path / "m.png"
    cv2.imwrite(str(mask), np.full((9, 9), 255, np.uint8))
    for arguments, message in (
        (([mask], 0.0, tmp_path / "o.geojson"), "resolution_m = 0.0"),
        (([mask], float("nan"), tmp_path / "o.geojson"), "resolution_m"),
        (([mask], 0.1, tmp_path / "o.shp"), "suffix '.shp'"),
        (([], 0.1, tmp_path / "o.geojson"), "0 masks"),
    ):
        with pytest.raises(DataError, match=message):
            vectorize_files(*arguments)
    with pytest.raises(DataError, match="class 'lawn': unknown"):
        vectorize_files([mask], 0.1, tmp_path / "o.geojson", classes=["lawn"])


def test_a_huge_mask_is_read_in_strips(tmp_path: Path) -> None:
    """20,000 x 20,000 pixels, 400 million: written row by row, read within the memory of a few strips."""
    side = 20_000
    row = np.zeros(side // 8, np.uint8)
    row[100:1000] = 255
    blank = b"\0" + bytes(side // 8)
    packer = zlib.compressobj(1)
    rows = (b"\0" + row.tobytes() if 500 <= i < 900 else blank for i in range(side))
    data = b"".join(packer.compress(line) for line in rows) + packer.flush()

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    (tmp_path / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))
    source = open_mask(tmp_path / "huge.png")
    assert (source.width, source.height) == (side, side)
    strip = next(source.strips(256, first_row=600))
    assert strip.shape == (256, side) and strip[:, 800:8000].all() and not strip[:, :800].any()


def test_damaged_geojson_is_named(tmp_path: Path) -> None:
    path = tmp_path / "map.geojson"
    for text, message in (("{", "not valid JSON"), ("[]", "FeatureCollection"), ('{"type":"FeatureCollection","features":[{}]}', r"features\[0\]")):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_geojson(path)


BOUNDED = """
import resource, sys
from pathlib import Path
from pipeline.maps.vectorize.command import vectorize_files
import numba, cv2, scipy.spatial
mask, warm, out, allowed_bytes = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
vectorize_files([warm], 0.1, out, classes=["divider"])  # libraries loaded and code compiled
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + allowed_bytes,) * 2)
print(vectorize_files([mask], 0.1, out, classes=["divider"]))
"""


def test_memory_for_a_large_mask_is_bounded(tmp_path: Path) -> None:
    """8,000 x 8,000 pixels within 160 MB more address space than a small mask takes; with `tile_px` 16384 one array alone needs 488."""
    mask = np.zeros((8000, 8000), np.uint8)
    for offset in (1000, 5000):
        cv2.line(mask, (offset, 0), (offset + 300, 8000), 1, 5)
        cv2.line(mask, (0, offset), (8000, offset - 200), 1, 5)
    Image.fromarray(mask.astype(bool)).save(tmp_path / "large.png", compress_level=1)
    Image.fromarray(mask[:300, 900:1300].astype(bool)).save(tmp_path / "small.png")
    arguments = [str(tmp_path / "large.png"), str(tmp_path / "small.png"), str(tmp_path / "out.geojson"), str(160 << 20)]
    done = subprocess.run([sys.executable, "-c", BOUNDED, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12 lines and 0 areas")
