"""The admin in a real browser: what an operator clicks, under a strict content security policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from callqueue import Rule, SlidingWindow

if TYPE_CHECKING:
    from callqueue.models import CallQueue

pytest.importorskip("selenium", reason="selenium is not installed")
pytestmark = pytest.mark.slow
Wait = Callable[[Callable[[], Any]], Any]


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
        && (one.innerText.trim() || one.value) === arguments[1])"""
    kinds = ", ".join(
        f"{within} {kind}" for kind in ("button", "a", "input[type=submit]", "summary")
    )
    for _ in range(5):
        try:
            found = browser.execute_script(script, kinds, label)
            assert found is not None, f"there is no {label!r} to press"
            browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
            found.click()
            return
        except StaleElementReferenceException:
            continue
    raise AssertionError(f"{label!r} could not be pressed")


def messages(browser: Any) -> str:
    return text(browser, ".messagelist li")


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
    user = User.objects.create_superuser("operator", password="as safe as a test's")
    client = Client()
    client.force_login(user)
    browser.get(f"{site}/static/admin/css/base.css")
    browser.add_cookie(
        {"name": "sessionid", "value": client.cookies["sessionid"].value, "path": "/"}
    )
    return browser


def call_page(site: str, call: CallQueue) -> str:
    return f"{site}/admin/callqueue/callqueue/{call.pk}/change/"


