"""Releases: which calls go, in which order, under which limits. Nothing is made here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta

from django.utils import timezone

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket, database, states
from callqueue.execution.claim import begin
from callqueue.ledger import holds
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.operations import control
from tests.support.behaviour import release, send

Rules = Callable[..., None]


def test_no_more_than_a_sliding_window_allows(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("3/m")]))
    for _ in range(5):
        send("r")
    assert len(release()) == 3
    assert len(release()) == 0


def test_the_bucket_gives_its_burst_and_no_more(rules: Rules) -> None:
    rules(r=Rule(limits=[TokenBucket("1/m", burst=4)]))
    for _ in range(6):
        send("r")
    assert len(release()) == 4


def test_a_calendar_day_counts_what_began_in_it(rules: Rules) -> None:
    rules(r=Rule(limits=[FixedWindow("2/d", timezone="Asia/Kathmandu")]))
    for _ in range(3):
        send("r")
    assert len(release()) == 2


def test_concurrency_counts_what_is_unanswered(rules: Rules) -> None:
    rules(r=Rule(limits=[Concurrency(2)]))
    for _ in range(4):
        send("r")
    assert len(release()) == 2
    answer(CallAttempt.objects.all()[:1])
    assert len(release()) == 1


def test_all_limits_must_admit_a_call(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m"), Concurrency(3), SlidingWindow("2/h")]))
    for _ in range(6):
        send("r")
    assert len(release()) == 2


def test_higher_priority_first_then_the_order_of_being_due(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("3/m")]))
    low, high, middle = send("r"), send("r", priority=9), send("r", priority=5)
    late = send("r", priority=9)
    assert release() == [high, late, middle]
    assert low.status == states.NEW


def test_a_call_that_is_not_due_waits_and_keeps_nobody_back(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    later = send("r", priority=9, not_before=timezone.now() + timedelta(hours=1))
    now = send("r")
    assert release() == [now]
    CallQueue.objects.filter(pk=later.pk).update(due_at_dt=timezone.now() - timedelta(seconds=1))
    assert release() == [later]


def test_a_row_that_other_code_made_goes_too(rules: Rules) -> None:
    rules(r=Rule())
    made = CallQueue.objects.create(
        rule="r", call_data={"method": "get", "params": {"url": "http://vendor.example/"}}
    )
    assert release() == [made]


def test_a_row_that_other_code_cancelled_or_deleted_does_not_go(rules: Rules) -> None:
    rules(r=Rule())
    kept, cancelled, deleted = send("r"), send("r"), send("r")
    CallQueue.objects.filter(pk=cancelled.pk).update(status=states.CANCELLED)
    deleted.delete()
    assert release() == [kept]


def test_deleting_a_call_makes_no_room(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    send("r")
    (released,) = release()
    released.delete()
    send("r")
    assert release() == []


def test_each_key_has_its_own_budget_and_keys_take_turns(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/m", per="key"), SlidingWindow("5/m")]))
    for _ in range(10):
        send("r", key="flood")
    for key in "abc":
        send("r", key=key)
    assert Counter(call.key for call in release()) == {"flood": 2, "a": 1, "b": 1, "c": 1}


def test_a_thousand_calls_of_one_key_do_not_keep_the_others_back(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m", per="key")]))
    url = {"method": "get", "params": {"url": "http://vendor.example/"}}
    CallQueue.objects.send_many([url] * 1000, rule="r", key="flood")
    CallQueue.objects.send_many([{"call_data": url, "key": f"k{i}"} for i in range(400)], rule="r")
    assert len(release()) == 401
    assert release() == []


def test_named_keys_are_limited_each_by_its_own_limit(rules: Rules) -> None:
    rules(
        r=Rule(limits=[SlidingWindow("1/m", per="channel"), SlidingWindow("3/m", per="workspace")])
    )
    for channel in ("C1", "C1", "C2", "C3", "C4"):
        send("r", key={"workspace": "T1", "channel": channel})
    send("r", key={"workspace": "T2", "channel": "C9"})
    assert len(release()) == 4
    assert CallAttempt.objects.filter(key__contains="T1").count() == 3


def test_each_queue_has_its_own_budget_and_the_roomier_is_taken(rules: Rules) -> None:
    rules(r=Rule(queues=["e1", "e2"], limits=[TokenBucket("1/m", burst=3, per="queue")]))
    for _ in range(10):
        send("r")
    assert Counter(call.queue for call in release()) == {"e1": 3, "e2": 3}


def test_rules_that_share_a_budget_take_turns(rules: Rules) -> None:
    shared = SlidingWindow("6/m", name="account")
    rules(a=Rule(limits=[shared]), b=Rule(limits=[shared]))
    for rule in "aaaaaabbbbbb":
        send(rule)
    assert Counter(call.rule for call in release()) == {"a": 3, "b": 3}


def test_of_rules_that_share_a_budget_the_higher_priority_goes_first(rules: Rules) -> None:
    shared = SlidingWindow("4/m", name="account")
    rules(a=Rule(limits=[shared]), b=Rule(limits=[shared], priority=5))
    for rule in "aaaabbb":
        send(rule)
    assert Counter(call.rule for call in release()) == {"b": 3, "a": 1}


def test_weights_count_in_their_units(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/m"), SlidingWindow("1000/m", unit="tokens")]))
    for tokens in (600, 300, 300):
        send("r", cost={"tokens": tokens})
    assert len(release()) == 2


def test_a_heavy_call_is_not_starved_by_light_ones(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    send("r", cost=3)
    heavy = send("r", cost=4)
    send("r", cost=1)
    assert [call.cost for call in release()] == [3]
    CallAttempt.objects.update(
        started_at=long_ago(), sent_at=long_ago(), finished_at=long_ago(), outcome="succeeded"
    )
    assert release()[0] == heavy


def test_a_call_that_no_limit_could_ever_admit_fails_and_keeps_nobody_back(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("50/m")]))
    heavy, broken, sound = send("r", cost=40), send("r"), send("r")
    CallQueue.objects.filter(pk=broken.pk).update(cost="many")
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    assert release() == [sound]
    heavy.refresh_from_db()
    broken.refresh_from_db()
    assert heavy.status == broken.status == states.FAILED
    assert "40" in heavy.error_message
    assert "cost" in broken.error_message


def test_under_a_shared_budget_every_key_has_its_turn(rules: Rules) -> None:
    shared = SlidingWindow("1/s", name="account")
    rules(r=Rule(limits=[SlidingWindow("9/m", per="key"), shared]))
    for key in "abcdefghijklmnopqrstuvwxyz":
        send("r", key=key), send("r", key=key)
    served = []
    for _ in range(26):
        served += [call.key for call in release()]
        CallAttempt.objects.update(
            started_at=hours_ago(1),
            sent_at=hours_ago(1),
            finished_at=hours_ago(1),
            outcome="succeeded",
        )
    assert sorted(served) == list("abcdefghijklmnopqrstuvwxyz")


def test_a_limit_of_a_million_is_summed_and_remembered(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("3000/d")]))
    url = {"method": "get", "params": {"url": "http://vendor.example/"}}
    first = send("r")
    past = [
        CallAttempt(call=first, number=1, rule="r", released_at=hours_ago(2), sent_at=hours_ago(2), finished_at=hours_ago(2),
                    outcome="succeeded")
        for _ in range(2990)
    ]  # fmt: skip
    CallAttempt.objects.bulk_create(past)
    CallQueue.objects.send_many([url] * 50, rule="r")
    assert len(release()) == 10
    assert len(release()) == 0


def test_a_paused_rule_waits_and_others_go_on(rules: Rules) -> None:
    rules(a=Rule(), b=Rule())
    held, free = send("a"), send("b")
    control.pause("default", "a", reason="maintenance")
    assert release() == [free]
    assert control.resume("default", "a") == 1
    assert release() == [held]


def test_a_pause_leaves_the_providers_own_hold_as_it_is(rules: Rules) -> None:
    """An operator's own may get shorter by another."""
    rules(a=Rule())
    now = database.clock("default")
    holds.lay(
        "default", ["a"], "rule", "", now + timedelta(minutes=5), "Retry-After", source="provider"
    )
    control.pause("default", "a", seconds=600)
    control.pause("default", "a", seconds=5)
    left = {hold.source: hold.until - now for hold in Hold.objects.all()}
    assert left["provider"] == timedelta(minutes=5)
    assert left["operator"] < timedelta(seconds=30)


