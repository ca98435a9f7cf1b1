"""Shared by all tests: where the checkout is, and which browser draws pages."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def chromium() -> str:
    """A headless Chromium; tests that need it are skipped where there is none (CI installs one)."""
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on the PATH")
    return found
