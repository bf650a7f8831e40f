"""The estimate of a drain agrees with the simulation that follows every call."""

from __future__ import annotations

import random

import pytest

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.limits.budgets import book_of
from callqueue.limits.kinds import SECOND, Limit, Usage
from callqueue.look.estimate import Gate, gone_of_largest, seconds_charged, seconds_to_pass
from tests.support.drain_simulation import DELIVERY, simulate
from tests.support.length import examples

NOON = 1_800_014_400 * SECOND  # 2027-01-15 12:00 UTC
LATER = NOON + 1025 * SECOND  # no calendar window begins here


def drained(
    limit: Limit, calls: float, usage: Usage | None = None, latency: float = 0.0
) -> float | None:
    return limit.seconds_until_gone(limit.meter(usage or Usage(), NOON), calls, NOON, latency)


def idle(limit: Limit, now: int) -> Usage:
    """What a limit holds of which nothing was used for long."""
    return Usage(level=limit.capacity * limit.period_us, since=now)


def drawn(chance: random.Random, least: int = 1) -> Limit:
    """A limit of any kind, per rule or per key, that admits as much at once."""
    kind, per = chance.choice("sssbfc"), chance.choice(["rule", "rule", "key"])
    if kind == "s":
        period = chance.choice([1, 1, 2, 5, 10, 30, 60, 300])
        return SlidingWindow(f"{least - 1 + chance.randint(1, 60)}/{period}s", per=per)
    if kind == "b":
        burst = least + chance.randint(1, 50)
        period = chance.choice(["s", "s", "10s", "m"])
        return TokenBucket(f"{chance.randint(1, 50)}/{period}", burst=burst, per=per)
    if kind == "f":
        return FixedWindow(f"{chance.randint(5, 500)}/{chance.choice('mh')}", per=per)
    return Concurrency(least - 1 + chance.randint(1, 20), per=per)


def used(limit: Limit, chance: random.Random) -> Usage:
    """What has been used of a limit, or nothing."""
    if chance.random() < 0.5 or limit.counts_in_flight or limit.is_keyed:
        return idle(limit, LATER)
    if limit.keeps_level:
        level = chance.randint(-limit.capacity, limit.capacity) * limit.period_us
        return Usage(level=level + chance.randrange(limit.period_us), since=LATER)
    count = chance.randint(0, min(limit.capacity, 60))
    ages = sorted(LATER - chance.randint(0, limit.window_us - 1) for _ in range(count))
    horizon = limit.horizon(LATER)
    return Usage(aged=[(at, 1) for at in ages if at > horizon], since=horizon)


def error(seed: int) -> tuple[float, float]:
    """By how much the estimate for a drawn rule is off, in seconds, and how long it takes."""
    chance = random.Random(seed)
    cost, keys = chance.choice([1, 1, 2, 5]), chance.choice([1, 4, 25])
    rule = Rule(limits=[drawn(chance, cost) for _ in range(chance.randint(1, 3))])
    calls = chance.choice([chance.randint(1, 60), chance.randint(1, 1000)])
    latency = chance.choice([0.05, 0.2, 1.0, 4.0])
    book = book_of({"r": rule})
    usage = {budget.id: used(budget.limit, chance) for budget in book.budgets["r"]}
    keyed = {one.id for one in book.budgets["r"] if one.limit.is_keyed}  # of which nothing is used
    usage = {name: one for name, one in usage.items() if name not in keyed}
    made = simulate(
        book, "r", calls, latency=latency, start=LATER, usage=usage, cost=cost, keys=keys
    )
    each, more = divmod(calls, keys)
    sizes = [(size, many) for size, many in ((each, keys - more), (each + 1, more)) if size * many]
    gates = [
        Gate(one.limit, one.limit.meter(usage.get(one.id) or idle(one.limit, LATER), LATER),
             sizes=sizes if one.limit.is_keyed else [], cost=cost,
             charged_s=seconds_charged(one.limit, latency))
        for one in book.budgets["r"]
    ]  # fmt: skip
    estimate = seconds_to_pass(gates, calls, LATER)
    assert estimate is not None
    return abs(estimate + latency + DELIVERY - made.seconds), made.seconds


def test_of_several_limits_it_is_what_the_simulation_takes_within_six_per_cent() -> None:
    found = [error(seed) for seed in range(examples(80, 200))]
    off = [one for one in found if one[0] > max(1.0, 0.06 * one[1])]
    assert len(off) <= 2
    assert all(by <= 0.35 * whole + 1.0 for by, whole in off)


def test_what_is_charged_already_is_waited_for() -> None:
    """Open attempts for a period more, and half of their own time; of a limit of those in flight it
    has to be known how long they take. A backlog of centuries is no long sum.
    """
    limit = SlidingWindow("10/m", jitter=0)
    full = Usage(aged=[(NOON - 20 * SECOND, 10)])
    assert drained(limit, 1) == 0
    assert drained(limit, 1, full) == pytest.approx(40, abs=0.001)
    assert drained(limit, 11, full) == pytest.approx(100, abs=0.001)
    assert drained(limit, 1, Usage(open=10), latency=2.0) == pytest.approx(61)
    assert drained(Concurrency(4), 100) is None
    assert drained(Concurrency(4), 3) == 0
    assert drained(Concurrency(4), 100, latency=0.5) == pytest.approx(12)
    assert drained(FixedWindow("1/d"), 1) == 0
    years = drained(FixedWindow("1/d"), 10_000_000)
    assert years == pytest.approx(10_000_000 * 86400, rel=0.001)


@pytest.mark.parametrize(("tokens", "wait"), [(0.7, 18), (0, 60), (-1.5, 150), (2.75, 15)])
def test_what_a_bucket_holds_of_its_next_token_is_not_waited_for(tokens: float, wait: int) -> None:
    limit = TokenBucket("1/m", burst=5)
    held = Usage(level=round(tokens * limit.period_us), since=NOON)
    waiting = max(0, int(tokens)) + 1
    assert drained(limit, waiting, held) == pytest.approx(wait)
    assert drained(limit, waiting + 10, held) == pytest.approx(wait + 600)


def test_values_take_turns() -> None:
    assert gone_of_largest([(3, 2), (10, 1)], 6) == 2
    assert gone_of_largest([(3, 2), (10, 1)], 16) == 10