def test_a_paused_key_waits_and_others_go_on(rules: Rules) -> None:
    rules(a=Rule())
    send("a", key="T1")
    other = send("a", key="T2")
    control.pause("default", "a", key="T1")
    assert release() == [other]


def test_a_changed_limit_acts_at_the_next_pass(rules: Rules) -> None:
    rules(a=Rule(limits=[SlidingWindow("2/m")]))
    for _ in range(9):
        send("a")
    assert len(release()) == 2
    control.change_limit("default", "a", "a#0", "5/m")
    assert len(release()) == 3
    control.change_limit("default", "a", "a#0", None)
    assert len(release()) == 0


def test_a_changed_rule_counts_what_went_before_it(rules: Rules) -> None:
    rules(a=Rule())
    for _ in range(4):
        send("a")
    assert len(release()) == 4
    rules(a=Rule(limits=[SlidingWindow("5/m")]))
    for _ in range(4):
        send("a")
    assert len(release()) == 1


def test_under_threshold_tells_whether_a_call_would_go(rules: Rules) -> None:
    rules(a=Rule(limits=[SlidingWindow("1/m", per="key")]))
    assert CallQueue.objects.under_threshold("a", "k")
    send("a", key="k")
    release()
    assert not CallQueue.objects.under_threshold("a", "k")
    assert CallQueue.objects.under_threshold("a", "other")


