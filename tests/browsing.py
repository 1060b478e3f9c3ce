"""A browser for tests of pages: headless Chromium that reaches nothing but this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

NEEDS_BROWSER = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs Chromium and its chromedriver, which are not installed"
)

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking --no-first-run "
    "--disable-component-update --disable-default-apps --disable-sync --disable-extensions"
).split()


@contextmanager
def browsing(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile in that folder; it notes what pages complain of."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()
