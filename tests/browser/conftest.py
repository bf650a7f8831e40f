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

Wait = Callable[[Callable[[], Any]], Any]
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


# as a careful site has it; Django's own style sheets draw arrows from data: URLs
POLICY = "default-src 'self'; img-src 'self' data:"


def with_policy(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware: a strict content security policy on every page."""

    def answer(request: Any) -> Any:
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return answer


@pytest.fixture
def site(transactional_db: None, settings: Any) -> Iterator[str]:
    """The address of a server for this test."""
    from django.core.cache import cache
    from pytest_django.live_server_helper import LiveServer

    cache.clear()
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "tests.browser.conftest.with_policy"]
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
def wait(browser: Any) -> Wait:
    """`wait(condition)`: until it holds, ten seconds at most; its value."""
    from selenium.webdriver.support.ui import WebDriverWait

    return lambda condition: WebDriverWait(browser, 10, poll_frequency=0.1).until(
        lambda _: condition()
    )


@pytest.fixture
def scene(site: str, settings: Any) -> Any:
    """A busy afternoon. Its module needs models, so it is imported here."""
    from tests.browser import scene

    settings.CALLQUEUE = {"RULES": scene.RULES, "SECRETS": {"STRIPE": "sk_live_that_nobody_sees"}}
    return scene


@pytest.fixture
def logged_in(browser: Any, site: str) -> Any:
    """The browser with the session of a superuser."""
    from django.contrib.auth.models import User
    from django.test import Client

    user = User.objects.create_superuser("operator", password="as safe as a test's")
    client = Client()
    client.force_login(user)
    browser.get(f"{site}/static/admin/css/base.css")
    browser.add_cookie(
        {"name": "sessionid", "value": client.cookies["sessionid"].value, "path": "/"}
    )
    return browser


@pytest.fixture
def shoot(browser: Any) -> Callable[..., None]:
    """`shoot("name")`: the upper 1,100 pixels of the page, where screenshots are wanted."""
    from selenium.webdriver.support.ui import WebDriverWait

    def take(name: str, width: int = 1280) -> None:
        if not os.environ.get(SCREENSHOTS):
            return
        bottom = "return document.querySelector('#content').getBoundingClientRect().bottom"
        height = int(browser.execute_script(bottom)) + 160
        browser.set_window_size(width, max(500, min(1240, height)))
        is_still = "return !document.getAnimations().length"
        WebDriverWait(browser, 10).until(lambda driver: driver.execute_script(is_still))
        (IMAGES / f"{name}-light.png").write_bytes(browser.get_screenshot_as_png())
        browser.set_window_size(1280, 900)

    return take
