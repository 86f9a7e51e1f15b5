"""Reading masks row by row, so that memory depends on the width of a mask and not on its area.

A PNG is one stream of compressed rows, each coded relative to the row above. Image libraries decode all of it (the nuScenes base maps are up
to 37,000 x 32,000 pixels). Here the stream is inflated a strip at a time; a strip, with the decoded row above it, is wrapped as a small PNG
of its own and handed to Pillow, which undoes the row filters.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from pipeline.errors import file_error
from pipeline.maps.vectorize.thinning import MaskArray

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by PNG colour type
WRAPPER_COLOR_TYPE = {1: 0, 2: 4, 3: 2, 4: 6}  # colour type of 8-bit images by bytes a pixel
MAX_WHOLE_PIXELS = 1 << 26  # other formats and interlaced PNGs are decoded whole up to this size
MAX_SIDE_PX = 1 << 20


class MaskSource(Protocol):
    """A mask that can be read from top to bottom."""

    @property
    def height(self) -> int:
        """Rows."""
        ...

    @property
    def width(self) -> int:
        """Columns."""
        ...

    def strips(self, rows: int, first_row: int = 0) -> Iterator[MaskArray]:
        """Successive strips (at most `rows`, width) of gray values, indices or 0/1, from `first_row` on."""
        ...


@dataclass(frozen=True)
class ArrayMask:
    """A mask (H, W) in memory."""

    values: MaskArray

    @property
    def height(self) -> int:
        """Rows."""
        return self.values.shape[0]

    @property
    def width(self) -> int:
        """Columns."""
        return self.values.shape[1]

    def strips(self, rows: int, first_row: int = 0) -> Iterator[MaskArray]:
        """See `MaskSource`."""
        for start in range(first_row, self.height, rows):
            yield self.values[start : start + rows]


@dataclass(frozen=True)
class PngMask:
    """A PNG file that is not interlaced and has at most 8 bits a channel."""

    path: Path
    width: int
    height: int
    bit_depth: int
    color_type: int

    def strips(self, rows: int, first_row: int = 0) -> Iterator[MaskArray]:
        """See `MaskSource`. Raises `DataError` where the file turns out to be cut or damaged."""
        row_bytes = (self.width * self.bit_depth * CHANNELS[self.color_type] + 7) // 8
        above = np.empty((0, row_bytes), dtype=np.uint8)
        done = 0
        with self.path.open("rb") as stream:
            inflated = _Inflater(self.path, stream)
            while done < self.height:
                wanted = done >= first_row
                count = min(rows, (self.height if wanted else first_row) - done)
                filtered = inflated.read(count * (1 + row_bytes))
                if len(filtered) < count * (1 + row_bytes):
                    raise file_error(self.path, f"the image is cut: {done + len(filtered) // (1 + row_bytes)} of {self.height} rows are there")
                if not wanted:
                    above, filtered = _shortest_tail(above, filtered, 1 + row_bytes)
                raw = self._unfilter(above, filtered, row_bytes)
                if wanted:
                    yield self._values(raw)
                above = raw[-1:]
                done += count

    def _unfilter(self, above: MaskArray, filtered: bytes, row_bytes: int) -> MaskArray:
        """Raw bytes (rows, row_bytes) of filtered rows; `above` is the raw row before them, or nothing."""
        pixel_bytes = max(1, self.bit_depth * CHANNELS[self.color_type] // 8)
        stored = b"".join(b"\0" + row.tobytes() for row in above) + filtered
        rows = len(stored) // (1 + row_bytes)
        header = struct.pack(">IIBBBBB", row_bytes // pixel_bytes, rows, 8, WRAPPER_COLOR_TYPE[pixel_bytes], 0, 0, 0)
        png = PNG_SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(stored, 0)) + _chunk(b"IEND", b"")
        try:
            raw = np.asarray(Image.open(io.BytesIO(png))).reshape(rows, row_bytes)
        except (OSError, ValueError, SyntaxError) as error:
            raise file_error(self.path, f"damaged PNG ({error})") from None
        return raw[len(above) :]

    def _values(self, raw: MaskArray) -> MaskArray:
        """Gray values or indices (rows, width): of several channels the brightest one, without alpha."""
        if self.bit_depth < 8:
            bits = np.unpackbits(raw, axis=1, count=self.width * self.bit_depth).reshape(len(raw), self.width, self.bit_depth)
            weights = 1 << np.arange(self.bit_depth - 1, -1, -1, dtype=np.uint8)
            return bits[..., 0] if self.bit_depth == 1 else (bits * weights).sum(axis=2, dtype=np.uint8)
        channels = raw.reshape(len(raw), self.width, CHANNELS[self.color_type])
        return channels[..., 0] if channels.shape[2] < 3 else channels[..., :3].max(axis=2)


def open_mask(path: Path) -> MaskSource:
    """Open an image file as a mask.

    Raises:
        DataError: the file is missing, empty, no image, or too large for a format that cannot be read in strips.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(PNG_SIGNATURE))
            kind, header = _read_chunk(stream) if start == PNG_SIGNATURE else (b"", b"")
    except FileNotFoundError:
        raise file_error(path, "file not found") from None
    except IsADirectoryError:
        raise file_error(path, "is a directory, not an image") from None
    if not start:
        raise file_error(path, "the file is empty")
    if kind != b"IHDR" or len(header) != 13:
        return _whole_image(path)
    width, height, bit_depth, color_type, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    if not (1 <= width <= MAX_SIDE_PX and 1 <= height <= MAX_SIDE_PX and color_type in CHANNELS):
        raise file_error(path, f"damaged PNG: width {width}, height {height}, colour type {color_type}")
    return _whole_image(path) if interlaced or bit_depth > 8 else PngMask(path, width, height, bit_depth, color_type)


