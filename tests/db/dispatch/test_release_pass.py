"""Releases: which calls go, in which order, under which limits. Nothing is made here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from callqueue import Concurrency, Rule, SlidingWindow, TokenBucket, control, states
from callqueue.dispatch import release_pass
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import run_callqueue, travel
from tests.support.behaviour import Vendor, release, send
from tests.support.ledger import answer

Rules = Callable[..., None]


def test_all_limits_must_admit_a_call(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m"), Concurrency(3), SlidingWindow("2/h")]))
    for _ in range(6):
        send("r")
    assert len(release()) == 2


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


def test_a_heavy_call_is_not_starved_by_light_ones(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/m")]))
    send("r", cost=3)
    heavy = send("r", cost=4)
    send("r", cost=1)
    assert [call.cost for call in release()] == [3]
    answer(ago=3600)
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
        answer(ago=3600)
    assert sorted(served) == list("abcdefghijklmnopqrstuvwxyz")


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


def test_the_next_look_comes_before_the_slot_of_the_next_call(rules: Rules, remote: Vendor) -> None:
    """Released then, it goes ahead of its slot: the broker's time is none of the limit's."""
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    with travel() as clock:
        send("r")
        run_callqueue()
        send("r")
        opens_in = release_pass.release("default", ["r"]).opens_in
        assert opens_in is not None
        clock.forward(opens_in)
        assert len(release_pass.release("default", ["r"]).released) == 1
    attempt = CallAttempt.objects.open().get()
    assert attempt.send_at > attempt.released_at