def answer(attempts: object) -> None:
    now = database.clock("default")
    ids = [a.pk for a in attempts]  # type: ignore[attr-defined]
    CallAttempt.objects.filter(pk__in=ids).update(
        started_at=now, sent_at=now, finished_at=now, outcome="succeeded"
    )


def long_ago() -> object:
    return hours_ago(1)


def hours_ago(hours: int) -> object:
    return timezone.now() - timedelta(hours=hours)


def test_redirects_are_charged_until_the_answer_says_how_many_there_were(rules: Rules) -> None:
    rules(r=Rule(follow_redirects=2, limits=[SlidingWindow("7/m"), Concurrency(3)]))
    for _ in range(6):
        send("r")
    assert len(release()) == 2, "six of seven are charged"
    assert set(CallAttempt.objects.values_list("calls", flat=True)) == {3}
    answer(CallAttempt.objects.all()[:1])
    CallAttempt.objects.exclude(finished_at=None).update(calls=1, cost=1)
    assert len(release()) == 1, "one plain request and two that may become three each make seven"
    assert CallAttempt.objects.open().count() == 2


def test_concurrency_counts_a_call_that_follows_redirects_once(rules: Rules) -> None:
    rules(r=Rule(follow_redirects=2, limits=[Concurrency(2)]))
    for _ in range(3):
        send("r", cost={"calls": 1, "tokens": 5})
    assert len(release()) == 2
    answer(CallAttempt.objects.all()[:1])
    assert len(release()) == 1


def test_a_worker_follows_no_more_redirects_than_were_charged(rules: Rules) -> None:
    """The rule may have changed since, or a lowered limit had no room for them."""
    rules(r=Rule(limits=[SlidingWindow("9/m")]))
    send("r")
    release()
    rules(r=Rule(follow_redirects=2, limits=[SlidingWindow("9/m")]))
    send("r")
    release()
    jobs = begin("default", list(CallAttempt.objects.order_by("pk").values_list("pk", flat=True)))
    assert [job.redirects for job in jobs] == [0, 2]


def test_a_head_that_a_lowered_limit_never_admits_fails_and_keeps_nobody_back(rules: Rules) -> None:
    account = SlidingWindow("100/m", name="account")
    rules(a=Rule(limits=[account]), b=Rule(limits=[account]))
    head = send("a", cost=50)
    for _ in range(5):
        send("a"), send("b")
    control.change_limit("default", "a", "account", "10/m")
    assert len(release()) == 10
    head.refresh_from_db()
    assert head.status == states.FAILED
    assert head.error_message == "cost: 50 calls are more than account ever admits"
