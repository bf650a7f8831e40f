"""The ledger rule against an adversary who chooses wire instants, answers, losses, restarts and
costs.

The adversary plays broker, workers, network and provider at once: every released attempt reaches
the wire whenever it likes until its answer, and the answer comes whenever it likes. The provider's
count is then judged by a check of its own, which shares no code with the limits.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import count, pairwise
from zoneinfo import ZoneInfo

import pytest

from callqueue import Rule
from callqueue.history.audit import new_use
from callqueue.ledger.memo import Memo, forget_other_levels, kept_level, usage_since_kept_level
from callqueue.limits.budgets import book_of
from callqueue.limits.kinds import (
    SECOND,
    Concurrency,
    FixedWindow,
    Limit,
    SlidingWindow,
    TokenBucket,
    Usage,
)
from tests.support.drain_simulation import simulate
from tests.support.length import examples
from tests.support.new_kind import Spaced

START = 1_780_000_000 * SECOND
PATIENCE = 100  # microseconds after an instant that came to nothing, doubled each time


@dataclass
class Attempt:
    """A released attempt. `wire` is when the provider counts it; the ledger never learns of it.
    `told`: when the ledger learns that it was sent, where that is before the answer.
    """

    cost: int
    released: int
    send_at: int
    wire: int
    sent: int | None
    answered: int
    told: int | None = None

    def knows(self, limit: Limit, now: int) -> bool:
        """Whether the ledger knows at `now` since when it ages."""
        is_told = self.told is not None and self.told <= now and limit.ages_unanswered
        return is_told or self.answered <= now


@dataclass(frozen=True)
class Move:
    """What the adversary does with one call: how long it dallies before the wire, before the
    answer, and before the ledger is told that it was sent; what is stamped.
    """

    pause: int
    before_wire: int
    before_answer: int
    network: float  # share of the jitter between the stamp and the provider's count
    stamped: bool
    cost: int
    before_told: int | None = None


def games(short: int, long: int, most_cost: int = 1) -> Iterator[tuple[random.Random, list[Move]]]:
    """So many games, in `make test` and in `make faults`, each with the dice that made it. In some
    calls come without a pause, in some the adversary never dallies.
    """
    for seed in range(examples(short, long)):
        dice = random.Random(seed)
        hurry, patience = dice.choice((0.0, 0.3, 1.0)), dice.choice((0.1, 0.5, 1.0))
        yield dice, [_move(dice, most_cost, hurry, patience) for _ in range(dice.randint(1, 60))]


def _move(dice: random.Random, most_cost: int, hurry: float, patience: float) -> Move:
    def short() -> int:
        least = dice.choice((0, 3000, 3 * SECOND))
        return dice.randint(0, least) if dice.random() < patience else 0

    return Move(
        pause=0 if dice.random() < hurry else dice.randint(0, dice.choice((200_000, 4 * SECOND))),
        before_wire=short(),
        before_answer=dice.choice((short(), dice.randint(0, 30 * SECOND))),
        network=dice.choice((0.0, 1.0, dice.random())),
        stamped=dice.random() < 0.6,
        cost=dice.randint(1, most_cost),
        before_told=dice.choice((None, short())),
    )


def play(limit: Limit, game: list[Move], lead: int = 0) -> list[Attempt]:
    """Release every call as soon as the limit admits it, or when the adversary lets the dispenser
    look; the attempts made.

    A bucket may put it off by a microsecond each time, until what it holds is known to be more than
    nothing: after an instant that came to nothing, the next look is a while later.
    """
    now, made = START, list[Attempt]()
    for move in game:
        now += move.pause
        for look in count():
            meter = limit.meter(usage_at(limit, made, now), now)
            instant = meter.free_at(move.cost)
            if instant is not None and instant <= now + lead:
                break
            news = [at for a in made for at in (a.answered, a.told) if at is not None and at > now]
            patience = PATIENCE << look if look else 0
            now = max(now + patience, instant - lead if instant is not None else min(news))
        made.append(attempt_of(limit, move, now, instant))
    return made


def attempt_of(limit: Limit, move: Move, now: int, instant: int) -> Attempt:
    sent = max(now, instant) + move.before_wire
    delay = limit.jitter_us if move.stamped and not limit.strict else move.before_answer
    wire = sent + int(move.network * delay)
    answered = max(wire, sent + move.before_answer)
    told = None if move.before_told is None else min(answered, sent + move.before_told)
    if not move.stamped:
        return Attempt(move.cost, now, instant, wire, None, answered)
    return Attempt(move.cost, now, instant, wire, sent, answered, told)


def usage_at(limit: Limit, made: list[Attempt], now: int) -> Usage:
    """The ledger as the app would read it at `now`."""
    since = limit.horizon(now)
    ages = [
        (limit.aged_from(a.sent, a.answered if a.answered <= now else None), a.cost)
        for a in made
        if a.knows(limit, now)
    ]
    aged = sorted(charge for charge in ages if charge[0] >= since)
    return Usage(sum(a.cost for a in made if not a.knows(limit, now)), aged, since)


RATES = "1/s", "3/s", "20/s", "5/2s", "7/m"
LEADS = 0, 50_000, 150_000


@pytest.mark.parametrize("most_cost", [1, 5])
def test_no_window_at_the_provider_ever_holds_more_than_a_sliding_window_allows(
    most_cost: int,
) -> None:
    for dice, game in games(60, 3000, most_cost):
        rate = dice.choice([one for one in RATES if int(one.partition("/")[0]) >= most_cost])
        limit = SlidingWindow(rate, strict=dice.random() < 0.5)
        made = sorted(play(limit, game, dice.choice(LEADS)), key=lambda one: one.wire)
        for place, first in enumerate(made):
            held = [one.cost for one in made[place:] if one.wire - first.wire <= limit.period_us]
            assert sum(held) <= limit.n


def test_a_bucket_at_the_provider_never_runs_dry() -> None:
    for dice, game in games(50, 2000):
        limit = TokenBucket(dice.choice(("10/s", "3/s", "50/m")), burst=dice.randint(1, 12))
        wires = sorted(one.wire for one in play(limit, game, dice.choice(LEADS)))
        level, at = float(limit.burst), wires[0]
        for wire in wires:
            level = min(limit.burst, level + (wire - at) * limit.n / limit.period_us) - 1
            at = wire
            assert level >= -1e-6


def test_no_calendar_window_holds_more_though_the_providers_clock_is_off_by_the_jitter() -> None:
    limit = FixedWindow("5/s")
    for dice, game in games(50, 1500):
        off = int(dice.choice((-1, 1, dice.uniform(-1, 1))) * limit.jitter_us)
        made = play(limit, game, dice.choice(LEADS))
        assert max(Counter((one.wire + off) // SECOND for one in made).values()) <= 5


def test_never_more_in_flight_than_concurrency_allows() -> None:
    """Whatever the ledger is told of before the answer."""
    for dice, game in games(50, 1500):
        limit = Concurrency(dice.randint(1, 6))
        made = play(limit, game)
        for one in made:
            assert sum(a.send_at <= one.send_at < a.answered for a in made) <= limit.n


def test_room_never_shrinks_as_time_goes_by() -> None:
    for dice, game in games(40, 1000):
        limit = SlidingWindow(dice.choice(RATES))
        made = play(limit, game)
        now = max(one.answered for one in made)
        later = now + dice.choice((0, dice.randint(0, 3 * SECOND)))
        first, second = (limit.meter(usage_at(limit, made, at), at) for at in (now, later))
        assert second.free >= first.free


def test_a_later_leave_never_makes_more_room() -> None:
    limits = SlidingWindow("5/2s"), TokenBucket("3/s", burst=4), FixedWindow("5/m", jitter=0.5)
    for seed in range(examples(200, 2000)):
        dice = random.Random(seed)
        limit, open_cost = dice.choice(limits), dice.randint(0, 2)
        ago = [dice.randint(0, 3 * SECOND) for _ in range(dice.randint(1, 12))]

        def opens(ages: list[int], limit: Limit = limit, open_cost: int = open_cost) -> list[float]:
            aged = sorted((START - age, 1) for age in ages)
            usage = Usage(open_cost, aged, limit.horizon(START), may_owe=True)
            meter = limit.meter(usage, START)
            found = [meter.free_at(cost) for cost in range(1, limit.capacity + 1)]
            return [float("inf") if instant is None else instant for instant in found]

        put_off = [max(0, ago[0] - dice.randint(0, 3 * SECOND)), *ago[1:]]
        assert all(then >= now for now, then in zip(opens(ago), opens(put_off), strict=True))


@pytest.mark.parametrize(
    ("limit", "answer_s", "share"),
    [
        (SlidingWindow("20/s", jitter=0.05), 0.2, 0.95),
        (SlidingWindow("20/s", jitter=0.01), 0.2, 0.985),
        # a fast answer says more than the jitter does
        (SlidingWindow("20/s"), 0.002, 0.995),
        (SlidingWindow("60/10s"), 0.2, 0.98),
        # however long an answer takes: what is told of leaves the whole of a limit to others
        (SlidingWindow("20/s"), 30, 0.94),
        (SlidingWindow("100/s"), 30, 0.94),
        (TokenBucket("20/s", burst=20), 30, 0.94),
        (TokenBucket("100/s", burst=20), 10, 0.94),
    ],
)
def test_with_a_backlog_the_whole_of_the_bound_is_used(
    limit: SlidingWindow | TokenBucket, answer_s: float, share: float
) -> None:
    answer = round(answer_s * SECOND)
    told = 200_000 if answer_s > 1 else None
    move = Move(0, 0, answer, 0.0, True, 1, told)
    made = play(limit, [move] * max(160, 4 * limit.n), lead=150_000)
    span = (made[-1].wire - made[0].wire) / limit.period_us
    assert (len(made) - limit.capacity) / span >= share * limit.n


@pytest.mark.parametrize(
    ("zone", "day", "begins", "hours"),
    [
        ("America/Los_Angeles", "2026-03-08", 0, 23),
        ("America/Los_Angeles", "2026-11-01", 0, 25),
        ("America/Los_Angeles", "2026-07-01", 0, 24),
        ("America/Havana", "2026-03-08", 1, 23),  # it has no midnight
        ("Antarctica/Troll", "2026-10-25", 0, 26),
    ],
)
def test_a_day_is_as_long_as_the_calendar_says(
    zone: str, day: str, begins: int, hours: int
) -> None:
    """Days follow each other without gap, and what counts in one, with a jitter at both ends, is
    within the window.
    """
    limit, local = FixedWindow("25000/d", timezone=zone, jitter=60), ZoneInfo(zone)
    noon = datetime.fromisoformat(f"{day}T12:00").replace(tzinfo=local)
    start, end = limit.window(int(noon.timestamp()) * SECOND)
    assert end - start == hours * 3600 * SECOND
    assert datetime.fromtimestamp(start / SECOND, local).hour == begins
    assert (limit.window(end)[0], limit.window(end - 1)) == (end, (start, end))
    last = end + limit.jitter_us - 1
    assert limit.horizon(last) == start - limit.jitter_us >= last - limit.window_us


@pytest.mark.parametrize("rate", ["9/2d", "9/w", "9/h", "9/6h", "9/7h", "9/s"])
def test_calendar_windows_follow_each_other_without_gap(rate: str) -> None:
    dice = random.Random(rate)
    for zone in ["America/Los_Angeles", "Asia/Kathmandu", "Africa/Cairo"] * examples(4, 40):
        limit = FixedWindow(rate, timezone=zone)
        at = dice.randrange(1_577_836_800, 2_051_222_400) * SECOND  # from 2020 to 2035
        start, end = limit.window(at)
        assert start <= at < end <= start + limit.period_us + 2 * 3600 * SECOND
        assert (limit.window(end)[0], limit.window(end - 1)) == (end, (start, end))


@pytest.mark.parametrize(("aged", "free"), [([1] * 20, 6), ([20], 0), ([20, 1, 1], 0)])
def test_a_bucket_is_emptied_once_by_what_a_clock_moved_to_one_instant(
    aged: list[int], free: int
) -> None:
    """A single charge that turned out dearer than the bucket is still owed."""
    limit, at = TokenBucket("1/s", burst=6), 1_000 * SECOND
    usage = Usage(0, [(at, cost) for cost in aged], at - limit.window_us, 0)
    assert limit.meter(usage, at).free == 0
    assert limit.meter(usage, at + 6 * SECOND).free == free
    owed = Usage(0, [(at, 10)] * 4, at - limit.window_us, 6 * limit.period_us, may_owe=True)
    assert limit.meter(owed, at).free_at(1) == at + (40 - 6 + 1) * SECOND


@pytest.mark.parametrize(
    ("limit", "jitter", "rate"),
    [
        (SlidingWindow("20/s"), 0.05, 20),
        (SlidingWindow("90/m"), 1.2, 1.5),
        (SlidingWindow("90/m", jitter=0.01), 0.01, 1.5),
        (TokenBucket("300/m", burst=9), 0.05, 5),
        (TokenBucket("6/m", burst=100), 20, 0.1),
        (FixedWindow("90/10s"), 0.2, 9),
        (FixedWindow("86400/d"), 60, 1),
        (Concurrency(3), 0.05, None),
    ],
    ids=repr,
)
def test_the_usual_jitter_is_a_share_of_the_window_and_what_passes_a_second_is_the_rate(
    limit: Limit, jitter: float, rate: float | None
) -> None:
    assert limit.jitter_us / SECOND == jitter
    assert limit.per_second == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    "limit",
    [
        SlidingWindow("9/s"),
        TokenBucket("9/s", burst=7),
        FixedWindow("9/s"),
        Concurrency(9),
    ],
)
def test_what_is_free_now_fits_now_and_not_one_more(limit: Limit) -> None:
    """Also of a bucket some of whose charges are known to leave later: it fills until then. What
    fits later fits at that very microsecond, and at none before.
    """
    rand, now = random.Random(3), 1_000_000 * SECOND
    for _ in range(100):
        instants = sorted(now + rand.randint(-2 * SECOND, SECOND // 4) for _ in range(6))
        aged = [(at, rand.randint(1, 2)) for at in instants]
        usage = Usage(rand.randint(0, 5), aged, now - limit.window_us, 0)
        meter = limit.meter(usage, now)
        assert not meter.free or meter.known_free_at(meter.free) == now
        assert meter.known_free_at(meter.free + 1) != now
        same = limit.meter_with(meter.free, now)
        assert (same.free, same.free_at(same.free + 1)) == (meter.free, None)
        assert not same.free or same.free_at(same.free) == now
        for cost in range(1, limit.capacity + 1):
            if (instant := meter.free_at(cost)) not in (None, now):
                frees = [limit.meter(usage, at).free for at in (instant - 1, instant)]
                assert frees[0] < cost <= frees[1]


@pytest.mark.parametrize("moved", [0, 7 * SECOND, -3601 * SECOND])
def test_a_call_near_an_edge_of_the_calendar_counts_on_both_sides(moved: int) -> None:
    """However far ledger time is behind the calendar; and with another rate."""
    limit = FixedWindow("5/m", jitter=0.1).moved_by(moved)
    edge, near = 1_800_000_000 * SECOND - moved, 100_000
    for same in (limit, limit.with_rate("5/m")):
        assert same.window(edge) == (edge, edge + 60 * SECOND)
        for at, now, free in [
            (edge - near - 1, edge + near - 1, 0),
            (edge - near - 1, edge + near, 5),
            (edge - near, edge + near, 0),
        ]:
            assert same.meter(Usage(aged=[(at, 5)]), now).free == free


# --- A kind that callqueue does not have


def test_a_new_kind_is_kept_at_the_provider() -> None:
    for dice, game in games(40, 1500):
        limit = Spaced(dice.choice(RATES), strict=dice.random() < 0.5)
        wires = sorted(one.wire for one in play(limit, game, dice.choice(LEADS)))
        assert all((then - before) * limit.n > limit.period_us for before, then in pairwise(wires))
        tally = new_use(limit)
        for wire in wires:
            tally.add(wire, 1)
        assert tally.highest == 1


@pytest.mark.parametrize(("n", "calls"), [(1, 1), (1, 40), (7, 7), (7, 200), (50, 400)])
def test_a_backlog_of_a_new_kind_drains_as_the_simulation_says(n: int, calls: int) -> None:
    limit = Spaced(f"{n}/s", jitter=0)
    book = book_of({"r": Rule(limits=[limit])})
    made = simulate(book, "r", calls, latency=0, delivery=0, notice=0)
    quick = limit.seconds_until_gone(limit.meter(Usage(), START), calls, START, 0)
    assert made.last_release == pytest.approx(quick, rel=0.01, abs=0.01)


# --- What passes remember of buckets


@pytest.mark.parametrize("ended", [9 * SECOND, 10 * SECOND, 10 * SECOND + 1])
def test_no_charge_is_lost_between_a_level_and_what_is_newer(ended: int) -> None:
    """Whether it ended before the level's instant, after it, or at it."""
    budget = book_of({"r": Rule(limits=[TokenBucket("1/s", burst=3)])}).budgets["r"][0]
    memo, now = Memo(), 11 * SECOND
    usage = Usage(aged=[(ended, 3)])
    usage_since_kept_level(memo, budget, "", usage, 10 * SECOND, now)
    later = usage_since_kept_level(memo, budget, "", usage, 0, now)
    assert later.since == 10 * SECOND
    assert budget.limit.meter(later, now).used == budget.limit.meter(usage, now).used


def test_a_level_is_of_its_own_bucket_and_of_no_other_time() -> None:
    limits, dearer = [TokenBucket("1/s", burst=3)], [TokenBucket("2/s", burst=3)]
    budgets = book_of({"r": Rule(limits=limits), "s": Rule(limits=limits)}).budgets
    memo, at, now = Memo(), 10 * SECOND, 11 * SECOND
    for rule in "rs":
        usage_since_kept_level(memo, budgets[rule][0], "", Usage(), at, now)
    own, (other,) = budgets["r"][0], book_of({"r": Rule(limits=dearer)}).budgets["r"]
    forget_other_levels(memo, {"r#0"})
    assert kept_level(memo, own, "", at, at)
    for budget, value, since, until in [
        (budgets["s"][0], "", at, now),
        (other, "", at, now),
        (own, "k", at, now),
        (own, "", at + 1, now),
        (own, "", at, at - 1),
    ]:
        assert kept_level(memo, budget, value, since, until) is None
