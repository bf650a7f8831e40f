"""The dashboard and the page of a rule in a real browser: what an operator must be able to trust."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from callqueue import Rule, SlidingWindow
from tests.browser.test_admin_in_a_browser import (
    Wait,
    every,
    find,
    logged_in,
    messages,
    press,
    scene,
    text,
    wait,
)

__all__ = ["logged_in", "scene", "wait"]

pytest.importorskip("selenium", reason="selenium is not installed")
pytestmark = pytest.mark.slow
CALL = {"method": "get", "params": {"url": "https://vendor.example/"}}


def board(site: str) -> str:
    return f"{site}/admin/callqueue/callqueue/dashboard/"


def page_of(site: str, rule: str) -> str:
    return f"{board(site)}rule/?name={rule}"


def row(browser: Any, rule: str) -> list[str]:
    """The cells of a rule's row: its state, what waits, when it is done, and so on."""
    script = """return [...document.querySelectorAll('.cq-rules tbody tr')]
        .filter(one => one.querySelector('th').innerText === arguments[0])
        .flatMap(one => [...one.querySelectorAll('td')].map(cell => cell.innerText.trim()))"""
    found: list[str] = browser.execute_script(script, rule)
    return found


def waiting(browser: Any, rule: str) -> str:
    """How many calls wait, without the sign that they grow more."""
    return row(browser, rule)[1].partition(" ")[0]


def test_the_page_goes_on_and_keeps_the_focus_and_what_is_selected_until_the_session_ends(
    logged_in: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    from callqueue.models import CallQueue

    scene.play()
    browser = logged_in
    browser.get(page_of(site, "stripe-pay"))
    shoot("rule", width=1500)
    browser.get(board(site))
    assert len(every(browser, ".cq-rules tbody tr")) == 5, "the default rule is always there"
    shoot("dashboard", width=1500)
    browser.execute_script("window.mark = 'not reloaded'")
    find(browser, ".cq-rules tbody a").send_keys("")  # focus
    focused = browser.execute_script("return document.activeElement.innerText")
    before = int(waiting(browser, "stripe-pay"))
    CallQueue.objects.send_many([CALL] * 5, rule="stripe-pay")
    wait(lambda: waiting(browser, "stripe-pay") == str(before + 5))
    assert browser.execute_script("return document.activeElement.innerText") == focused
    browser.execute_script(
        "getSelection().selectAllChildren(document.querySelector('.cq-rules tbody tr'))"
    )
    selected = browser.execute_script("return getSelection().toString()")
    shown = text(browser, "[data-live=health] time")
    wait(lambda: text(browser, "[data-live=health] time") != shown)
    assert browser.execute_script("return getSelection().toString()") == selected != ""
    assert browser.execute_script("return window.mark") == "not reloaded"
    browser.delete_all_cookies()
    wait(lambda: find(browser, ".cq-stale").is_displayed())
    assert "your session has ended" in text(browser, ".cq-stale")
    press(browser, "Load the page again")
    wait(lambda: every(browser, "#id_password"))


def test_a_rule_is_paused_and_resumed_and_its_limit_changed(
    logged_in: Any, site: str, settings: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    from callqueue.models import CallQueue, Hold

    account = SlidingWindow("100/h", name="account")
    settings.CALLQUEUE = {"RULES": {"pay": Rule(limits=[account]), "read": Rule(limits=[account])}}
    CallQueue.objects.send_many([CALL] * 450, rule="pay")
    CallQueue.objects.send_many([CALL] * 450, rule="read")
    CallQueue.objects.update(ready=True)
    browser = logged_in
    browser.get(page_of(site, "pay"))
    press(browser, "Pause …")
    wait(lambda: "450 calls wait" in text(browser, ".cq-confirm"))
    find(browser, "input[name=reason]").send_keys("the vendor moves house")
    press(browser, "Yes, pause it")
    wait(lambda: "Paused until" in messages(browser))
    assert "the vendor moves house" in text(browser, "div.cq-hold")
    assert Hold.objects.get().reason == "the vendor moves house"
    press(browser, "Resume", within=".cq-forms")
    wait(lambda: "1 hold ended" in messages(browser))
    assert not every(browser, "div.cq-hold")
    find(browser, "input[name=rate]").send_keys("200/h")
    press(browser, "Change …")
    wait(lambda: every(browser, ".cq-confirm"))
    assert [cell.text for cell in every(browser, ".cq-confirm tbody > tr > *")] == [
        "pay", "450", "0", "0", "8 hours", "4 hours",
        "read", "450", "0", "0", "8 hours", "4 hours",
    ]  # fmt: skip
    shoot("change-limit")
    press(browser, "Yes, change it")
    wait(lambda: "changed from" in messages(browser))
    assert "changed from 100/h" in text(browser, ".cq-proof")
    assert LogEntry.objects.count() == 3
