"""Shared by all tests: where the checkout is, and which browser draws pages."""

import shutil
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# `make test &` in a script: the shell hands ignored keyboard signals on, and tests that press Ctrl-C would press nothing.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start real servers first: last, one of two workers would wait minutes for the other."""
    items.sort(key=lambda item: item.get_closest_marker("server") is None)


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
