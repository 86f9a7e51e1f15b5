"""What changed in the data between two versions, and the ways in which data come into the project."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from flows.dvc_dag import is_up_to_date
from pipeline.errors import DataError
from pipeline.tracking.data_diff import as_text, diff_data


def dvc(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *arguments, "--quiet"], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, name: str) -> None:
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", *identity, "commit", "--quiet", "--message", name], cwd=folder, check=True)
    subprocess.run(["git", "tag", name], cwd=folder, check=True)


def write_data(project: Path, boxes: dict[str, list[float]], image: str = "pixels", kept: bool = True, fingerprint: str = "a") -> None:
    """A data set of one sample, one image and a few boxes for each scene, and the index and map labels of it."""
    samples = [
        {"token": f"{name}-0", "scene_name": name, "timestamp_us": 1, "split": "train", "location": "town", "keep": kept, "drop_reason": ""}
        for name in boxes
    ]
    frame = {"channel": "CAM_FRONT", "timestamp_us": 1}
    frames = [{"token": f"{name}-f", "sample_token": f"{name}-0", "filename": f"samples/{name}.jpg", **frame} for name in boxes]
    rows = [
        {"token": f"{name}-{number}", "sample_token": f"{name}-0", "instance_token": str(number), "category": "car", "global_center": [x, 0.0, 0.0]}
        for name, places in boxes.items()
        for number, x in enumerate(places)
    ]
    for table, content in (("samples", samples), ("frames", frames), ("boxes", rows)):
        (project / "data/index").mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(content), project / f"data/index/{table}.parquet")
    for name in boxes:
        files = {f"nuscenes/samples/{name}.jpg": image + name, f"maps/scenes/{name}.npz": "lines", f"nuscenes/gts/{name}/0/labels.npz": "voxels"}
        for path, text in files.items():
            (project / "data" / path).parent.mkdir(parents=True, exist_ok=True)
            (project / "data" / path).write_text(text)
    (project / "data/nuscenes/maps").mkdir(exist_ok=True)
    (project / "data/nuscenes/maps/town.png").write_text("map")
    (project / "data/dataset.json").write_text(json.dumps({"fingerprint": fingerprint}))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the tags one and two: scene b lost a box and its image changed, c is gone, d is new, the base map and a's map labels changed."""
    project = tmp_path_factory.mktemp("data-versions")
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    dvc(project, "init")
    (project / ".gitignore").write_text("/data/index\n/data/maps\n/data/nuscenes\n")
    write_data(project, {"a": [1.0], "b": [1.0, 2.0], "c": [3.0]})
    dvc(project, "add", "data/nuscenes", "data/index", "data/maps")
    commit(project, "one")
    shutil.rmtree(project / "data/nuscenes")
    write_data(project, {"a": [1.0], "b": [1.0], "d": [4.0]}, fingerprint="b")
    (project / "data/nuscenes/samples/b.jpg").write_text("other pixels")
    (project / "data/nuscenes/maps/town.png").write_text("new map")
    (project / "data/maps/scenes/a.npz").write_text("other lines")
    dvc(project, "add", "data/nuscenes", "data/index", "data/maps")
    commit(project, "two")
    return project


def test_difference_of_two_revisions_names_scenes_and_parts(versions: Path) -> None:
    diff = diff_data(versions, "one", "two")
    assert (diff.added, diff.removed, diff.unchanged) == (("d",), ("c",), 0)
    assert diff.changed == {"a": ("map",), "b": ("files", "labels")}
    assert diff.boxes == {"b": (2, 1)}
    assert diff.maps == ("maps/town.png",)
    assert diff.fingerprints == ("a", "b")
    text = as_text(diff)
    assert "~ b: files, labels (2 -> 1 boxes)" in text
    assert text.endswith("1 scenes added, 1 removed, 2 changed, 0 unchanged; 1 map files differ")


def test_version_equals_itself_and_the_working_tree(versions: Path) -> None:
    for other in ("two", "."):
        diff = diff_data(versions, "two", other)
        assert diff.same, diff
        assert as_text(diff).startswith(f"the data of two and {other} are the same: 3 scenes")


def test_difference_is_symmetric(versions: Path) -> None:
    forth, back = diff_data(versions, "one", "two"), diff_data(versions, "two", "one")
    assert (forth.added, forth.removed, forth.changed, forth.maps) == (back.removed, back.added, back.changed, back.maps)


def test_version_without_data_is_named(versions: Path) -> None:
    with pytest.raises(DataError, match="no-such-tag: not a git revision"):
        diff_data(versions, "no-such-tag", "two")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    tree = git_output(versions, "hash-object", "-t", "tree", "-w", "/dev/null")
    git_output(versions, "tag", "--force", "empty", git_output(versions, *identity, "commit-tree", tree, "-m", "empty"))
    with pytest.raises(DataError, match=r"empty: data/index/samples\.parquet: is not in"):
        diff_data(versions, "empty", "two")


def git_output(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("way", ["add", "import-url"])
def test_real_data_that_change_outdate_the_data_stage(tmp_path: Path, project_root: Path, way: str) -> None:
    """The two ways of docs/operations.md, with the real dvc.yaml's stage `dataset` and its `dataset.watch`."""
    import yaml

    project, source = tmp_path / "project", tmp_path / "delivered"
    project.mkdir()
    source.mkdir()
    (source / "scene.json").write_text("[]")
    subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    shutil.copy(project_root / ".gitignore", project)  # DVC refuses to keep its files where git ignores them
    dvc(project, "init")
    stage = yaml.safe_load((project_root / "dvc.yaml").read_text())["stages"]["dataset"]
    kept: dict[str, Any] = {"deps": ["${dataset.watch}"], "params": stage["params"], "outs": ["data/dataset.json"]}
    assert "${dataset.watch}" in stage["deps"]
    command = "mkdir -p data && cp -r data/raw/scene.json data/dataset.json"
    (project / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"dataset": {"cmd": command, **kept}}}))
    (project / "params.yaml").write_text(yaml.safe_dump({"dataset": {"source": "nuscenes", "dataroot": "data/raw", "watch": "data/raw"}}))
    raw = project / "data/raw"
    if way == "add":
        shutil.copytree(source, raw)
        dvc(project, "add", "data/raw")
    else:
        (project / "data").mkdir()
        dvc(project, "import-url", str(source), "data/raw")
    dvc(project, "repro", "dataset")
    assert is_up_to_date(project, "dataset", lambda _: None)
    (source / "scene.json").write_text('[{"name": "scene-0002"}]')
    if way == "add":
        shutil.copy(source / "scene.json", raw)
    else:
        dvc(project, "update", "data/raw.dvc")
    assert not is_up_to_date(project, "dataset", lambda _: None)
    dvc(project, "repro", "dataset")
    assert "scene-0002" in (project / "data/dataset.json").read_text()
    assert is_up_to_date(project, "dataset", lambda _: None)
