"""What attempts cost after all reaches the tallies, whoever records it: processes with other
settings than are in force, an operator's rates, limits that become tallied while calls are under
way, records that come late.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import callqueue
from callqueue import (
    FixedWindow,
    NotNow,
    Rule,
    SlidingWindow,
    TokenBucket,
    clocks,
    control,
    transitions,
)
from callqueue.dispatch.release_pass import ensure_states
from callqueue.dispatch.release_pass import release as make_pass
from callqueue.execution import claim, recorder
from callqueue.ledger import ledger_time
from callqueue.ledger.tally_rows import CORRECTIONS
from callqueue.limits.kinds import Limit
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import travel
from callqueue.transitions import after_success
from tests.support.behaviour import make_together, release, send
from tests.support.dispensers import Process
from tests.support.ledger import CALL, Later

pytestmark = pytest.mark.usefixtures("trusted_workers")

Rules = Callable[..., None]
# Windows of other units than calls are tallied where more than 2000 fit in, and for longer than a
# minute: an operator's rate, or a deploy's, crosses that.
UNTALLIED, TALLIED = SlidingWindow("1500/h", unit="tokens"), SlidingWindow("5000/h", unit="tokens")
NEVER = SlidingWindow("900000/h", unit="tokens")


def five_times(response: Any) -> Any:
    return {"tokens": 500}


def spent() -> int:
    return sum(one.cost["tokens"] for one in CallAttempt.objects.charged())


def permits(count: int, cost: int = 500) -> int:
    """Take so many permits of a hundred tokens, one after the other, that cost this; how many were
    granted.
    """
    for taken in range(count):
        try:
            with callqueue.permit("r", cost={"tokens": 100}, wait=0) as permit:
                permit.settle({"tokens": cost})
        except NotNow:
            return taken
    return count


# --- settings that differ from what is in force


@pytest.mark.parametrize(
    "before",
    [Rule(limits=[UNTALLIED]), Rule(limits=[NEVER]), Rule()],
    ids=["a smaller limit", "a larger limit", "no limit"],
)
def test_workers_of_an_old_release_spend_no_more_than_the_new_dispensers_limit(
    rules: Rules, remote: Any, before: Rule
) -> None:
    """Dispensers were deployed first: workers know another limit, or none."""
    rules(r=Rule(limits=before.limits, settle="tests.db.ledger.test_corrections.five_times"))
    for _ in range(60):
        send("r", cost={"tokens": 100})
    dispenser = Process("new", r=Rule(limits=[TALLIED]))
    for _ in range(10):
        made(dispenser, batch=2)
    assert spent() == 5000


def made(dispenser: Process, batch: int) -> None:
    """One pass of this dispenser, of at most so many calls, which are made at once."""
    dispenser.joins()
    book = dispenser.membership.book
    passed = make_pass("default", dispenser.group_of("r"), book, batch=batch)
    make_together([one.attempt_id for one in passed.released])


@pytest.mark.parametrize("verb", ["undo", "cancel", "void"])
def test_room_of_what_was_not_sent_is_there_at_once_under_an_operators_rate(
    rules: Rules, thousand: int, verb: str
) -> None:
    rules(r=Rule(limits=[SlidingWindow(f"{3 * thousand // 2}/h")]))
    control.change_limit("default", "r", "r#0", f"{5 * thousand // 2}/h")
    CallQueue.objects.send_many([CALL] * (6 * thousand), rule="r")
    release_all()
    assert CallAttempt.objects.charged().count() == 5 * thousand // 2
    open_ids = list(CallAttempt.objects.open().values_list("pk", flat=True))
    if verb == "undo":
        transitions.undo("default", open_ids)
    elif verb == "void":
        claim.give_back("default", open_ids)
    else:
        CallQueue.objects.filter(attempts__in=open_ids).cancel()
    assert CallAttempt.objects.charged().count() == 0
    release_all()
    assert CallAttempt.objects.charged().count() == 5 * thousand // 2


def release_all() -> None:
    while release():
        pass


# --- limits that become tallied, or are tallied no more, while calls are under way


@pytest.mark.parametrize("settled", [500, 10], ids=["for more", "for less"])
@pytest.mark.parametrize(
    "rates",
    [(None, "5000/h"), ("5000/h", None), ("5000/h", None, "6000/h"), (None, "5000/h", "1600/h")],
    ids=["into", "out of", "out and in", "in and out"],
)
def test_what_is_under_way_while_a_limit_becomes_tallied_or_is_not_any_more_is_counted_whole(
    rules: Rules, rates: tuple[str | None, ...], settled: int
) -> None:
    """Passes are made in between, or not: a tally is made with calls open, and with corrections
    that nobody has taken.
    """
    for passes in (True, False):
        CallAttempt.objects.all().delete()
        rules(r=Rule(limits=[UNTALLIED]))
        control.change_limit("default", "r", "r#0", rates[0])
        under_way = [callqueue.permit("r", cost={"tokens": 100}, wait=0) for _ in range(6)]
        for number, permit in enumerate(under_way):
            begun = permit.__enter__()
            begun.settle({"tokens": settled})
            if number < 2:
                permit.__exit__(None, None, None)
        for rate in rates[1:]:
            control.change_limit("default", "r", "r#0", rate)
            if passes:
                permits(1, 0)
            if rate == rates[1]:
                under_way[2].__exit__(None, None, None)
                under_way[3].__exit__(None, None, None)
        for permit in under_way[4:]:
            permit.__exit__(None, None, None)
        most = int((rates[-1] or "1500/h").partition("/")[0])
        free = max(0, most - 6 * settled)
        permits(100, 100)
        assert spent() == max(6 * settled, 6 * settled + free // 100 * 100)


def test_corrections_of_limits_that_are_not_tallied_are_forgotten(rules: Rules) -> None:
    rules(r=Rule(limits=[UNTALLIED]), s=Rule())
    for _ in range(4):
        permits(1, 10)
        send("s")
    release()
    transitions.undo("default", CallAttempt.objects.open().values_list("pk", flat=True))
    assert CallAttempt.objects.filter(correction_pending=True).count() == 4
    permits(1, 100)
    release()
    assert not CallAttempt.objects.filter(correction_pending=True).exists()


# --- more corrections than one statement takes


def test_thousands_that_cost_more_are_counted_before_the_next_release(
    rules: Rules, later: Later
) -> None:
    """They all left the window, and nobody made a pass since."""
    rules(r=Rule(limits=[SlidingWindow("50000/h", unit="tokens")]))
    count = CORRECTIONS + 200
    ensure_states("default", ["r"])
    first, then = (ledger_time.now("default") + timedelta(seconds=n) for n in (1, 200))
    CallAttempt.objects.bulk_create(
        [attempt(number, first, tokens=10) for number in range(count)]
        + [attempt(count + number, then, tokens=100) for number in range(499)]
    )
    for seconds in (300, 1000, 1700, 2400, 3100, 3590):
        later(seconds)
        send("r", cost={"tokens": 1})
        make_pass("default", ["r"])  # it counts, and remembers
    costs = {"cost": {"calls": 1, "tokens": 50}, "charged": {"calls": 1, "tokens": 10}}
    CallAttempt.objects.filter(finished_at=first).update(correction_pending=True, **costs)
    later(3650)
    CallQueue.objects.all().delete()
    send("r", cost={"tokens": 200})
    assert make_pass("default", ["r"]).released == [], "a hundred are free"
    send("r", cost={"tokens": 50}, priority=9)
    assert len(make_pass("default", ["r"]).released) == 1


def attempt(number: int, ended: Any, *, tokens: int) -> CallAttempt:
    instants = dict.fromkeys(["released_at", "started_at", "sent_at", "finished_at"], ended)
    return CallAttempt(
        call_id=10**9 + number,
        number=1,
        rule="r",
        cost={"calls": 1, "tokens": tokens},
        outcome="succeeded",
        **instants,
    )


# --- records that come late


LATE_LIMITS = [
    SlidingWindow("1/6s", per="key"),
    SlidingWindow("1/h", per="key"),
    FixedWindow("1/h", per="key"),
    TokenBucket("1/70s", burst=1, per="key"),
]


@pytest.mark.parametrize("limit", LATE_LIMITS, ids=repr)
@pytest.mark.parametrize("passes", [1, 3])
def test_an_answer_that_is_recorded_after_its_window_keeps_no_key_back(
    rules: Rules, later: Later, limit: Limit, passes: int
) -> None:
    """A worker's way to the database was cut; other keys' calls went on meanwhile."""
    rules(r=Rule(limits=[limit]))
    for _ in range(2):
        send("r", key="late")
    assert len(release()) == 1
    (job,) = claim.begin("default", [CallAttempt.objects.get().pk])
    end = after_success(job).at(ledger_time.now("default"), clocks.monotonic())
    window = limit.window_us / 1_000_000
    for number in range(1, passes + 1):
        later(number * 2 * window / passes)
        send("r", key=f"other{number}")
        assert len(make_pass("default", ["r"]).released) == 1
    assert recorder.write("default", [end]) == 1
    make_pass("default", ["r"])
    assert CallAttempt.objects.filter(key="late").count() == 2, "its next call goes"


@pytest.mark.parametrize("limit", LATE_LIMITS[:2], ids=repr)
def test_what_is_recorded_late_is_taken_away_once(rules: Rules, later: Later, limit: Limit) -> None:
    """Late, but within the window: it leaves as others do, and no call more goes for it."""
    rules(r=Rule(limits=[limit.with_rate(limit.rate_text.replace("1/", "3/", 1))]))
    ensure_states("default", ["r"])
    for _ in range(9):
        send("r", key="late")
    assert len(make_pass("default", ["r"]).released) == 3
    jobs = claim.begin("default", list(CallAttempt.objects.values_list("pk", flat=True)))
    ends = [after_success(j).at(ledger_time.now("default"), clocks.monotonic()) for j in jobs]
    window = limit.window_us / 1_000_000
    later(window * 0.6)
    assert recorder.write("default", ends[:2]) == 2
    assert make_pass("default", ["r"]).released == []
    later(window * 1.2)
    assert len(make_pass("default", ["r"]).released) == 2
    assert recorder.write("default", ends[2:]) == 1
    assert len(make_pass("default", ["r"]).released) == 1
    assert make_pass("default", ["r"]).released == []


# --- permits that are settled long after their end


@pytest.mark.parametrize(
    "limit",
    [SlidingWindow("100/6s", unit="tokens", per="key"), SlidingWindow("5000/h", unit="tokens")],
    ids=repr,
)
def test_a_permit_that_is_settled_after_it_has_left_makes_no_room_twice(
    rules: Rules, limit: Limit
) -> None:
    rules(r=Rule(limits=[limit]))
    most, window = limit.capacity, limit.window_us / 1_000_000

    def tokens(count: int) -> Any:
        return callqueue.permit("r", key="a", cost={"tokens": count}, wait=0)

    with travel() as clock:
        with tokens(most) as left:
            pass
        clock.forward(window + 0.5)
        with tokens(most - 10):
            pass
        left.settle({"tokens": 10})
        with pytest.raises(NotNow), tokens(11):
            pytest.fail("over the limit")
        with tokens(10):
            pass
