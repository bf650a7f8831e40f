"""What a pass counts on each kind of limit: by what is released, answered, deleted or changed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket, control
from callqueue.dispatch.release_pass import release as make_pass
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue
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


def test_a_bucket_owes_what_calls_of_one_instant_cost_more_than_they_were_released_for(
    rules: Rules,
) -> None:
    """As many as a clock that was set back moves to one instant."""
    rules(r=Rule(limits=[TokenBucket("10/s", burst=20)], settle=lambda response: 20))
    for _ in range(8):
        send("r")
    assert len(release()) == 8
    answer(CallAttempt.objects.all())
    CallAttempt.objects.update(cost=20, calls=20)
    send("r")
    done = make_pass("default", ["r"])
    assert done.opens_in is not None and 12 < done.opens_in < 15  # 160 owed, of 20 that were there


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


def test_deleting_a_call_makes_no_room(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/m")]))
    send("r")
    (released,) = release()
    released.delete()
    send("r")
    assert release() == []


def test_weights_count_in_their_units(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("10/m"), SlidingWindow("1000/m", unit="tokens")]))
    for tokens in (600, 300, 300):
        send("r", cost={"tokens": tokens})
    assert len(release()) == 2


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


def hours_ago(hours: int) -> object:
    return ledger_time.now("default") - timedelta(hours=hours)


def answer(attempts: object) -> None:
    now = ledger_time.now("default")
    ids = [a.pk for a in attempts]  # type: ignore[attr-defined]
    CallAttempt.objects.filter(pk__in=ids).update(
        started_at=now, sent_at=now, finished_at=now, outcome="succeeded"
    )
