"""Where every rule stands: what is counted, what is estimated, and for how long it will last."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from callqueue import Concurrency, Rule, SlidingWindow, TokenBucket
from callqueue.models import CallAttempt, CallQueue
from callqueue.operations import control, status_report, waiting_counts
from callqueue.operations.status_report import RuleOverview, look
from tests.support.behaviour import Vendor, release, run, send

Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    cache.clear()


def of(name: str, **options: object) -> RuleOverview:
    return next(rule for rule in look("default", **options) if rule.name == name)  # type: ignore[arg-type]


def test_a_rule_without_calls_has_nothing_to_tell(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("10/h")]))
    assert of("pay").as_json() == {
        "waiting": 0,
        "in_flight": 0,
        "oldest_due_s": None,
        "drain_s": 0.0,
        "rate_per_s": 0.0,
        "hold": None,
        "holds": [],
        "not_queued": {"in_flight": 0, "labels": {}, "waiting": 0},
        "limits": [
            {
                "name": "SlidingWindow 10/h",
                "per": "rule",
                "rate": "10/h",
                "used": 0,
                "free": 10,
                "note": "",
            }
        ],
    }


def test_waiting_are_the_ready_the_scheduled_and_those_to_be_retried(rules: Rules) -> None:
    rules(pay=Rule(), other=Rule())
    send("pay"), send("other")
    send("pay", not_before=timezone.now() + timedelta(hours=1))
    failed = send("pay")
    CallQueue.objects.filter(pk=failed.pk).update(status=CallQueue.Status.ERROR, ready=False)
    done = send("pay")
    CallQueue.objects.filter(pk=done.pk).update(status=CallQueue.Status.DONE, ready=False)
    assert (of("pay").waiting, of("pay", exact=True).waiting, of("other").waiting) == (3, 3, 1)


def test_the_oldest_due_is_found_in_whatever_priority(rules: Rules) -> None:
    rules(pay=Rule())
    for priority, seconds in ((5, 10), (0, 300), (-5, 20)):
        call = send("pay", priority=priority)
        CallQueue.objects.filter(pk=call.pk).update(
            due_at_dt=timezone.now() - timedelta(seconds=seconds)
        )
    send("pay", not_before=timezone.now() + timedelta(hours=1))
    assert of("pay").oldest_due_s == pytest.approx(300, abs=10)


def test_nothing_is_due_where_all_is_scheduled_for_later(rules: Rules) -> None:
    rules(pay=Rule())
    send("pay", not_before=timezone.now() + timedelta(hours=1))
    assert of("pay").oldest_due_s is None


@pytest.mark.parametrize(
    "limit", [SlidingWindow("10/h", per="key"), TokenBucket("10/h", burst=10, per="key")]
)
def test_an_exact_look_shows_the_fullest_key_of_a_long_window(
    rules: Rules, remote: Vendor, limit: SlidingWindow
) -> None:
    rules(pay=Rule(limits=[limit]))
    for key in ("a", "b", "b", "b", "c"):
        send("pay", key=key)
    assert run() == 5
    (shown,) = of("pay", exact=True).limits
    assert (shown.used, shown.free, shown.value) == (3, 7, "b")
    assert run() == 0
    (shown,) = of("pay", exact=True).limits
    assert (shown.used, shown.free, shown.value) == (3, 7, "b")


def test_limits_show_what_the_ledger_charges(rules: Rules, remote: Vendor) -> None:
    account = SlidingWindow("10/h", name="account")
    rules(pay=Rule(limits=[account, Concurrency(4)]), read=Rule(limits=[account]))
    send("pay"), send("pay"), send("read")
    assert run() == 3
    send("pay")
    release()
    assert [(limit.used, limit.free) for limit in of("pay").limits] == [(4, 6), (1, 3)]
    assert [(limit.used, limit.free) for limit in of("read").limits] == [(4, 6)]
    assert (of("pay").in_flight, of("read").in_flight) == (1, 0)
    assert of("pay").rate_per_s == pytest.approx(2 / 60)


def test_a_rule_fails_though_all_its_calls_are_tried_again(rules: Rules, remote: Vendor) -> None:
    rules(pay=Rule(), read=Rule())
    remote.answers["/ill"] = 503
    send("pay"), send("pay", "/ill")
    assert run() == 2
    assert (of("pay").failing, of("read").failing) == (0.5, None)
    assert CallQueue.objects.failed().count() == 0


def test_a_limit_per_key_shows_its_fullest_key_and_the_keys_that_wait(rules: Rules) -> None:
    rules(chat=Rule(limits=[SlidingWindow("2/h", per="key"), SlidingWindow("3/h", per="channel")]))
    for workspace, count in (("T1", 4), ("T2", 1)):
        for _ in range(count):
            send("chat", key={"key": workspace, "channel": "C1"})
    release()
    seen = of("chat", keys=5)
    assert [(limit.per, limit.used, limit.free) for limit in seen.limits] == [
        ("key", 2, 0),
        ("channel", 3, 0),
    ]
    assert [(key.waiting, key.in_flight) for key in seen.keys] == [(2, 2)]


def test_calls_of_a_key_are_counted_up_to_a_number(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And more of them than those calls of the rule that go next."""
    monkeypatch.setattr(waiting_counts, "OF_KEY", 4)
    rules(chat=Rule(limits=[SlidingWindow("2/h", per="key")]))
    for key, priority, count in (("T1", 0, 3), ("T2", 0, 4), ("T3", 0, 3), ("T3", 5, 2)):
        for _ in range(count):
            send("chat", key=key, priority=priority)
    monkeypatch.setattr(waiting_counts, "NEXT", 20)
    found = {key.key: (key.waiting, key.is_least) for key in of("chat", keys=5).keys}
    assert found == {"T1": (3, False), "T2": (4, False), "T3": (4, True)}
    monkeypatch.setattr(waiting_counts, "NEXT", 3)
    assert {key.key: key.waiting for key in of("chat", keys=5).keys} == {"T3": 4, "T1": 3}


