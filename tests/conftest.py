"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two cores are shared by everything: one thread per library is faster for the small tensors of the tests, and repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

PROJECT_ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def project_root() -> Path:
    return PROJECT_ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with real data, measured latencies and graphs, beside the checkout; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("BEVJ6_SHARED", PROJECT_ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder} (set BEVJ6_SHARED)")
    return folder
