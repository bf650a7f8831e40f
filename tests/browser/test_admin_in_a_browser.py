"""The admin in a real browser: what an operator clicks, under a strict content security policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

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


def test_an_operator_s_afternoon(
    browser: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    """One thing after the other on the same busy afternoon, from the log-in on."""
    User.objects.create_superuser("operator", password="as safe as a test's")
    scene.play()
    find_a_failed_call_and_requeue_it(browser, site, scene, wait, shoot)
    requeue_all_unknown_calls(browser, site, wait, shoot)
    requeue_all_that_match(browser, site, wait)
    edit_a_call_so_that_it_goes_again(browser, site, scene, wait, shoot)
    follow_a_call_to_its_end_and_no_further(browser, site, wait)
    find_that_in_german_every_page_fits(browser, site, scene)


def find_a_failed_call_and_requeue_it(
    browser: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
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
    press(browser, "Requeue")
    wait(lambda: every(browser, ".cq-confirm"))
    press(browser, "Requeue 1 call")
    wait(lambda: "1 call requeued" in messages(browser))
    assert text(browser, ".cq-head .cq-status") == "new"
    assert "Why it waits" in text(browser, "#content")
    press(browser, "Cancel")
    wait(lambda: every(browser, ".cq-confirm"))
    press(browser, "Cancel 1 call")
    wait(lambda: "1 call cancelled" in messages(browser))
    call.refresh_from_db()
    assert call.status == call.Status.CANCELLED
    assert LogEntry.objects.count() == 2


def follow_a_call_to_its_end_and_no_further(browser: Any, site: str, wait: Wait) -> None:
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    from callqueue.models import CallQueue

    call = CallQueue.objects.filter(status=CallQueue.Status.NEW, ready=True).first()
    assert call
    browser.get(call_page(site, call))
    browser.execute_script("window.mark = 'not reloaded'")
    CallQueue.objects.filter(pk=call.pk).update(
        status=CallQueue.Status.UNKNOWN, ready=False, finished_at_dt=call.created_dt
    )
    wait(lambda: text(browser, ".cq-head .cq-status") == "unknown")
    assert not text(browser, "#cq-forecast")
    assert browser.execute_script("return window.mark") == "not reloaded"
    CallQueue.objects.filter(pk=call.pk).update(status=CallQueue.Status.DONE)
    with pytest.raises(TimeoutException):
        WebDriverWait(browser, 4).until(lambda _: text(browser, ".cq-head .cq-status") != "unknown")


def requeue_all_unknown_calls(
    browser: Any, site: str, wait: Wait, shoot: Callable[..., None]
) -> None:
    from callqueue.models import CallQueue

    count = CallQueue.objects.unknown().count()
    assert count > 0
    browser.get(f"{site}/admin/callqueue/callqueue/?status__exact=7")
    find(browser, "#action-toggle").click()
    find(browser, ".actions select option[value=requeue_calls]").click()
    press(browser, "Go")
    wait(lambda: every(browser, ".cq-confirm"))
    shoot("requeue-unknown")
    assert f"{count} call" in text(browser, ".cq-confirm button")
    press(browser, f"Requeue {count} call{'s' if count > 1 else ''}")
    wait(lambda: f"{count} call" in messages(browser))
    assert CallQueue.objects.unknown().count() == 0


def requeue_all_that_match(browser: Any, site: str, wait: Wait) -> None:
    from callqueue.models import CallQueue

    count = CallQueue.objects.failed().count()
    assert count > 60
    browser.get(f"{site}/admin/callqueue/callqueue/?status__exact=4")
    find(browser, "#action-toggle").click()
    press(browser, f"Select all that match ({count})")
    find(browser, ".actions select option[value=requeue_calls]").click()
    press(browser, "Go")
    wait(lambda: every(browser, ".cq-confirm"))
    press(browser, f"Requeue {count} calls")
    wait(lambda: f"{count} calls requeued." in messages(browser))
    assert CallQueue.objects.failed().count() == 0


def edit_a_call_so_that_it_goes_again(
    browser: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    call = scene.failed_payment()
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


def find_that_in_german_every_page_fits(browser: Any, site: str, scene: Any) -> None:
    call = scene.failed_payment()
    browser.add_cookie({"name": "django_language", "value": "de", "path": "/"})
    pages = {
        f"{site}/admin/callqueue/callqueue/dashboard/": "Fertig um",
        f"{site}/admin/callqueue/callqueue/dashboard/rule/?name=stripe-pay": "Was gescheitert ist",
        f"{site}/admin/callqueue/callqueue/?q=": "Ausgewählte Aufrufe erneut einreihen",
        call_page(site, call): "Fehlgeschlagene Versuche",
    }
    for url, words in pages.items():
        browser.get(url)
        assert browser.execute_script("return document.documentElement.lang") == "de"
        assert words.lower() in text(browser, "#container").lower()
        wide, room = browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= room, f"{url} is {wide} pixels wide, and there are {room}"
