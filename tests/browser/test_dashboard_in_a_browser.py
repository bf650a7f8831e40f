"""The dashboard and the page of a rule in a real browser: what an operator must be able to trust."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

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


def test_a_dead_dispenser_is_said_first_and_nothing_is_promised(
    logged_in: Any, site: str, scene: Any, wait: Wait
) -> None:
    from callqueue.models import DispenserState

    scene.play()
    browser = logged_in
    browser.get(board(site))
    assert "2 dispensers, seen" in text(browser, ".cq-health")
    assert row(browser, "chat")[2] == "grows"
    DispenserState.objects.update(seen_at=timezone.now() - timedelta(minutes=11))
    wait(lambda: "No dispenser runs: the last one was seen 11 minutes ago" in text(
        browser, ".cq-hold.cq-bad"
    ))  # fmt: skip
    assert row(browser, "chat")[0] == "no dispenser"
    assert row(browser, "chat")[2] == "–"
    browser.get(page_of(site, "chat"))
    assert "No dispenser runs" in text(browser, ".cq-bad")


def test_every_web_process_shows_the_same_from_its_first_second(
    logged_in: Any, site: str, scene: Any
) -> None:
    """Nothing that is shown is kept in a process or a cache."""
    from django.core.cache import cache

    scene.play()
    shown = []
    for _ in range(3):
        cache.clear()
        logged_in.get(board(site))
        rows = [row(logged_in, rule) for rule in scene.RULES]
        # All but what a second that goes on brings: ages, what hangs on them, and rates.
        shown.append([[cells[1].partition(" ")[0], *cells[6:]] for cells in rows])
        assert "about" not in text(logged_in, "#content-main")
    assert shown[0] == shown[1] == shown[2]
    assert int(shown[0][0][-1]) > 0, "calls failed"


def test_what_is_old_is_found_though_much_is_newer(
    logged_in: Any, site: str, scene: Any, settings: Any
) -> None:
    """What is stuck is old. No number, and no list, looks at the newest only."""
    from callqueue.models import CallQueue

    scene.play()
    failed = CallQueue.objects.failed().filter(rule="stripe-pay").count()
    CallQueue.objects.bulk_create(
        [CallQueue(rule="chat", status=3, call_data={}) for _ in range(3000)]
    )
    logged_in.get(page_of(site, "stripe-pay"))
    script = """return [...document.querySelectorAll('section[aria-labelledby=errors] tbody tr')]
        .filter(one => one.cells[0].innerText === 'failed')
        .reduce((sum, one) => sum + Number(one.cells[2].innerText), 0)"""
    assert logged_in.execute_script(script) == failed > 0


def test_the_key_that_hogs_is_the_first(logged_in: Any, site: str, settings: Any) -> None:
    """Also where it is not among those that go next."""
    from callqueue.models import CallAttempt, CallQueue, DispenserState

    limits = [SlidingWindow("1/s", per="key")]
    settings.CALLQUEUE = {"RULES": {"chat": Rule(limits=limits)}}
    due = timezone.now() - timedelta(hours=1)
    DispenserState.objects.create(
        name="one:1", started_at=due, seen_at=timezone.now(), digest="settings"
    )
    CallQueue.objects.bulk_create(
        [
            CallQueue(rule="chat", key=f"k{i}", ready=True, due_at_dt=due, call_data={})
            for i in range(1500)
        ]
    )
    CallQueue.objects.bulk_create(
        [CallQueue(rule="chat", key="hog", ready=True, call_data={}) for _ in range(7200)]
    )
    now = timezone.now()
    CallAttempt.objects.create(
        call_id=1, number=1, rule="chat", key="k1", released_at=now, started_at=now
    )
    logged_in.get(page_of(site, "chat"))
    first = logged_in.execute_script(
        "return [...document.querySelector('[aria-labelledby=keys] tbody tr').cells]"
        ".map(cell => cell.innerText)"
    )
    assert first[:3] == ["hog", "7,200", "83 %"]
    assert "in 2 hours" in text(logged_in, ".cq-ends"), "not 25 minutes"


def test_full_speed_is_not_drawn_as_a_breach(
    logged_in: Any, site: str, settings: Any, wait: Wait
) -> None:
    """Eight a second of eight, which are charged and not answered yet."""
    from callqueue.models import CallAttempt
    from tests.browser import scene

    settings.CALLQUEUE = {"RULES": {"pay": Rule(limits=[SlidingWindow("8/s")])}}
    now = timezone.now().replace(microsecond=0)
    sent = [
        now - timedelta(seconds=s, milliseconds=125 * i) for s in range(3, 90) for i in range(8)
    ]
    CallAttempt.objects.bulk_create(
        [
            CallAttempt(
                call_id=1, number=1, rule="pay", released_at=at, started_at=at, sent_at=at,
                finished_at=at, outcome="succeeded",
            )
            for at in sent
        ]
        + [CallAttempt(call_id=1, number=1, rule="pay", released_at=now) for _ in range(8)]
    )  # fmt: skip
    scene.count(now)
    logged_in.get(board(site))
    assert "8 of 8" in row(logged_in, "pay")[5]
    assert not every(logged_in, "svg .x")
    logged_in.get(page_of(site, "pay"))
    assert "8 of 8" in text(logged_in, ".cq-proof")
    assert not every(logged_in, "svg .x, .cq-worse")


def test_the_focus_stays_and_the_page_goes_on(
    logged_in: Any, site: str, scene: Any, wait: Wait, shoot: Callable[..., None]
) -> None:
    from callqueue.models import CallQueue

    scene.play()
    browser = logged_in
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
    assert browser.execute_script("return window.mark") == "not reloaded"
    browser.get(page_of(site, "stripe-pay"))
    shoot("rule", width=1500)


def test_what_is_selected_is_not_taken_away(
    logged_in: Any, site: str, scene: Any, wait: Wait
) -> None:
    browser = logged_in
    browser.get(board(site))
    browser.execute_script(
        "getSelection().selectAllChildren(document.querySelector('.cq-rules tbody tr'))"
    )
    selected = browser.execute_script("return getSelection().toString()")
    shown = text(browser, "[data-live=health] time")
    wait(lambda: text(browser, "[data-live=health] time") != shown)
    assert browser.execute_script("return getSelection().toString()") == selected != ""


def test_a_session_that_ended_says_so_and_leads_back(
    logged_in: Any, site: str, scene: Any, wait: Wait
) -> None:
    logged_in.get(board(site))
    logged_in.delete_all_cookies()
    wait(lambda: find(logged_in, ".cq-stale").is_displayed())
    assert "your session has ended" in text(logged_in, ".cq-stale")
    press(logged_in, "Load the page again")
    wait(lambda: every(logged_in, "#id_password"))


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


def test_what_failed_alike_is_requeued_at_once(
    logged_in: Any, site: str, scene: Any, wait: Wait
) -> None:
    from callqueue.models import CallQueue

    scene.play()
    browser = logged_in
    failed = CallQueue.objects.failed().filter(
        rule="chat", error_message="HTTP 500 from chat.example"
    )
    count = failed.count()
    browser.get(page_of(site, "chat"))
    first = "section[aria-labelledby=errors] tbody tr:first-child"
    assert "HTTP 500 from chat.example" in text(browser, first)
    press(browser, "Requeue all", within=first)
    wait(lambda: every(browser, ".cq-confirm"))
    press(browser, f"Requeue {count} calls")
    wait(lambda: f"{count} calls requeued" in messages(browser))
    assert not failed.exists()


def test_another_rate_is_told_beside_the_backlog(
    logged_in: Any, site: str, scene: Any, wait: Wait
) -> None:
    scene.play()
    browser = logged_in
    browser.get(page_of(site, "chat"))
    assert "What is due: done by" in text(browser, ".cq-ends")
    find(browser, ".cq-forms select[name=limit] option:nth-child(2)").click()
    find(browser, ".cq-forms input[name=rate]").send_keys("300/m")
    find(browser, ".cq-forms input[name=more]").send_keys("50")
    press(browser, "Change …")
    wait(lambda: "300/m then. With 50 calls more." in text(browser, ".cq-confirm"))
