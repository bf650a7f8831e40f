"""A real Chromium, and a server with a strict content security policy. Skips where there is no
Chromium.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SCREENSHOTS = "CALLQUEUE_TEST_SCREENSHOTS"  # set: screenshots are written into docs/images
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1280,900",
    "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One browser for all tests of this folder, with a profile of its own."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no Chromium with its chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def site(transactional_db: None, settings: Any) -> Iterator[str]:
    """The address of a server for this test."""
    from django.core.cache import cache
    from pytest_django.live_server_helper import LiveServer

    cache.clear()
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "tests.browser.policy.middleware"]
    server = LiveServer("127.0.0.1")
    yield server.url
    server.stop()


@pytest.fixture
def browser(chromium: Any, site: str) -> Iterator[Any]:
    """The browser, with nothing kept from the test before. What it complains about in its console
    fails the test.
    """
    # delete_all_cookies() would delete those of the page it is on, which is none by now
    chromium.execute_cdp_cmd("Network.clearBrowserCookies", {})
    chromium.get_log("browser")
    yield chromium
    entries = [
        entry["message"]
        for entry in chromium.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
    ]
    complaints = [message for message in entries if "/favicon.ico" not in message]
    chromium.get("about:blank")
    assert complaints == []


@pytest.fixture
def shoot(browser: Any) -> Callable[..., None]:
    """`shoot("name")`: the page in light and in dark, where screenshots are wanted; its upper 1,100
    pixels.
    """
    from selenium.webdriver.support.ui import WebDriverWait

    def is_still(driver: Any) -> bool:
        return bool(driver.execute_script("return !document.getAnimations().length"))

    def take(name: str, width: int = 1280) -> None:
        if not os.environ.get(SCREENSHOTS):
            return
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            height = browser.execute_script(
                "return document.querySelector('#content').getBoundingClientRect().bottom + 20"
            )
            browser.set_window_size(width, max(500, min(1240, int(height) + 140)))
            WebDriverWait(browser, 10).until(is_still)
            (IMAGES / f"{name}-{scheme}.png").write_bytes(browser.get_screenshot_as_png())
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.set_window_size(1280, 900)

    return take
