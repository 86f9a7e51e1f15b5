"""Determinism, replacement and failure."""

import hashlib
from pathlib import Path

import pytest

import pipeline.dataset.synthetic.writer as generation
from pipeline.config import SyntheticConfig
from pipeline.dataset.synthetic import VERSION

SMALL = SyntheticConfig(seed=1, train_scenes=1, val_scenes=1, samples_per_scene=2, image_width=64, image_height=36, lidar_azimuth_steps=90)


def digest(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("small") / "nuscenes"
    generation.generate(SMALL, root, workers=1)
    return root


def test_same_seed_same_bytes_with_other_processes(small_root: Path, tmp_path: Path):
    again = tmp_path / "nuscenes"
    generation.generate(SMALL, again, workers=2)
    first, second = digest(small_root), digest(again)
    assert len(first) > 40
    assert first == second


def test_other_seed_other_images_same_layout_of_files(small_root: Path, tmp_path: Path):
    other = tmp_path / "nuscenes"
    generation.generate(SMALL.model_copy(update={"seed": 2}), other, workers=1)
    first, second = digest(small_root), digest(other)
    assert {Path(name).parts[:2] for name in first} >= {Path(name).parts[:2] for name in second if not name.startswith("gts")}
    assert not set(first.values()) & {value for name, value in second.items() if name.endswith(".jpg")}


def test_an_interrupted_generation_leaves_the_old_set(small_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "data" / "nuscenes"
    (target / VERSION).mkdir(parents=True)
    (target / VERSION / "scene.json").write_text("[]")

    def broken(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(generation, "_write_maps", broken)
    with pytest.raises(OSError, match="no space"):
        generation.generate(SMALL, target, workers=1)
    assert digest(target) == {f"{VERSION}/scene.json": hashlib.sha256(b"[]").hexdigest()}
    assert [p.name for p in target.parent.iterdir()] == ["nuscenes"]


def test_paths_in_tables_do_not_name_the_machine(small_root: Path):
    for table in (small_root / VERSION).glob("*.json"):
        assert str(small_root.parent) not in table.read_text()
