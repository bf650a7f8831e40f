"""The admin in a real browser: what an operator clicks, under a strict content security policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.utils import timezone

from callqueue import Rule, SlidingWindow
from tests.browser.conftest import Wait

pytest.importorskip("selenium", reason="selenium is not installed")
pytestmark = pytest.mark.slow
CALL = {"method": "get", "params": {"url": "https://vendor.example/"}}


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def every(browser: Any, selector: str) -> list[Any]:
    found: list[Any] = browser.find_elements("css selector", selector)
    return found


def text(browser: Any, selector: str) -> str:
    """What all elements of this kind say, read at one instant: the page may replace them at any
    time.
    """
    script = "return [...document.querySelectorAll(arguments[0])].map(one => one.innerText.trim()).join(' ')"
    return str(browser.execute_script(script, selector))


def press(browser: Any, label: str, within: str = "body") -> None:
    """Press the button or the link of this text; once more where the page replaced it in that
    moment.
    """
    from selenium.common.exceptions import StaleElementReferenceException

    script = """return [...document.querySelectorAll(arguments[0])].find(one => one.checkVisibility()
        && ((one.innerText || '').trim() || one.value || '').toLowerCase() === arguments[1].toLowerCase())"""
    kinds = ", ".join(
        f"{within} {kind}" for kind in ("button", "a", "input[type=submit]", "summary")
    )
    for _ in range(5):
        try:
            found = browser.execute_script(script, kinds, label)
            assert found is not None, f"there is no {label!r} to press"
            browser.execute_script(
                "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found
            )
            found.click()
            return
        except StaleElementReferenceException:
            continue
    raise AssertionError(f"{label!r} could not be pressed")


def messages(browser: Any) -> str:
    return text(browser, ".messagelist li")


CALLS = "/admin/callqueue/callqueue/"


def test_an_operator_s_afternoon(
    browser: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    """One thing after the other on the same busy afternoon, from the log-in on."""
    User.objects.create_superuser("operator", password="as safe as a test's")
    scene.play()
    find_a_failed_call_and_requeue_it(browser, site, scene, wait, shoot)
    requeue_all_that_match(browser, site, wait, shoot)
    edit_a_call_so_that_it_goes_again(browser, site, scene, wait)
    follow_a_call_to_its_end_and_no_further(browser, site, wait)
    find_that_in_german_every_page_fits(browser, site, scene)


def find_a_failed_call_and_requeue_it(
    browser: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    scene.failed_payment()
    browser.get(f"{site}{CALLS}")
    find(browser, "#id_username").send_keys("operator")
    find(browser, "#id_password").send_keys("as safe as a test's")
    press(browser, "Log in")
    assert wait(lambda: every(browser, "#result_list tbody tr"))
    press(browser, "failed", within="#changelist-filter")
    wait(lambda: "status__exact=4" in browser.current_url)
    find(browser, "#searchbar").send_keys("order-4711")
    find(browser, "#changelist-search [type=submit]").click()
    wait(lambda: len(every(browser, "#result_list tbody tr")) == 1)
    find(browser, "#result_list tbody th a").click()
    wait(lambda: len(every(browser, ".cq-attempt")) == 3)
    assert "sk_live" not in browser.page_source
    assert "tok_visa" not in browser.page_source
    shoot("call")
    press(browser, "As a curl command")
    assert "$STRIPE" in text(browser, "#cq-curl")
    for word, done, status in (
        ("Requeue", "requeued", "new"),
        ("Cancel", "cancelled", "cancelled"),
    ):
        press(browser, word)
        wait(lambda: every(browser, ".cq-confirm"))
        press(browser, f"{word} 1 call")
        wait(lambda done=done: f"1 call {done}" in messages(browser))
        assert text(browser, ".cq-head .cq-status") == status


def requeue_all_that_match(browser: Any, site: str, wait: Wait, shoot: Callable[..., None]) -> None:
    """Of unknown ones those that are shown, and of failed ones more than that."""
    from callqueue.models import CallQueue

    for status in (CallQueue.Status.UNKNOWN, CallQueue.Status.FAILED):
        matching = CallQueue.objects.filter(status=status)
        count = matching.count()
        browser.get(f"{site}{CALLS}?status__exact={status}")
        find(browser, "#action-toggle").click()
        if status == CallQueue.Status.FAILED:
            assert count > 60
            press(browser, f"Select all that match ({count})")
        find(browser, ".actions select option[value=requeue_calls]").click()
        press(browser, "Go")
        wait(lambda: every(browser, ".cq-confirm"))
        if status == CallQueue.Status.UNKNOWN:
            shoot("requeue-unknown")
        press(browser, f"Requeue {count} call{'s' if count > 1 else ''}")
        wait(lambda count=count: f"{count} call" in messages(browser))
        assert not matching.exists()


def edit_a_call_so_that_it_goes_again(browser: Any, site: str, scene: Any, wait: Wait) -> None:
    call = scene.failed_payment()
    browser.get(f"{site}{CALLS}{call.pk}/change/")
    press(browser, "Edit and requeue")
    area = wait(lambda: find(browser, "#id_call_data"))
    assert "tok_visa" not in area.get_attribute("value")
    browser.execute_script("arguments[0].value = arguments[0].value.replace('eur', 'chf')", area)
    press(browser, "Save and requeue")
    wait(lambda: "edited and requeued" in messages(browser))
    call.refresh_from_db()
    sent = call.call_data["params"]["json"]
    assert (sent["currency"], sent["token"]) == ("chf", "tok_visa")


def follow_a_call_to_its_end_and_no_further(browser: Any, site: str, wait: Wait) -> None:
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    from callqueue.models import CallQueue

    calls = CallQueue.objects.filter(status=CallQueue.Status.NEW, ready=True)
    of_one = CallQueue.objects.filter(pk=calls[0].pk)
    browser.get(f"{site}{CALLS}{of_one.get().pk}/change/")
    browser.execute_script("window.mark = 'not reloaded'")
    of_one.update(status=CallQueue.Status.UNKNOWN, ready=False, finished_at_dt=timezone.now())
    wait(lambda: text(browser, ".cq-head .cq-status") == "unknown")
    assert not text(browser, "#cq-forecast")
    assert browser.execute_script("return window.mark") == "not reloaded"
    of_one.update(status=CallQueue.Status.DONE)
    with pytest.raises(TimeoutException):
        WebDriverWait(browser, 4).until(lambda _: text(browser, ".cq-head .cq-status") != "unknown")


def find_that_in_german_every_page_fits(browser: Any, site: str, scene: Any) -> None:
    """That its words are German is read in tests/db/admin/test_german.py."""
    browser.add_cookie({"name": "django_language", "value": "de", "path": "/"})
    board = f"{CALLS}dashboard/"
    page = f"{CALLS}{scene.failed_payment().pk}/change/"
    for path in (board, f"{board}rule/?name=stripe-pay", f"{CALLS}?q=", page):
        browser.get(f"{site}{path}")
        assert browser.execute_script("return document.documentElement.lang") == "de"
        wide, room = browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= room, f"{path} is {wide} pixels wide, and there are {room}"


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
    browser.get(f"{site}{CALLS}dashboard/rule/?name=stripe-pay")
    shoot("rule", width=1500)
    browser.get(f"{site}{CALLS}dashboard/")
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
    logged_in: Any, site: str, settings: Any, wait: Wait
) -> None:
    from callqueue.models import CallQueue, Hold

    account = SlidingWindow("100/h", name="account")
    settings.CALLQUEUE = {"RULES": {"pay": Rule(limits=[account]), "read": Rule(limits=[account])}}
    CallQueue.objects.send_many([CALL] * 450, rule="pay")
    CallQueue.objects.send_many([CALL] * 450, rule="read")
    CallQueue.objects.update(ready=True)
    browser = logged_in
    browser.get(f"{site}{CALLS}dashboard/rule/?name=pay")
    press(browser, "Pause …")
    wait(lambda: "450 calls wait" in text(browser, ".cq-confirm"))
    find(browser, "input[name=reason]").send_keys("the vendor moves house")
    press(browser, "Yes, pause it")
    wait(lambda: "Paused until" in messages(browser))
    assert "the vendor moves house" in text(browser, "div.cq-hold")
    assert Hold.objects.get().reason == "the vendor moves house"
    press(browser, "Resume", within=".cq-forms")
    wait(lambda: "1 hold would end" in text(browser, ".cq-confirm"))
    press(browser, "Yes, resume it")
    wait(lambda: "1 hold ended" in messages(browser))
    assert not every(browser, "div.cq-hold")
    find(browser, "input[name=rate]").send_keys("200/h")
    press(browser, "Change …")
    wait(lambda: every(browser, ".cq-confirm"))
    assert [cell.text for cell in every(browser, ".cq-confirm tbody > tr > *")] == [
        "pay", "450", "0", "0", "8 hours", "4 hours",
        "read", "450", "0", "0", "8 hours", "4 hours",
    ]  # fmt: skip
    press(browser, "Yes, change it")
    wait(lambda: "changed from" in messages(browser))
    assert "changed from 100/h" in text(browser, ".cq-proof")
    assert LogEntry.objects.count() == 3
