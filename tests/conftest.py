"""Settings of every test run: offline, one thread, no window, and Triton's mode.

Tests marked ``gpu`` or ``browser`` are skipped by name where the thing they need is missing.
``PROOFREAD_REQUIRE_BROWSER=1`` turns a missing browser into a failure.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from proofread.notebooks import KERNEL_ENVIRONMENT

# Before anything imports numpy, torch or matplotlib; nbval's kernels inherit it, so that they run
# under the same settings as the execution that they repeat.
os.environ.update(KERNEL_ENVIRONMENT)
os.environ.setdefault("MPLBACKEND", "Agg")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def _has_cuda() -> bool:
    """Whether torch can use a CUDA device; without a driver's device file torch is not asked."""
    if not any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available()


HAS_CUDA = _has_cuda()
if not HAS_CUDA:  # before anything imports triton: its mode is fixed then
    os.environ["TRITON_INTERPRET"] = "1"


def _find_chromium() -> str | None:
    wanted = os.environ.get("CHROMIUM")
    names = (wanted,) if wanted else BROWSERS
    return next((path for name in names if (path := shutil.which(name))), None)


CHROMIUM = _find_chromium()
NO_BROWSER = "needs Chromium: install it, or set CHROMIUM to its executable"


def _browser_required() -> bool:
    return os.environ.get("PROOFREAD_REQUIRE_BROWSER") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    no_browser = pytest.mark.skip(reason=NO_BROWSER)
    for item in items:
        if not HAS_CUDA and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if CHROMIUM is None and not _browser_required() and item.get_closest_marker("browser"):
            item.add_marker(no_browser)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if CHROMIUM is None and _browser_required() and item.get_closest_marker("browser"):
        pytest.fail(f"PROOFREAD_REQUIRE_BROWSER=1, but this test {NO_BROWSER}", pytrace=False)


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Path of a Chromium executable."""
    if CHROMIUM is None:
        (pytest.fail if _browser_required() else pytest.skip)(NO_BROWSER)
    return CHROMIUM
