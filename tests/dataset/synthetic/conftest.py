from pathlib import Path

import pytest

from pipeline.config import SyntheticConfig
from pipeline.dataset.synthetic import VERSION, generate

TINY = SyntheticConfig(
    seed=5, train_scenes=1, val_scenes=1, samples_per_scene=3, image_width=160, image_height=90, jpeg_quality=90, lidar_azimuth_steps=360
)


@pytest.fixture(scope="session")
def synthetic_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of two scenes with three key frames each, small images."""
    root = tmp_path_factory.mktemp("synthetic") / "nuscenes"
    summary = generate(TINY, root, workers=1)
    assert (summary.scenes, summary.samples) == (2, 6)
    return root


@pytest.fixture(scope="session")
def nusc(synthetic_root: Path):
    from nuscenes.nuscenes import NuScenes

    return NuScenes(VERSION, str(synthetic_root), verbose=False)