def _whole_image(path: Path) -> ArrayMask:
    """Any image that Pillow reads, decoded at once."""
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_WHOLE_PIXELS:
                raise file_error(path, f"{image.width} x {image.height} pixels: only PNGs without interlacing may exceed {MAX_WHOLE_PIXELS} pixels")
            plain = image if image.mode in ("L", "P", "1") else image.convert("L")
            return ArrayMask(np.asarray(plain).astype(np.uint8))
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise file_error(path, f"not a readable image ({error})") from None


def _shortest_tail(above: MaskArray, filtered: bytes, stride: int) -> tuple[MaskArray, bytes]:
    """The fewest rows from which the last one can be decoded: those from the last row that does not refer to the row above it (filter 0 or 1)."""
    alone = np.flatnonzero(np.frombuffer(filtered, dtype=np.uint8)[::stride] <= 1)
    return (above[:0], filtered[alone[-1] * stride :]) if len(alone) else (above, filtered)


class _Inflater:
    """Reads the compressed stream that the IDAT chunks of a PNG hold."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._inflate = zlib.decompressobj()
        stream.seek(len(PNG_SIGNATURE))

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer at the end of the file."""
        parts, missing = [], size
        while missing > 0:
            compressed = self._inflate.unconsumed_tail or self._next_data()
            try:
                part = self._inflate.decompress(compressed, missing) if compressed else self._inflate.flush(missing)[:missing]
            except zlib.error as error:
                raise file_error(self._path, f"damaged PNG ({error})") from None
            parts.append(part)
            missing -= len(part)
            if not compressed:
                break
        return b"".join(parts)

    def _next_data(self) -> bytes:
        """Content of the next IDAT chunk that has any; nothing at the end."""
        while True:
            kind, data = _read_chunk(self._stream)
            if kind in (b"IEND", b"") or (kind == b"IDAT" and data):
                return data if kind == b"IDAT" else b""


def _read_chunk(stream: BinaryIO) -> tuple[bytes, bytes]:
    """Kind and content of the next chunk; the content is short, or both are empty, where the file is cut."""
    prefix = stream.read(8)
    if len(prefix) < 8:
        return b"", b""
    size, kind = struct.unpack(">I4s", prefix)
    data = stream.read(size)
    stream.seek(4, io.SEEK_CUR)  # checksum: the stream has its own
    return kind, data


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
