"""Pixels land where the geometry's matrix says, and unusable files are named."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.dataset.images import ImageGeometry, ImageStore, load_image, load_resized, network_ego2img
from pipeline.dataset.index import Index
from pipeline.errors import DataError
from pipeline.taxonomy import CAMERAS


def test_reference_sizes() -> None:
    """1600 x 900 to 704 x 256 keeps the lower 256 of 396 rows (the usual nuScenes preprocessing: resize 0.44, crop 140 from the top)."""
    assert ImageGeometry.fit(1600, 900, (256, 704)) == ImageGeometry(0.44, 0, 140, 256, 704)
    assert ImageGeometry.fit(400, 225, (128, 352)) == ImageGeometry(0.88, 0, 70, 128, 352)


def test_identity_geometry_keeps_pixels() -> None:
    geometry = ImageGeometry.fit(64, 36, (36, 64))
    np.testing.assert_array_equal(geometry.matrix(), np.eye(3))
    image = np.random.default_rng(0).integers(0, 255, (36, 64, 3), dtype=np.uint8)
    np.testing.assert_array_equal(geometry.apply(image), image)


sizes = st.tuples(st.integers(16, 60).map(lambda n: 4 * n), st.integers(16, 100).map(lambda n: 4 * n))


@settings(max_examples=60, deadline=None)
@given(network=sizes, width=st.integers(200, 800), height=st.integers(120, 500), where=st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)))
def test_a_blob_lands_where_the_matrix_says(network: tuple[int, int], width: int, height: int, where: tuple[float, float]) -> None:
    """The centre of mass of a soft dot is preserved by area resizing to a fraction of a pixel, so a half-pixel error would show."""
    geometry = ImageGeometry.fit(width, height, network)
    inverse = np.linalg.inv(geometry.matrix())
    target = np.array([where[0] * network[1], where[1] * network[0], 1.0])
    u, v, _ = inverse @ target
    sigma = 3.0 / geometry.resize
    assume(4 * sigma < u < width - 4 * sigma and 4 * sigma < v < height - 4 * sigma)
    assume(13 < target[0] < network[1] - 13 and 13 < target[1] < network[0] - 13)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    dot = 255 * np.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * sigma**2))
    small = geometry.apply(np.repeat(dot[:, :, None], 3, axis=2).astype(np.uint8))[:, :, 0].astype(float)
    rows, columns = np.indices(small.shape)
    found = np.array([(small * columns).sum(), (small * rows).sum()]) / small.sum()
    np.testing.assert_allclose(found, target[:2], atol=0.12)


@given(network=sizes, width=st.integers(64, 2000), height=st.integers(36, 1500))
def test_result_has_the_network_size(network: tuple[int, int], width: int, height: int) -> None:
    geometry = ImageGeometry.fit(width, height, network)
    assert geometry.crop_left >= 0 and geometry.crop_top >= 0
    assert geometry.crop_top + network[0] == round(height * geometry.resize)
    assert geometry.crop_left + network[1] <= round(width * geometry.resize)


def test_ego2img_of_the_network_input_is_the_original_one_moved(real_index: Index) -> None:
    record = real_index.sample(real_index.tokens()[0])
    projections = network_ego2img(record, (256, 704))
    point = np.array([12.0, 1.0, 0.5, 1.0])
    original, scaled = record.ego2img("CAM_FRONT") @ point, projections[CAMERAS.index("CAM_FRONT")] @ point
    expected = 0.44 * (original[:2] / original[2] + 0.5) - 0.5 - [0, 140]
    np.testing.assert_allclose(scaled[:2] / scaled[2], expected, atol=1e-9)


def _jpeg(path: Path) -> bytes:
    cv2.imwrite(str(path), np.full((90, 160, 3), (200, 100, 50), np.uint8))
    return path.read_bytes()


def test_channel_order_is_rgb(tmp_path: Path) -> None:
    _jpeg(tmp_path / "a.jpg")
    red, green, blue = load_image(tmp_path / "a.jpg")[45, 80]
    assert red < green < blue


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "0 bytes"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: b"not an image at all", "cannot be decoded"),
    ],
)
def test_unusable_image_is_named(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(change(_jpeg(path)))
    with pytest.raises(DataError, match=f"a.jpg.*{message}"):
        load_image(path)


def test_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jpg: image cannot be read"):
        load_image(tmp_path / "gone.jpg")


def test_store_returns_the_decoded_images_and_reads_them_back_from_the_cache(real_index: Index, real_root: Path, tmp_path: Path) -> None:
    token = next(token for token in real_index.tokens() if real_index.sample(token).cameras["CAM_FRONT"].path.is_file())
    record = real_index.sample(token)
    size = (32, 88)
    expected = np.stack([load_resized(record.cameras[channel], size) for channel in CAMERAS])
    store = ImageStore(real_index, size, tmp_path)
    np.testing.assert_array_equal(store.images(record), expected)
    (cached,) = tmp_path.glob("images-*/images.npy")
    stored = np.load(cached, mmap_mode="r")
    np.testing.assert_array_equal(stored[real_index.tokens(kept_only=False).index(token)], expected)
    np.testing.assert_array_equal(ImageStore(real_index, size, tmp_path).images(record), expected)


def test_store_without_room_decodes_every_time(real_index: Index, tmp_path: Path) -> None:
    token = next(token for token in real_index.tokens() if real_index.sample(token).cameras["CAM_FRONT"].path.is_file())
    store = ImageStore(real_index, (32, 88), tmp_path, max_cache_bytes=10)
    assert store.images(real_index.sample(token)).shape == (6, 32, 88, 3)
    assert not list(tmp_path.iterdir())


def test_cache_of_another_size_or_data_set_is_not_read(real_index: Index, tmp_path: Path) -> None:
    ImageStore(real_index, (32, 88), tmp_path)
    ImageStore(real_index, (64, 176), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
