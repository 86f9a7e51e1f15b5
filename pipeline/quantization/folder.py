"""Calibration data of a user's own model: a folder of .npy or .npz files, already normalised as in training.

DIR/<input name>/*.npy    one file a batch and input; the batches of different inputs are matched by file name
DIR/*.npz                 one file a batch, with one array for each input
DIR/*.npy                 one file a batch, for a model with a single input
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import file_error
from pipeline.io import inside


def folder_batches(folder: Path, inputs: Sequence[str]) -> tuple[int, Iterator[dict[str, NDArray]]]:
    """(number of batches, iterator over them in the order of their file names).

    Raises `DataError` naming the folder or file: missing, empty, an input without data, different sets of files, a file that is no array.
    """
    if not folder.is_dir():
        raise file_error(folder, "calibration folder not found")
    archives = sorted(folder.glob("*.npz"))
    if archives:
        return len(archives), (_read_archive(path, inputs) for path in archives)
    files = _files_by_input(folder, inputs)
    names = sorted(files[inputs[0]])
    return len(names), ({name: _read_array(files[name][stem]) for name in inputs} for stem in names)


def _files_by_input(folder: Path, inputs: Sequence[str]) -> dict[str, dict[str, Path]]:
    """Input -> file name -> path; every input has the same file names."""
    flat = {path.name: path for path in sorted(folder.glob("*.npy"))}
    if flat and len(inputs) == 1:
        return {inputs[0]: flat}
    files = {}
    for name in inputs:
        files[name] = {path.name: path for path in sorted(inside(folder, name).glob("*.npy"))}
        if not files[name]:
            raise file_error(folder, f"no calibration data for input {name!r}", f"expected {name}/*.npy, or *.npz with arrays {', '.join(inputs)}")
    first = set(files[inputs[0]])
    for name in inputs:
        if different := sorted(first.symmetric_difference(files[name])):
            raise file_error(folder, f"inputs {inputs[0]!r} and {name!r} have different batches, for example {different[0]}")
    return files


def _read_array(path: Path) -> NDArray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise file_error(path, f"not a NumPy array file, or cut short ({error})") from error


def _read_archive(path: Path, inputs: Sequence[str]) -> dict[str, NDArray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in inputs if name not in archive.files]
            if missing:
                raise file_error(path, f"holds no array for input {missing[0]!r}; it has {', '.join(archive.files)}")
            return {name: archive[name] for name in inputs}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise file_error(path, f"not a NumPy archive, or cut short ({error})") from error