def test_an_operator_logs_in_finds_a_failed_call_and_requeues_it(
    browser: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    User.objects.create_superuser("operator", password="as safe as a test's")
    scene.play()
    call = scene.failed_payment()
    browser.get(f"{site}/admin/callqueue/callqueue/")
    find(browser, "#id_username").send_keys("operator")
    find(browser, "#id_password").send_keys("as safe as a test's")
    press(browser, "Log in")
    assert wait(lambda: every(browser, "#result_list tbody tr"))
    shoot("calls", width=1600)
    press(browser, "failed", within="#changelist-filter")
    wait(lambda: "status__exact=4" in browser.current_url)
    statuses = {cell.text for cell in every(browser, "#result_list .cq-status")}
    assert statuses == {"failed"}
    find(browser, "#searchbar").send_keys("order-4711")
    find(browser, "#changelist-search [type=submit]").click()
    wait(lambda: len(every(browser, "#result_list tbody tr")) == 1)
    find(browser, "#result_list tbody th a").click()
    wait(lambda: every(browser, ".cq-attempt"))
    assert len(every(browser, ".cq-attempt")) == 3
    assert "sk_live" not in browser.page_source
    assert "tok_visa" not in browser.page_source
    shoot("call")
    press(browser, "As a curl command")
    assert "$STRIPE" in text(browser, "#cq-curl")
    press(browser, "Copy")
    wait(lambda: text(browser, "[data-copied]"))
    press(browser, "Requeue")
    wait(lambda: "Requeued" in messages(browser))
    assert text(browser, ".cq-head .cq-status") == "new"
    assert "Why it waits" in text(browser, "#content")
    press(browser, "Cancel")
    wait(lambda: "Cancelled" in messages(browser))
    call.refresh_from_db()
    assert call.status == call.Status.CANCELLED
    assert LogEntry.objects.count() == 2


def test_all_unknown_calls_are_requeued_after_one_question(
    logged_in: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    from callqueue.models import CallQueue

    scene.play()
    count = CallQueue.objects.unknown().count()
    assert count > 0
    browser = logged_in
    browser.get(f"{site}/admin/callqueue/callqueue/?status__exact=7")
    find(browser, "#action-toggle").click()
    find(browser, ".actions select option[value=requeue_calls]").click()
    press(browser, "Go")
    wait(lambda: every(browser, ".cq-confirm"))
    shoot("requeue-unknown")
    press(browser, "Yes, requeue all of them")
    wait(lambda: f"{count} call" in messages(browser))
    assert CallQueue.objects.unknown().count() == 0


def test_an_edited_call_goes_again(
    logged_in: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    browser, call = logged_in, scene.failed_payment()
    browser.get(call_page(site, call))
    press(browser, "Edit and requeue")
    area = wait(lambda: find(browser, "#id_call_data"))
    assert "tok_visa" not in area.get_attribute("value")
    shoot("edit")
    browser.execute_script("arguments[0].value = arguments[0].value.replace('eur', 'chf')", area)
    press(browser, "Save and requeue")
    wait(lambda: "edited and requeued" in messages(browser))
    call.refresh_from_db()
    assert (
        call.call_data["params"]["json"]["currency"],
        call.call_data["params"]["json"]["token"],
    ) == ("chf", "tok_visa")


def test_the_dashboard_follows_what_happens_without_reload(
    logged_in: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    from callqueue.models import CallQueue

    scene.play()
    browser = logged_in
    browser.get(f"{site}/admin/callqueue/callqueue/dashboard/")
    assert len(every(browser, ".cq-rule")) == 5, "the default rule is always there"
    assert "Retry-After 900" in text(browser, "#content")
    traces = every(browser, ".cq-limits svg.cq-trace")
    assert [trace.get_attribute("aria-label").partition(":")[0] for trace in traces[:2]] == [
        "Use over the last 3 minutes"
    ] * 2
    assert all(trace.find_elements("css selector", "polyline.cq-trace-use") for trace in traces)
    shoot("dashboard")
    browser.execute_script("window.mark = 'not reloaded'")
    press(browser, "Keys with most calls waiting", within=".cq-rule:nth-of-type(3)")
    before = waiting_of(browser, "stripe-pay")
    for _ in range(5):
        CallQueue.objects.send(
            {"method": "get", "params": {"url": "https://vendor.example/"}}, rule="stripe-pay"
        )
    wait(lambda: waiting_of(browser, "stripe-pay") == before + 5)
    assert browser.execute_script("return window.mark") == "not reloaded"
    assert every(browser, ".cq-rule details.cq-keys[open]"), "what was opened stays open"


def waiting_of(browser: Any, rule: str) -> int:
    return int(text(browser, f"[data-live='rule-{rule}'] .cq-figures div:first-child dd"))


def test_a_rule_is_paused_and_resumed_and_its_limit_changed(
    logged_in: Any, site: str, settings: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    from callqueue.models import CallQueue, Hold

    settings.CALLQUEUE = {"RULES": {"default": Rule(limits=[SlidingWindow("100/h")])}}
    call = {"method": "get", "params": {"url": "https://vendor.example/"}}
    CallQueue.objects.send_many([call] * 450)
    browser = logged_in
    browser.get(f"{site}/admin/callqueue/callqueue/dashboard/")
    press(browser, "Pause, resume, change a limit")
    find(browser, "input[name=for]").send_keys("15m")
    find(browser, "input[name=reason]").send_keys("the vendor moves house")
    press(browser, "Pause")
    wait(lambda: "Paused until" in messages(browser))
    assert "the vendor moves house" in text(browser, ".cq-hold")
    assert Hold.objects.get().reason == "the vendor moves house"
    press(browser, "Pause, resume, change a limit")
    press(browser, "Resume")
    wait(lambda: "1 hold ended" in messages(browser))
    assert not every(browser, ".cq-hold")
    press(browser, "Pause, resume, change a limit")
    find(browser, "input[name=rate]").send_keys("200/h")
    press(browser, "See what it would do")
    wait(lambda: every(browser, ".cq-confirm"))
    assert [cell.text for cell in every(browser, ".cq-confirm tbody td")] == [
        "100/h",
        "200/h",
        "4 hours",
        "2 hours",
    ]
    shoot("change-limit")
    press(browser, "Change it")
    wait(lambda: "changed to 200/h" in messages(browser))
    assert "changed from 100/h" in text(browser, ".cq-limits")
    assert LogEntry.objects.count() == 3


def test_what_is_typed_into_a_form_is_not_lost_when_the_page_follows(
    logged_in: Any, site: str, scene: Any, wait: Wait
) -> None:
    browser = logged_in
    browser.get(f"{site}/admin/callqueue/callqueue/dashboard/")
    press(browser, "Pause, resume, change a limit")
    find(browser, "input[name=reason]").send_keys("half a sen")
    shown = text(browser, "[data-live=totals] time")
    wait(lambda: text(browser, "[data-live=totals] time") != shown)
    find(browser, "input[name=reason]").send_keys("tence")
    assert find(browser, "input[name=reason]").get_attribute("value") == "half a sentence"


def test_what_if_is_worked_out_and_drawn(
    logged_in: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    browser = logged_in
    browser.get(f"{site}/admin/callqueue/callqueue/dashboard/")
    press(browser, "What if?")
    wait(lambda: every(browser, ".cq-what-if"))
    press(browser, "Work it out")
    wait(lambda: every(browser, ".cq-curve polyline"))
    assert "1000 calls under stripe-pay" in text(browser, "#cq-answer")
    shoot("what-if")


def test_in_german_every_page_fits(logged_in: Any, site: str, scene: Any) -> None:
    scene.play()
    call = scene.failed_payment()
    logged_in.add_cookie({"name": "django_language", "value": "de", "path": "/"})
    pages = {
        f"{site}/admin/callqueue/callqueue/dashboard/": "Abgearbeitet in",
        f"{site}/admin/callqueue/callqueue/?q=": "Ausgewählte Aufrufe erneut einreihen",
        call_page(site, call): "Fehlgeschlagene Versuche",
    }
    for url, words in pages.items():
        logged_in.get(url)
        assert logged_in.execute_script("return document.documentElement.lang") == "de"
        assert words.lower() in text(logged_in, "#container").lower()
        wide, room = logged_in.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= room, f"{url} is {wide} pixels wide, and there are {room}"
