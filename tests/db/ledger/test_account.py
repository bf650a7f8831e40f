"""What a pass counts on each kind of limit: by what is released, answered, deleted or changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket, control
from callqueue.dispatch.release_pass import release as make_pass
from callqueue.ledger import ledger_time
from callqueue.limits.kinds import Limit
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import release, send
from tests.support.ledger import CALL, answer

Rules = Callable[..., None]


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (SlidingWindow("3/m"), 3),
        (TokenBucket("1/m", burst=4), 4),
        (FixedWindow("2/d", timezone="Asia/Kathmandu"), 2),
    ],
)
def test_no_more_than_a_limit_allows(rules: Rules, limit: Limit, most: int) -> None:
    rules(r=Rule(limits=[limit]))
    for _ in range(6):
        send("r")
    assert len(release()) == most
    assert len(release()) == 0


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
    first, now = send("r"), ledger_time.now("default")
    CallAttempt.objects.bulk_create(
        CallAttempt(call=first, number=1, rule="r", released_at=now) for _ in range(2990)
    )
    answer(ago=7200)
    CallQueue.objects.send_many([CALL] * 50, rule="r")
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