def test_the_drain_is_the_slowest_limits(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h", jitter=0), SlidingWindow("1000/d", jitter=0)]))
    for _ in range(250):
        send("pay")
    assert of("pay").drain_s == pytest.approx(7200, abs=1)
    assert status_report.drain_with("default", "pay", {"pay#0": "200/h"}) == pytest.approx(
        3600, abs=1
    )


def test_rules_that_share_a_budget_wait_for_each_other(rules: Rules) -> None:
    account = SlidingWindow("10/m", name="account", jitter=0)
    rules(
        high=Rule(limits=[account], priority=5),
        low=Rule(limits=[account]),
        even=Rule(limits=[account]),
    )
    for name, count in (("high", 10), ("low", 10), ("even", 100)):
        for _ in range(count):
            send(name)
    drains = {rule.name: rule.drain_s for rule in look("default")}
    assert drains["high"] == pytest.approx(0, abs=1)
    assert drains["low"] == pytest.approx(120, abs=1), (
        "after the high ones, and taking turns with its equal"
    )
    assert drains["even"] == pytest.approx(660, abs=1)


def test_a_hold_counts_into_the_drain_and_one_without_end_leaves_it_open(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/s")]))
    send("pay")
    control.pause("default", "pay", seconds=600, reason="lunch")
    seen = of("pay")
    assert seen.drain_s == pytest.approx(600, abs=5)
    assert seen.as_json()["hold"]["reason"] == "lunch"
    control.pause("default", "pay")
    assert (of("pay").drain_s, of("pay").as_json()["hold"]["until"]) == (None, None)


def test_without_limits_the_drain_is_told_by_the_pace_of_the_last_minute(
    rules: Rules, remote: Vendor
) -> None:
    rules(pay=Rule())
    send("pay")
    assert of("pay").drain_s is None
    assert run() == 1
    send("pay")
    assert of("pay").drain_s == pytest.approx(60, abs=1)


def test_beyond_the_cap_it_is_an_estimate_or_a_full_count(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_counts, "CAP", 3)
    monkeypatch.setattr(waiting_counts, "SMALLEST_CAP", 3)
    rules(pay=Rule(), few=Rule())
    for _ in range(12):
        send("pay")
    send("few")
    seen = of("pay")
    assert seen.waiting == 12, "a table this small is read whole"
    assert seen.is_estimate == (connection.vendor == "postgresql")
    assert of("few").waiting == 1


def test_a_changed_limit_is_shown_beside_what_the_settings_say(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h")]))
    control.change_limit("default", "pay", "pay#0", "7/m")
    (limit,) = of("pay").limits
    assert (limit.rate, limit.configured, limit.capacity) == ("7/m", "100/h", 7)


def test_the_statements_do_not_grow_with_the_calls(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h"), SlidingWindow("1/s", per="key")]))
    counts = []
    for _ in range(2):
        for number in range(20):
            send("pay", key=f"k{number}")
        with CaptureQueriesContext(connection) as captured:
            look("default", keys=5)
        counts.append(len(captured))
    assert counts[0] == counts[1]


def test_looking_changes_nothing(rules: Rules) -> None:
    rules(pay=Rule(limits=[SlidingWindow("100/h")]))
    send("pay")
    before = list(CallQueue.objects.values()), list(CallAttempt.objects.values())
    look("default", keys=5), look("default", exact=True), status_report.overview("default")
    assert (list(CallQueue.objects.values()), list(CallAttempt.objects.values())) == before


def test_a_window_that_there_is_no_time_to_count_is_estimated(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(big=Rule(limits=[SlidingWindow("1000000/d")]))
    now = timezone.now() - timedelta(hours=3)
    CallAttempt.objects.bulk_create(
        CallAttempt(
            call_id=1,
            number=1,
            rule="big",
            released_at=now,
            sent_at=now,
            finished_at=now,
            outcome="succeeded",
        )
        for _ in range(30)
    )
    monkeypatch.setattr(status_report, "COUNTING", 0.0)
    assert of("big").limits[0].is_estimate
    monkeypatch.setattr(status_report, "COUNTING", 60.0)
    counted = of("big").limits[0]
    assert (counted.is_estimate, counted.used, counted.free) == (False, 30, 999_970)
