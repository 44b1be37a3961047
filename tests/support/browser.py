"""A headless Chromium for tests of HTML pages, driven through selenium, with what it asked of the network and what
it complained about.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REQUIRE = "LLM_FP8_REQUIRE_BROWSER"
"""Environment variable: 1 makes a missing browser a failure."""

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def find_browser() -> tuple[str, str]:
    """Paths of Chromium and its driver; skips the test where one is missing, or fails it if
    LLM_FP8_REQUIRE_BROWSER=1.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = "needs Chromium and chromedriver (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{reason}, and {REQUIRE}=1")
        pytest.skip(reason)
    return browser, driver


@contextmanager
def open_browser(profile: Path, dark: bool = False) -> Iterator[Any]:
    """A selenium driver of a Chromium with a profile of its own in `profile`, which must not exist."""
    browser, chromedriver = find_browser()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    try:
        set_dark(driver, dark)
        yield driver
    finally:
        driver.quit()


def set_dark(driver: Any, dark: bool) -> None:
    """What the page sees as the user's preferred colour scheme."""
    feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def set_width(driver: Any, width: int, height: int = 900) -> None:
    """The size of the page in CSS pixels; windows cannot be made as narrow as a phone."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def requests_of(driver: Any) -> list[str]:
    """Addresses that were asked for since the last call, data and blob ones left out."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("data:", "blob:"))]


def complaints_of(driver: Any) -> list[str]:
    """Errors and warnings on the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def full_screenshot(driver: Any, path: Path) -> bytes:
    """The whole page, not only what is in the window, as a PNG file; returns its bytes."""
    import base64

    shot = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"captureBeyondViewport": True, "fromSurface": True, **_clip(driver)}
    )
    data = base64.b64decode(shot["data"])
    path.write_bytes(data)
    return data


def _clip(driver: Any) -> dict[str, Any]:
    size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
