"""Budgets with long windows: what is kept is what counting anew would give."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from django.db import connection

import callqueue
from callqueue import (
    Concurrency,
    FixedWindow,
    NotNow,
    Rule,
    SlidingWindow,
    TokenBucket,
    clocks,
    conf,
    control,
    database,
    transitions,
)
from callqueue.database import to_us
from callqueue.dispatch.dispenser import Dispenser
from callqueue.dispatch.release_pass import ensure_state_rows
from callqueue.dispatch.release_pass import release as make_pass
from callqueue.execution import claim, recorder
from callqueue.ledger import ledger_time, tallies, tally_rows
from callqueue.ledger.tally_rows import CORRECTIONS
from callqueue.limits.budgets import book_of
from callqueue.limits.kinds import Limit
from callqueue.models import CallAttempt, CallQueue, RuleState, Tally
from callqueue.sending.validation import check_key
from callqueue.testing import travel
from callqueue.transitions import after_success
from tests.db.ledger.test_clock_jumps import at_command
from tests.support.behaviour import make_together, release, send
from tests.support.dispensers import Process
from tests.support.ledger import CALL, Later, answer, past_attempts

pytestmark = pytest.mark.usefixtures("trusted_workers")

Rules = Callable[..., None]
# Tallied and not. Nothing leaves them while a slow machine is at it.
LIMITS_OF_FIVE = [
    SlidingWindow("5/5s", per="key"),
    SlidingWindow("5/h", per="key"),
    FixedWindow("5/d", per="key"),
    TokenBucket("1/h", burst=5, per="key"),
    TokenBucket("1/3s", burst=5, per="key"),
    Concurrency(5, per="key"),
]


# --- keys with parts


@pytest.mark.parametrize("limit", LIMITS_OF_FIVE, ids=repr)
def test_a_key_is_counted_whatever_other_parts_its_text_has(rules: Rules, limit: Limit) -> None:
    rules(r=Rule(limits=[limit, SlidingWindow("900/h", per="channel")]))
    channels = [{"key": "T1", "channel": channel} for channel in ("C1", "C2")]
    keys: list[Any] = [*channels, "T1", {"key": "T1"}]
    for key in keys:
        for _ in range(5):
            CallQueue.objects.send(CALL, rule="r", key=key)
        released = release()
        assert len(released) == (5 if key == keys[0] else 0)
        answer()
        if isinstance(limit, Concurrency):
            return
        assert not any(CallQueue.objects.under_threshold("r", key) for key in keys)
    assert CallQueue.objects.under_threshold("r", "T2")


# --- what passes remember


def test_what_was_remembered_of_a_group_is_not_believed_after_another_group_released(
    rules: Rules, thousand: int
) -> None:
    """A rule joins the budget, releases, and leaves again: a deployment that is rolled back."""
    account = SlidingWindow(f"{4 * thousand}/d", name="account")
    alone, both = (dict.fromkeys(names, Rule(limits=[account])) for names in ("b", "ab"))
    for first, then in ((alone, both), (both, alone)):
        for model in (CallAttempt, RuleState, CallQueue):
            model.objects.all().delete()
        for settings in (first, then, first, then):
            rules(**settings)
            CallQueue.objects.send_many([CALL] * (3 * thousand // 2), rule="b")
            release_all("b")
        assert CallAttempt.objects.filter(rule="b").count() == 4 * thousand


def test_what_a_linked_rule_alone_had_taken_away_is_not_taken_away_twice(
    rules: Rules, later: Later
) -> None:
    """What left the window while they were linked was told to its tallies."""
    link, hourly = SlidingWindow("100000/h", name="link"), SlidingWindow("10/h", per="key")
    apart = {"a": Rule(), "b": Rule(limits=[hourly])}
    rules(**apart)
    ensure_state_rows("default", ["a", "b"])
    past_attempts("b", ["T"] * 10, minutes=[58] * 5 + [30] * 5)
    send("b", key="other")
    release_all("b")
    later(180)
    rules(a=Rule(limits=[link]), b=Rule(limits=[hourly, link]))
    send("a")
    release_all("a")
    later(240)
    rules(**apart)
    for _ in range(10):
        send("b", key="T")
    release_all("b")
    assert CallAttempt.objects.filter(rule="b", key="T").count() == 15  # 5 of them left the window


@pytest.mark.parametrize(
    ("names", "thousands", "per"), [("bcbc", 2.1, "d"), ("abcabca", 2.5, "30d")]
)
def test_a_rule_that_is_renamed_to_and_fro_by_short_lived_dispensers_is_counted_whole(
    rules: Rules, names: str, thousands: float, per: str, thousand: int
) -> None:
    """Its two names share no row, and a dispenser that makes one round hears of no other."""
    account = SlidingWindow(f"{int(thousands * thousand)}/{per}", name="account")
    for name in names:
        rules(**{name: Rule(limits=[account])})
        CallQueue.objects.send_many([CALL] * (7 * thousand // 10), rule=name)
        Dispenser(name="short-lived", publish=lambda using, messages: True).run_once()
        answer()
    assert CallAttempt.objects.count() <= account.n


def test_a_changed_unit_or_scope_is_counted_anew(rules: Rules) -> None:
    for limit, allowed in (
        (SlidingWindow("6/h", per="key"), 6),
        (SlidingWindow("8/h", per="who"), 8),
        (SlidingWindow("90/h", per="key", unit="tokens"), 9),
        (FixedWindow("12/d", per="who"), 12),
    ):
        rules(r=Rule(limits=[limit]))
        for _ in range(5):
            CallQueue.objects.send(
                CALL, rule="r", key={"key": "T", "who": "W"}, cost={"calls": 1, "tokens": 10}
            )
        for _ in range(4):
            release()
        assert CallAttempt.objects.count() == allowed or limit.rate == "6/h"
        assert CallAttempt.objects.count() <= allowed


def test_a_bucket_whose_burst_has_changed_does_not_begin_full(rules: Rules) -> None:
    for burst in (5, 6, 5, 7):
        rules(r=Rule(limits=[TokenBucket("1/h", burst=burst)]))
        for _ in range(8):
            send("r")
        release()
        answer()
    assert CallAttempt.objects.count() <= 7


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (TokenBucket("1/m", burst=5, per="key"), 2),  # 1 two minutes ago, 1 of 2 one minute ago
        (TokenBucket("1/h", burst=5, per="key", unit="tokens"), 5),
        (SlidingWindow("7/h", per="key"), 2),
        (SlidingWindow("5/h", per="key", unit="tokens"), 5),
    ],
    ids=repr,
)
def test_keys_are_counted_from_what_ended_minutes_ago(
    rules: Rules, limit: Limit, left: int
) -> None:
    """What had no tokens charges none."""
    rules(r=Rule(limits=[limit]))
    ensure_state_rows("default", ["r"])
    past_attempts("r", ["T"] * 5, minutes=[2] * 4 + [1])
    for key in "TU":
        for _ in range(5):
            send("r", key=key, cost={"tokens": 1})
    released = make_pass("default", ["r"]).released
    assert Counter(one.key for one in released) == {"T": left, "U": 5}


def test_attempts_are_wanted_for_little_longer_than_their_window() -> None:
    """By a dispenser that was away: it takes away what has left meanwhile, or counts anew."""
    for per, longest in (("rule", 1.01), ("key", 1.5)):
        limit = SlidingWindow("5/30d", per=per)
        counted = tallies.counting_times(book_of({"r": Rule(limits=[limit])}))["r"]
        assert limit.window_us < counted <= longest * limit.window_us


def test_what_another_rule_gives_back_makes_no_room_here(rules: Rules) -> None:
    """A limit that they share has them in one group, where corrections are taken together."""
    link = SlidingWindow("900/h", name="link")
    rules(a=Rule(limits=[link]), b=Rule(limits=[link, SlidingWindow("5/h", per="key")]))
    for rule in "ab" * 8:
        send(rule, key="K")
    release_all("b", answered=False)
    of_a = CallAttempt.objects.filter(rule="a")
    assert transitions.void_and_log("default", list(of_a.values_list("pk", flat=True))) == 8
    release_all("b", answered=False)
    assert CallAttempt.objects.filter(rule="b").count() == 5


def test_tallies_are_counted_anew_from_the_attempts_once_an_hour(
    rules: Rules, later: Later
) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/2h", per="key")]))
    for _ in range(3):
        send("r", key="K")
    release_all("r", answered=False)
    Tally.objects.update(used=5)  # whatever has put it wrong
    send("r", key="K")
    for seconds, gone in ((1500, 1), (2900, 1), (3700, 2)):
        later(seconds)
        send("r", key=f"other{seconds}")
        assert len(make_pass("default", ["r"]).released) == gone


def test_what_has_left_leaves_once_though_another_process_reads_a_slightly_earlier_clock(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = at_command(monkeypatch)
    rules(r=Rule(limits=[SlidingWindow("4/h", per="key")]))
    ensure_state_rows("default", ["r"])
    ledger_time.watch("default").look()
    clock.pass_by(1)
    past_attempts("r", ["K"] * 3, minutes=[(3600 - left) / 60 for left in (10, 10.1, 1800)])
    for number, seconds in enumerate((0, 10.001, -0.005, 0.2)):
        clock.pass_by(seconds)
        send("r", key=f"other{number}")
        assert len(make_pass("default", ["r"]).released) == 1
    for _ in range(5):
        send("r", key="K")
    assert len(make_pass("default", ["r"]).released) == 3, "one of the three is still counted"


# --- whatever happens


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "limit",
    [
        SlidingWindow("7/m", per="key"),
        SlidingWindow("7/m", per="part"),
        SlidingWindow("70/m", per="key", unit="tokens"),
        FixedWindow("7/2m", per="key"),
    ],
    ids=repr,
)
def test_the_tallies_are_what_counting_anew_gives(
    rules: Rules, later: Later, limit: Limit, seed: int
) -> None:
    """Sends, passes, answers, undone releases, settled costs and time, in any order."""
    chance = random.Random(seed)
    rules(
        r=Rule(limits=[limit, SlidingWindow("3000/h")]),
        s=Rule(limits=[SlidingWindow("4/m", per="key")]),
    )
    ensure_state_rows("default", ["r", "s"])
    now = 0.0
    for _ in range(60):
        step = chance.random()
        if step < 0.3:
            key = {"key": chance.choice("AB"), "part": chance.choice("XY")}
            CallQueue.objects.send(
                CALL, rule=chance.choice("rrrs"), key=key, cost={"calls": 1, "tokens": 10}
            )
        elif step < 0.55:
            released = make_pass("default", [chance.choice("rrrs")]).released
            judge(limit)
            undo_some(released, chance)
        elif step < 0.75:
            answer_some(chance.randint(1, 3), tokens=chance.choice([None, 4]))
        else:
            now += chance.choice([0.3, 5, 31, 59.9, 61, 400])
            later(now)
    assert CallAttempt.objects.filter(rule="r").count() > 5


def judge(limit: Limit) -> None:
    """What is kept is what is counted."""
    limit = limit.moved_by(ledger_time.moved("default"))
    at = database.to_us(ledger_time.now("default"))
    kept = {tally.value: tally.used for tally in Tally.objects.filter(budget="r#0") if tally.used}
    pending = CallAttempt.objects.filter(rule="r", correction_pending=True).exists()
    if kept and not pending:
        book = book_of({"r": Rule(limits=[limit])})
        (counted,) = tallies.tallies_of("default", [(book.budgets["r"][0], None)], at, at)
        fresh = {value: tally.used for value, tally in counted.by_value.items() if tally.used}
        assert all(kept.get(value, 0) >= used for value, used in fresh.items())
        assert all(used - fresh.get(value, 0) <= limit.capacity for value, used in kept.items())


# --- cost


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="reads PostgreSQL's statistics")
@pytest.mark.parametrize(
    "limit",
    [
        SlidingWindow("1000/d", per="workspace"),
        SlidingWindow("900000000/d", unit="tokens"),
        TokenBucket("1000/d", burst=100, per="key"),
        SlidingWindow("1000000/d"),
    ],
    ids=repr,
)
def test_passes_read_no_more_rows_however_many_attempts_the_window_has(
    rules: Rules, limit: Limit
) -> None:
    """With 20 times the attempts and values. Nor does the rule's row remember more."""
    rules(r=Rule(limits=[limit]))
    tokens, read, kept = {"calls": 1, "tokens": 5}, {}, {}
    for size in (200, 4_000):
        for model in (CallAttempt, RuleState, Tally):
            model.objects.all().delete()
        ensure_state_rows("default", ["r"])
        keys = [check_key({"key": f"k{n}", "workspace": f"w{n}"}) for n in range(size // 10)]
        past_attempts("r", keys * 10, minutes=[1200 * n / size for n in range(size)], cost=tokens)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE callqueue_callattempt")
        key = {"key": "k1", "workspace": "w1"}
        CallQueue.objects.send_many([CALL] * 40, rule="r", key=key, cost=tokens)
        make_pass("default", ["r"], batch=10)  # counts, and remembers
        before = rows_read()
        make_pass("default", ["r"], batch=10)
        read[size] = rows_read() - before
        kept[size] = len(json.dumps(RuleState.objects.get(rule="r").memo))
    assert 0 < read[4_000] <= 2 * read[200] + 50, read
    assert kept[4_000] <= kept[200] + 200, kept


def rows_read() -> int:
    """The rows of attempts and tallies that this transaction has read."""
    sql = """SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_xact_user_tables
        WHERE relname IN ('callqueue_callattempt', 'callqueue_tally')"""
    return int(database.rows("default", sql)[0][0])


# --- what attempts cost after all

# Windows of other units than calls are tallied where more than 2000 fit in, and for longer than a
# minute: an operator's rate, or a deploy's, crosses that.
UNTALLIED, TALLIED = SlidingWindow("1500/h", unit="tokens"), SlidingWindow("5000/h", unit="tokens")
NEVER = SlidingWindow("900000/h", unit="tokens")


def five_times(response: Any) -> Any:
    return {"tokens": 500}


def permits(count: int, cost: int) -> None:
    """Take as many permits of a hundred tokens, up to so many, as are granted; each costs this."""
    with suppress(NotNow):
        for _ in range(count):
            with callqueue.permit("r", cost={"tokens": 100}, wait=0) as permit:
                permit.settle({"tokens": cost})


@pytest.mark.parametrize(
    "before",
    [Rule(limits=[UNTALLIED]), Rule(limits=[NEVER]), Rule()],
    ids=["a smaller limit", "a larger limit", "no limit"],
)
def test_workers_of_an_old_release_spend_no_more_than_the_new_dispensers_limit(
    rules: Rules, remote: Any, before: Rule
) -> None:
    """Dispensers were deployed first: workers know another limit, or none."""
    rules(r=Rule(limits=before.limits, settle="tests.db.ledger.test_tallies.five_times"))
    for _ in range(60):
        send("r", cost={"tokens": 100})
    dispenser = Process("new", r=Rule(limits=[TALLIED]))
    for _ in range(10):
        dispenser.joins()
        group, book = dispenser.group_of("r"), dispenser.membership.book
        released = make_pass("default", group, book, batch=2).released
        make_together([one.attempt_id for one in released])
    assert sum(one.cost["tokens"] for one in CallAttempt.objects.charged()) == 5000


@pytest.mark.parametrize("verb", ["undo", "cancel", "void"])
def test_room_of_what_was_not_sent_is_there_at_once_under_an_operators_rate(
    rules: Rules, thousand: int, verb: str
) -> None:
    rules(r=Rule(limits=[SlidingWindow(f"{3 * thousand // 2}/h")]))
    control.change_limit("default", "r", "r#0", f"{5 * thousand // 2}/h")
    CallQueue.objects.send_many([CALL] * (6 * thousand), rule="r")
    release_all("r", answered=False)
    assert CallAttempt.objects.charged().count() == 5 * thousand // 2
    open_ids = list(CallAttempt.objects.open().values_list("pk", flat=True))
    if verb == "undo":
        transitions.void_and_log("default", open_ids)
    elif verb == "void":
        claim.give_back("default", open_ids)
    else:
        CallQueue.objects.filter(attempts__in=open_ids).cancel()
    assert CallAttempt.objects.charged().count() == 0
    release_all("r", answered=False)
    assert CallAttempt.objects.charged().count() == 5 * thousand // 2


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
    """A tally is made with calls open, and with corrections that nobody has taken."""
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
        spent = sum(one.cost["tokens"] for one in CallAttempt.objects.charged())
        assert spent == max(6 * settled, 6 * settled + free // 100 * 100)


def test_corrections_of_limits_that_are_not_tallied_are_forgotten(rules: Rules) -> None:
    rules(r=Rule(limits=[UNTALLIED]), s=Rule())
    for _ in range(4):
        permits(1, 10)
        send("s")
    release()
    transitions.void_and_log("default", CallAttempt.objects.open().values_list("pk", flat=True))
    assert CallAttempt.objects.filter(correction_pending=True).count() == 4
    permits(1, 100)
    release()
    assert not CallAttempt.objects.filter(correction_pending=True).exists()


def test_thousands_that_cost_more_are_counted_before_the_next_release(
    rules: Rules, later: Later
) -> None:
    """They all left the window, and nobody made a pass since."""
    rules(r=Rule(limits=[SlidingWindow("50000/h", unit="tokens")]))
    count = CORRECTIONS + 200
    ensure_state_rows("default", ["r"])
    for ended, many, tokens in ((-1 / 60, count, 10), (-200 / 60, 499, 100)):
        cost = {"calls": 1, "tokens": tokens}
        past_attempts("r", [""] * many, minutes=[ended] * many, cost=cost)
    first = CallAttempt.objects.first().finished_at
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


@pytest.mark.django_db
def test_what_left_of_several_keys_of_one_bucket_is_told_in_the_order_of_its_ends() -> None:
    """In another, the bucket would be taken to be fuller of what is owed than it is."""
    (budget,) = book_of({"r": Rule(limits=[TokenBucket("1/m", burst=9, per="team")])}).budgets["r"]
    one, other = (json.dumps({"team": "T", "user": user}) for user in "ab")
    now = to_us(past_attempts("r", [one, one, other], minutes=[3, 3, 2]))
    asked = tally_rows.Leaving(budget, now - budget.limit.window_us, now, now)
    (left,) = tally_rows.what_left("default", [asked])
    assert [(value, cost) for value, _, cost in left] == [("T", 2), ("T", 1)]


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
    end = after_success(job).stamp(ledger_time.now("default"), clocks.monotonic())
    window = limit.window_us / 1_000_000
    for number in range(1, passes + 1):
        later(number * 2 * window / passes)
        send("r", key=f"other{number}")
        assert len(make_pass("default", ["r"]).released) == 1
    assert recorder.record_once("default", [end]) == 1
    make_pass("default", ["r"])
    assert CallAttempt.objects.filter(key="late").count() == 2, "its next call goes"


@pytest.mark.parametrize("limit", LATE_LIMITS[:2], ids=repr)
def test_what_is_recorded_late_is_taken_away_once(rules: Rules, later: Later, limit: Limit) -> None:
    """Late, but within the window: it leaves as others do, and no call more goes for it."""
    rules(r=Rule(limits=[limit.with_rate(limit.rate_text.replace("1/", "3/", 1))]))
    ensure_state_rows("default", ["r"])
    for _ in range(9):
        send("r", key="late")
    assert len(make_pass("default", ["r"]).released) == 3
    jobs = claim.begin("default", list(CallAttempt.objects.values_list("pk", flat=True)))
    ends = [after_success(j).stamp(ledger_time.now("default"), clocks.monotonic()) for j in jobs]
    window = limit.window_us / 1_000_000
    later(window * 0.6)
    assert recorder.record_once("default", ends[:2]) == 2
    assert make_pass("default", ["r"]).released == []
    later(window * 1.2)
    assert len(make_pass("default", ["r"]).released) == 2
    assert recorder.record_once("default", ends[2:]) == 1
    assert len(make_pass("default", ["r"]).released) == 1
    assert make_pass("default", ["r"]).released == []


@pytest.mark.parametrize(
    ("ended", "cost", "free"), [(120, 50, 30), (10, 20, 10)], ids=["late", "for less"]
)
def test_corrections_that_are_there_when_all_is_counted_anew_are_taken_once(
    rules: Rules, ended: float, cost: int, free: int
) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/h", per="key", unit="tokens")]))
    past_attempts("r", ["K"], minutes=[ended], cost={"calls": 1, "tokens": cost})
    charged = {"calls": 1, "tokens": 50}
    CallAttempt.objects.update(correction_pending=True, charged=charged)
    past_attempts("r", ["K"], minutes=[10], cost={"calls": 1, "tokens": 70})
    for _ in range(4):
        send("r", key="K", cost={"tokens": 10})
    release_all("r", answered=False)
    assert CallAttempt.objects.open().count() == free // 10


def test_a_calendars_tallies_begin_anew_with_its_window(rules: Rules, later: Later) -> None:
    rules(r=Rule(limits=[FixedWindow("2/2m", per="key", jitter=0)]))
    for _ in range(5):
        send("r", key="K")
    release_all("r")
    later(121)
    release_all("r")
    assert CallAttempt.objects.count() == 4


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


# --- making things


def release_all(rule: str, *, answered: bool = True) -> None:
    """Passes over the rule's group until there is nothing more to release."""
    group = conf.current().book.groups[rule]
    ensure_state_rows("default", group)
    while make_pass("default", group).released:
        pass
    if answered:
        answer()


def answer_some(count: int, tokens: int | None) -> None:
    """Answers that were recorded as executors record them, and cost so many tokens after all."""
    answered = CallAttempt.objects.open().order_by("pk")[:count]
    if tokens is not None:
        for attempt in answered:
            cost = {"charged": attempt.cost, "cost": {**attempt.cost, "tokens": tokens}}
            CallAttempt.objects.filter(pk=attempt.pk).update(correction_pending=True, **cost)
    answer(answered)


def undo_some(released: Iterable[Any], chance: random.Random) -> None:
    ids = [one.attempt_id for one in released if chance.random() < 0.2]
    if ids:
        transitions.void_and_log("default", ids)
