"""The ledger rule against an adversary who chooses wire instants, answers, losses, restarts and
costs.

The adversary plays broker, workers, network and provider at once: every released attempt reaches
the wire whenever it likes until its answer, and the answer comes whenever it likes. The provider's
count is then judged by a check of its own, which shares no code with the limits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from callqueue.limits.kinds import (
    SECOND,
    Concurrency,
    FixedWindow,
    Limit,
    SlidingWindow,
    TokenBucket,
    Usage,
)
from tests.support.length import examples

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


def moves(most_cost: int) -> st.SearchStrategy[list[Move]]:
    short = st.one_of(st.just(0), st.integers(0, 3000), st.integers(0, 3 * SECOND))
    move = st.builds(
        Move,
        pause=st.one_of(st.just(0), st.integers(0, 200_000), st.integers(0, 4 * SECOND)),
        before_wire=short,
        before_answer=st.one_of(short, st.integers(0, 30 * SECOND)),
        network=st.floats(0, 1),
        stamped=st.booleans(),
        cost=st.integers(1, most_cost),
        before_told=st.one_of(st.none(), short),
    )
    return st.lists(move, min_size=1, max_size=60)


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
    jitter = limit.jitter_us
    sent = max(now, instant) + move.before_wire
    if move.stamped and not limit.strict:
        wire = sent + int(move.network * jitter)
        answered = max(wire, sent + move.before_answer)
        told = None if move.before_told is None else min(answered, sent + move.before_told)
        return Attempt(move.cost, now, instant, wire, sent, answered, told)
    answered = sent + move.before_answer
    return Attempt(
        move.cost, now, instant, sent + int(move.network * move.before_answer), None, answered
    )


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


RATES = st.sampled_from(["1/s", "3/s", "20/s", "5/2s", "7/m"])


@settings(max_examples=examples(300, 3000), deadline=None)
@given(rate=RATES, game=moves(1), lead=st.sampled_from([0, 50_000, 150_000]), strict=st.booleans())
def test_no_window_at_the_provider_ever_holds_more_than_a_sliding_window_allows(
    rate: str, game: list[Move], lead: int, strict: bool
) -> None:
    limit = SlidingWindow(rate, strict=strict)
    wires = sorted(a.wire for a in play(limit, game, lead))
    for i, first in enumerate(wires[: -limit.n]):
        assert wires[i + limit.n] - first > limit.period_us


@settings(max_examples=examples(150, 1500), deadline=None)
@given(game=moves(5), lead=st.sampled_from([0, 150_000]))
def test_weights_count_in_full(game: list[Move], lead: int) -> None:
    limit = SlidingWindow("7/s")
    made = sorted(play(limit, game, lead), key=lambda a: a.wire)
    for i, first in enumerate(made):
        in_window = [a.cost for a in made[i:] if a.wire - first.wire <= limit.period_us]
        assert sum(in_window) <= limit.n


@settings(max_examples=examples(200, 2000), deadline=None)
@given(
    rate=st.sampled_from(["10/s", "3/s", "50/m"]),
    burst=st.integers(1, 12),
    game=moves(1),
    lead=st.sampled_from([0, 150_000]),
)
def test_a_bucket_at_the_provider_never_runs_dry(
    rate: str, burst: int, game: list[Move], lead: int
) -> None:
    limit = TokenBucket(rate, burst=burst)
    wires = sorted(a.wire for a in play(limit, game, lead))
    level, at = float(burst), wires[0]
    for wire in wires:
        level = min(burst, level + (wire - at) * limit.n / limit.period_us) - 1
        at = wire
        assert level >= -1e-6


@settings(max_examples=examples(150, 1500), deadline=None)
@given(game=moves(1), lead=st.sampled_from([0, 150_000]), skew=st.floats(-1, 1))
def test_no_calendar_window_holds_more_though_the_providers_clock_is_off_by_the_jitter(
    game: list[Move], lead: int, skew: float
) -> None:
    limit = FixedWindow("5/s")
    off = int(skew * limit.jitter_us)
    counts: dict[int, int] = {}
    for attempt in play(limit, game, lead):
        window = (attempt.wire + off) // SECOND
        counts[window] = counts.get(window, 0) + 1
    assert max(counts.values()) <= 5


@pytest.mark.parametrize("off", [-0.05, 0.05], ids=["behind", "ahead"])
def test_calls_beside_the_edge_count_on_both_sides_of_it(off: float) -> None:
    limit = FixedWindow("5/s")
    edge = START + 10 * SECOND
    shifted = edge - int(off * SECOND)  # where the provider, whose clock is off, has its edge
    quick = [
        (edge - 40_000, 1),
        (edge - 10_000, 1),
        (edge + 10_000, 1),
    ]  # answered at once: the jitter does not cover them
    counted_after = [at for at, _ in quick if at >= shifted]
    now = edge + 60_000
    meter = limit.meter(
        Usage(aged=[c for c in quick if c[0] > limit.horizon(now)], since=limit.horizon(now)), now
    )
    assert meter.free + len(counted_after) <= limit.n


@settings(max_examples=examples(150, 1500), deadline=None)
@given(n=st.integers(1, 6), game=moves(1))
def test_never_more_in_flight_than_concurrency_allows(n: int, game: list[Move]) -> None:
    made = play(Concurrency(n), game)
    for attempt in made:
        assert sum(a.send_at <= attempt.send_at < a.answered for a in made) <= n


@settings(max_examples=examples(100, 1000), deadline=None)
@given(rate=RATES, game=moves(1), later=st.integers(0, 3 * SECOND))
def test_room_never_shrinks_as_time_goes_by(rate: str, game: list[Move], later: int) -> None:
    limit = SlidingWindow(rate)
    made = play(limit, game)
    now = max(a.answered for a in made)
    first = limit.meter(usage_at(limit, made, now), now)
    second = limit.meter(usage_at(limit, made, now + later), now + later)
    assert second.free >= first.free


@settings(max_examples=examples(200, 2000), deadline=None)
@given(
    limit=st.sampled_from(
        [SlidingWindow("5/2s"), TokenBucket("3/s", burst=4), FixedWindow("5/m", jitter=0.5)]
    ),
    ago=st.lists(st.integers(0, 3 * SECOND), min_size=1, max_size=12),
    later=st.integers(0, 3 * SECOND),
    open_cost=st.integers(0, 2),
)
def test_a_later_leave_never_makes_more_room(
    limit: Limit, ago: list[int], later: int, open_cost: int
) -> None:
    def opens(ages: list[int]) -> list[float]:
        aged = sorted((START - age, 1) for age in ages)
        usage = Usage(open_cost, aged, limit.horizon(START), may_owe=True)
        found = [limit.meter(usage, START).free_at(cost) for cost in range(1, limit.capacity + 1)]
        return [float("inf") if instant is None else instant for instant in found]

    put_off = [max(0, ago[0] - later), *ago[1:]]
    assert all(then >= now for now, then in zip(opens(ago), opens(put_off), strict=True))


@pytest.mark.parametrize(("jitter", "least"), [(0.05, 19.0), (0.01, 19.7)])
def test_with_a_backlog_the_whole_of_the_bound_is_used(jitter: float, least: float) -> None:
    limit = SlidingWindow("20/s", jitter=jitter)
    slow_api = [Move(0, 0, 200_000, 0.0, True, 1)] * 400
    made = play(limit, slow_api, lead=150_000)
    span = (made[-1].wire - made[0].wire) / SECOND
    assert (len(made) - 20) / span >= least


def test_a_fast_answer_says_more_than_the_jitter_does() -> None:
    made = play(SlidingWindow("20/s"), [Move(0, 0, 2000, 0.0, True, 1)] * 400, lead=150_000)
    span = (made[-1].wire - made[0].wire) / SECOND
    assert (len(made) - 20) / span >= 19.9


def test_long_windows_lose_nothing() -> None:
    made = play(SlidingWindow("60/10s"), [Move(0, 0, 200_000, 0.0, True, 1)] * 600, lead=150_000)
    span = (made[-1].wire - made[0].wire) / SECOND
    assert (len(made) - 60) / span >= 0.98 * 6


@pytest.mark.parametrize(
    ("day", "hours"),
    [("2026-03-08", 23), ("2026-11-01", 25), ("2026-07-01", 24)],
    ids=["spring", "autumn", "summer"],
)
def test_a_day_is_as_long_as_the_calendar_says(day: str, hours: int) -> None:
    zone = ZoneInfo("America/Los_Angeles")
    noon = datetime.fromisoformat(f"{day}T12:00").replace(tzinfo=zone)
    start, end = FixedWindow("25000/d", timezone="America/Los_Angeles").window(
        int(noon.timestamp()) * SECOND
    )
    assert end - start == hours * 3600 * SECOND
    assert datetime.fromtimestamp(start / SECOND, zone).hour == 0


@settings(max_examples=examples(100, 1000), deadline=None)
@given(
    instant=st.datetimes(datetime(2020, 1, 1), datetime(2035, 1, 1), timezones=st.just(UTC)),
    zone=st.sampled_from(
        ["America/Los_Angeles", "Asia/Kathmandu", "America/Havana", "Africa/Cairo", "UTC"]
    ),
    rate=st.sampled_from(["9/d", "9/2d", "9/w", "9/h", "9/6h", "9/7h", "9/s"]),
)
def test_calendar_windows_follow_each_other_without_gap(
    instant: datetime, zone: str, rate: str
) -> None:
    limit = FixedWindow(rate, timezone=zone)
    at = int(instant.timestamp()) * SECOND
    start, end = limit.window(at)
    assert start <= at < end
    assert limit.window(end)[0] == end
    assert limit.window(end - 1) == (start, end)
    assert end - start <= limit.period_us + 2 * 3600 * SECOND


def test_havana_has_days_without_a_midnight() -> None:
    limit = FixedWindow("9/d", timezone="America/Havana")
    zone = ZoneInfo("America/Havana")
    starts = [
        limit.window(
            int((datetime(2026, 3, 7, 12, tzinfo=zone) + timedelta(days=d)).timestamp()) * SECOND
        )
        for d in range(3)
    ]
    assert all(first[1] == second[0] for first, second in pairwise(starts))


@pytest.mark.parametrize(("aged", "free"), [([1] * 20, 6), ([20], 0), ([20, 1, 1], 0)])
def test_a_bucket_is_emptied_once_by_what_a_clock_moved_to_one_instant(
    aged: list[int], free: int
) -> None:
    """A single charge that turned out dearer than the bucket is still owed."""
    limit, at = TokenBucket("1/s", burst=6), 1_000 * SECOND
    usage = Usage(0, [(at, cost) for cost in aged], at - limit.window_us, 0)
    assert limit.meter(usage, at).free == 0
    assert limit.meter(usage, at + 6 * SECOND).free == free


def test_a_bucket_owes_all_that_turned_out_dearer_whatever_a_clock_moved_to_one_instant() -> None:
    limit, at = TokenBucket("1/s", burst=6), 1_000 * SECOND
    usage = Usage(0, [(at, 10)] * 4, at - limit.window_us, 6 * limit.period_us, may_owe=True)
    assert limit.meter(usage, at).free_at(1) == at + (40 - 6 + 1) * SECOND


@pytest.mark.parametrize("rate", ["20/s", "100/s"])
@pytest.mark.parametrize("seconds", [0.2, 2, 10, 30])
def test_what_is_told_of_leaves_the_whole_of_a_limit_to_others(rate: str, seconds: float) -> None:
    """However long the answers take, a window gives its number in each second, and a bucket too."""
    slow = Move(0, 0, round(seconds * SECOND), 0.0, True, 1, before_told=200_000)
    for limit in SlidingWindow(rate), TokenBucket(rate, burst=20):
        made = play(limit, [slow] * 600, lead=150_000)
        span = (made[-1].wire - made[0].wire) / SECOND
        assert (len(made) - 20) / span >= 0.94 * limit.n


@pytest.mark.parametrize("limit", [SlidingWindow("20/s", strict=True), Concurrency(20)])
def test_what_is_told_of_stays_charged_where_only_the_answer_counts(limit: Limit) -> None:
    slow = Move(0, 0, 2 * SECOND, 0.0, True, 1, before_told=200_000)
    made = play(limit, [slow] * 60)
    for attempt in made:
        in_flight = [a for a in made if a.send_at <= attempt.send_at < a.answered]
        assert len(in_flight) <= 20


def test_the_usual_jitter_is_a_share_of_the_window() -> None:
    limits = [
        SlidingWindow("20/s"),
        SlidingWindow("500/m"),
        SlidingWindow("9/d"),
        TokenBucket("500/m", burst=9),
        TokenBucket("6/m", burst=100),
        FixedWindow("9/10s"),
        FixedWindow("9/d"),
        Concurrency(3),
        SlidingWindow("500/m", jitter=0.01),
    ]
    seconds = [limit.jitter_us / SECOND for limit in limits]
    assert seconds == [0.05, 1.2, 1728, 0.05, 20, 0.2, 60, 0.05, 0.01]


@pytest.mark.parametrize("seconds", [0.2, 30])
def test_two_per_cent_of_a_day_cost_a_day_no_more_than_the_answers_take(seconds: float) -> None:
    limit = SlidingWindow("3/d")
    answered = START + round(seconds * SECOND)
    made = [Attempt(1, START, START, START, START, answered, START + 200_000)] * 3
    later = answered + SECOND
    free_at = limit.meter(usage_at(limit, made, later), later).free_at(1)
    assert free_at == answered + limit.period_us + 1


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
    """Also of a bucket some of whose charges are known to leave later: it fills until then."""
    rand, now = random.Random(3), 1_000_000 * SECOND
    for _ in range(300):
        instants = sorted(now + rand.randint(-2 * SECOND, SECOND // 4) for _ in range(6))
        aged = [(at, rand.randint(1, 2)) for at in instants]
        usage = Usage(rand.randint(0, 5), aged, now - limit.window_us, 0)
        meter = limit.meter(usage, now)
        assert not meter.free or meter.known_at(meter.free) == now
        assert meter.known_at(meter.free + 1) != now
        same = limit.meter_with(meter.free, now)
        assert (same.free, same.free_at(same.free + 1)) == (meter.free, None)
        assert not same.free or same.free_at(same.free) == now
