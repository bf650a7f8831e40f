"""The admin under another theme: every control, pressed as an operator does. Run by test_themes, in
a process whose settings have the theme.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings

from tests.browser.conftest import Wait
from tests.browser.test_admin_in_a_browser import every, find, press, text

CALLS = "/admin/callqueue/callqueue/"
THEME = django_settings.INSTALLED_APPS[0]
RUN = {"unfold": "Run", "jazzmin": "Go"}[THEME]
IS_THERE = """return [...document.querySelectorAll('button, input[type=submit]')].some(one =>
    one.checkVisibility() && ((one.innerText || '').trim() || one.value || '').toLowerCase() === arguments[0])"""
# What a person sees of a control: it is as large as a finger, and told apart from what is behind it.
UNSEEN = """
const solid = colour => !/rgba\\(.*, 0\\)|transparent/.test(colour);
return [...document.querySelectorAll("#content-main .cq-forms button, #content-main .cq-forms input, "
    + "#content-main .cq-buttons .button")].filter(one => one.checkVisibility()).filter(one => {
  const style = getComputedStyle(one), box = one.getBoundingClientRect();
  const is_seen = solid(style.backgroundColor) || parseFloat(style.borderTopWidth) > 0;
  return !is_seen || box.height < 20 || style.color === style.backgroundColor;
}).map(one => one.outerHTML)
"""


@pytest.fixture
def site(transactional_db: None) -> Iterator[str]:
    """Without a content security policy: themes have scripts in their pages."""
    from pytest_django.live_server_helper import LiveServer

    server = LiveServer("127.0.0.1")
    yield server.url
    server.stop()


@pytest.fixture
def browser(chromium: Any, site: str) -> Iterator[Any]:
    """The browser, with nothing kept. What a theme's own pages complain of is not ours."""
    chromium.execute_cdp_cmd("Network.clearBrowserCookies", {})
    yield chromium
    chromium.get("about:blank")
    chromium.get_log("browser")


def test_calls_are_selected_and_requeued(logged_in: Any, site: str, scene: Any, wait: Wait) -> None:
    from callqueue.models import CallQueue

    scene.play()
    failed = CallQueue.objects.failed().count()
    browser = logged_in
    browser.set_window_size(1500, 1000)
    browser.get(f"{site}{CALLS}?status__exact=4")
    browser.execute_script("document.querySelector('#action-toggle').click()")
    chosen = "select[name=action] option[value=requeue_calls]"
    wait(lambda: find(browser, chosen)).click()
    wait(lambda: browser.execute_script(IS_THERE, RUN.lower()))
    press(browser, RUN)
    wait(lambda: every(browser, ".cq-confirm"))
    assert not browser.execute_script(UNSEEN)
    press(browser, "Requeue 50 calls")
    wait(lambda: "50 calls requeued" in text(browser, "body"))
    assert CallQueue.objects.failed().count() == failed - 50


def test_a_rule_is_watched_paused_and_resumed(
    logged_in: Any, site: str, scene: Any, wait: Wait
) -> None:
    from callqueue.models import Hold

    scene.play()
    browser = logged_in
    browser.get(f"{site}{CALLS}dashboard/")
    assert browser.title.startswith("Dashboard")
    press(browser, "chat", within=".cq-rules")
    wait(lambda: every(browser, ".cq-rule-page"))
    assert not browser.execute_script(UNSEEN)
    press(browser, "Pause …")
    press(browser, "Yes, pause it")
    wait(lambda: every(browser, ".cq-hold"))
    colours = browser.execute_script(
        "const style = getComputedStyle(document.querySelector('.cq-hold'));"
        "return [style.backgroundColor, style.color]"
    )
    assert "rgba(0, 0, 0, 0)" not in colours
    assert colours[0] != colours[1]
    press(browser, "Resume", within=".cq-forms")
    wait(lambda: every(browser, ".cq-confirm"))
    press(browser, "Yes, resume it")
    wait(lambda: not Hold.objects.filter(rule="chat").exists())
