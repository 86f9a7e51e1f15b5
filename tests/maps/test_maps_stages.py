"""Stages topology and vectorize: stores, reports, missing and damaged maps, the raster migration path."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from pipeline.config import Config
from pipeline.dataset.build import IndexTables
from pipeline.dataset.index import write_index
from pipeline.errors import DataError
from pipeline.io import read_json
from pipeline.maps.store import MapStore, read_labels
from pipeline.paths import Paths
from pipeline.stages import topology, vectorize
from tests.maps.small_maps import ego, moved, street

CONFIG = Config.model_validate({"execution": {"workers": 1}})
RASTER = Config.model_validate({"execution": {"workers": 1}, "maps": {"source": "raster"}})


def digest(folder: Path) -> str:
    content = b"".join(path.name.encode() + path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    return hashlib.sha256(content).hexdigest()


def project(tables: IndexTables, tmp_path: Path, location: str = "boston-seaport", x_m: float = 100.0, y_m: float = 100.0) -> Paths:
    """A project with a data set at `tmp_path`/set whose samples all stand at one place."""
    paths = Paths(tmp_path / "project")
    write_index(moved(tables, location, ego(x_m, y_m, 0.0)), paths.index_dir, str(tmp_path / "set"), "v1.0", "test")
    return paths


def write_raster(root: Path, location: str = "boston-seaport") -> np.ndarray:
    """A raster map, 10 px/m, 200 m x 200 m: a street along x at y 94..106 m with a hole, as map.json and log.json name it."""
    mask = np.zeros((2000, 2000), np.uint8)
    mask[2000 - 1060 : 2000 - 940, 100:1900] = 255
    mask[2000 - 1050 : 2000 - 1030, 880:920] = 0
    (root / "maps").mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(root / "maps" / "raster.png"), mask)
    (root / "v1.0").mkdir(exist_ok=True)
    (root / "v1.0" / "map.json").write_text(
        json.dumps([{"token": "m", "filename": "maps/raster.png", "log_tokens": ["l"], "category": "semantic_prior"}])
    )
    (root / "v1.0" / "log.json").write_text(json.dumps([{"token": "l", "location": location}]))
    return mask


def test_real_samples_are_labelled_alike_by_one_and_two_processes(minival: Paths) -> None:
    result = topology.run(CONFIG, minival)
    assert (result.samples, result.with_map, result.locations_without_map) == (81, 81, ())
    first, report = digest(minival.maps_dir), read_json(minival.report("topology.json"))
    topology.run(Config.model_validate({"execution": {"workers": 2}}), minival)
    assert digest(minival.maps_dir) == first and read_json(minival.report("topology.json")) == report
    assert report["elements"]["ped_crossing"] > 0 and report["locations"]["singapore-queenstown"]["labelled"] == ["divider", "boundary"]
    store = MapStore.open(minival.maps_dir)
    assert len(store) == 81
    total = 0
    for token in store.tokens():
        label = store.get(token)
        assert label is not None
        lines = len(label.polylines)
        assert label.resampled.shape == (lines, 20, 2) and len(label.closed) == len(label.polyline_class) == lines
        assert label.topology_matrix.shape == (len(label.line_segments), len(label.polygons))
        assert len(label.line_segments) == sum(len(line) - 1 for line in label.polylines)
        assert label.closed.sum() == len(label.polygons) and (np.abs(label.resampled) <= [30.001, 15.001]).all()
        total += lines
    assert total == sum(report["elements"].values())


def test_a_data_set_without_maps_gives_an_empty_store(minival_tables: IndexTables, tmp_path: Path) -> None:
    paths = project(minival_tables, tmp_path)
    result = topology.run(CONFIG, paths)
    assert result.with_map == 0 and "no map for boston-seaport" in str(result)
    store = MapStore.open(paths.maps_dir)
    assert len(store) == 0 and store.get(minival_tables.samples["token"][0].as_py()) is None
    assert read_json(paths.report("topology.json"))["samples"] == {"total": 81, "with_map": 0, "without_map": 81}
    with pytest.raises(DataError, match="'nobody' is unknown"):
        store.get("nobody")


def test_a_damaged_map_fails_and_leaves_the_last_store(minival_tables: IndexTables, tmp_path: Path) -> None:
    paths = project(minival_tables, tmp_path, location="good")
    street().write(tmp_path / "set", "good")
    topology.run(CONFIG, paths)
    before = digest(paths.maps_dir)
    (tmp_path / "set" / "maps" / "expansion" / "good.json").write_text('{"version": "1.3", "node": [')
    write_index(moved(minival_tables, "bad", ego(0, 0, 0)), paths.index_dir, str(tmp_path / "set"), "v1.0", "test")
    (tmp_path / "set" / "maps" / "expansion" / "good.json").rename(tmp_path / "set" / "maps" / "expansion" / "bad.json")
    with pytest.raises(DataError, match=r"bad\.json: not valid JSON"):
        topology.run(CONFIG, paths)
    assert digest(paths.maps_dir) == before


def test_a_location_cannot_leave_the_data_set(minival_tables: IndexTables, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves its root"):
        topology.run(CONFIG, project(minival_tables, tmp_path, location="../../../../secret"))


def test_damaged_store_files_are_named(minival: Paths) -> None:
    topology.run(CONFIG, minival)
    token = MapStore.open(minival.maps_dir).tokens()[0]
    for path in (minival.maps_dir / "scenes").glob("*.npz"):
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match="damaged map labels"):
        MapStore.open(minival.maps_dir).get(token)
    with pytest.raises(DataError, match="file not found"):
        read_labels(minival.maps_dir / "scenes" / "none.npz")
    (minival.maps_dir / "index.json").write_text("{}")
    with pytest.raises(DataError, match="not an index of map labels"):
        MapStore.open(minival.maps_dir)


def test_raster_stands_in_where_there_is_no_expansion(minival_tables: IndexTables, tmp_path: Path) -> None:
    """Migration path: labels from the vectorized raster map, and only where `maps.source` says so."""
    paths = project(minival_tables, tmp_path)
    write_raster(tmp_path / "set")
    assert vectorize.run(RASTER, paths).vectorized == ("boston-seaport",)
    assert topology.run(CONFIG, paths).with_map == 0
    assert topology.run(RASTER, paths).with_map == 81
    location = read_json(paths.report("topology.json"))["locations"]["boston-seaport"]
    assert (location["source"], location["labelled"]) == ("raster", ["boundary"])
    store = MapStore.open(paths.maps_dir)
    label = store.get(store.tokens()[0])
    assert label is not None and label.labelled.tolist() == [False, False, True] and label.closed.sum() == 1
    edges = np.concatenate([line for line, closed in zip(label.polylines, label.closed, strict=True) if not closed])
    assert np.abs(np.abs(edges[:, 1]) - 6.0).max() < 0.1
    hole = label.polylines[int(np.flatnonzero(label.closed)[0])]
    np.testing.assert_allclose([hole.min(axis=0), hole.max(axis=0)], [[-12, 3], [-8, 5]], atol=0.1)


def test_expansion_comes_first_and_measures_the_raster(minival_tables: IndexTables, tmp_path: Path) -> None:
    paths = project(minival_tables, tmp_path)
    write_raster(tmp_path / "set")
    small = street()
    for node in small.content["node"]:
        node["x"], node["y"] = node["x"] + 100.0, node["y"] + 100.0
    small.write(tmp_path / "set")
    vectorize.run(RASTER, paths)
    topology.run(RASTER, paths)
    assert read_json(paths.report("topology.json"))["locations"]["boston-seaport"]["source"] == "expansion"
    fit = read_json(paths.report("vectorize.json"))["locations"]["boston-seaport"]["round_trip"]
    assert fit["iou"] > 0.99 and fit["boundary_distance_p95_m"] < 0.1


def test_vectorize_reads_only_the_surroundings_of_the_samples(minival_tables: IndexTables, tmp_path: Path) -> None:
    paths = project(minival_tables, tmp_path)
    write_raster(tmp_path / "set")
    vectorize.run(RASTER, paths)
    first = digest(paths.vectorized_dir)
    location = read_json(paths.report("vectorize.json"))["locations"]["boston-seaport"]
    assert max(location["region_px"]) <= 1024 and (location["areas"], location["holes"]) == (1, 1)
    vectorize.run(RASTER, paths)
    assert digest(paths.vectorized_dir) == first


def test_vectorize_without_or_beside_a_raster(minival_tables: IndexTables, tmp_path: Path) -> None:
    paths = project(minival_tables, tmp_path, x_m=9000.0)
    write_raster(tmp_path / "set")
    assert "no raster map for boston-seaport" in str(vectorize.run(CONFIG, paths))
    assert read_json(paths.report("vectorize.json"))["locations"]["boston-seaport"]["note"] == "no sample lies on the raster map"
    (tmp_path / "set" / "maps" / "raster.png").unlink()
    vectorize.run(CONFIG, paths)
    assert read_json(paths.report("vectorize.json"))["locations"]["boston-seaport"]["note"] == "no raster map"
    (tmp_path / "set" / "v1.0" / "map.json").write_text('[{"filename": "maps/raster.png"}]')
    with pytest.raises(DataError, match=r"map\.json"):
        vectorize.run(CONFIG, paths)


def test_a_damaged_raster_fails_with_its_name(minival_tables: IndexTables, tmp_path: Path) -> None:
    paths = project(minival_tables, tmp_path)
    write_raster(tmp_path / "set")
    image = tmp_path / "set" / "maps" / "raster.png"
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 3])
    with pytest.raises(DataError, match=r"raster\.png"):
        vectorize.run(CONFIG, paths)
