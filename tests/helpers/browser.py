"""The browser that the tests of pages drive: Debian's chromium."""

import os
import shutil

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def require_chromium() -> None:
    """Skips the calling module where there is no chromium, and fails it in CI, which has to have one."""
    if CHROMIUM is None:
        missing = "there is no chromium here (apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing, allow_module_level=True)
