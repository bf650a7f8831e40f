"""Tallies: what budgets with long windows are charged with, kept as it changes instead of counted
anew at every pass.

A release adds its cost, under the lock of the budget's rules. An attempt that leaves the window
takes it away: each pass reads those that left since the last one. What turned out to cost something
else (voided, settled, redirected) says so by itself. Attempts stay the truth: where what is kept is
not known to be of the same budget, rules and clock, it is counted anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from callqueue import database, states, tables
from callqueue.database import as_parameter, from_us, instant_us, places, quoted, rows
from callqueue.limits.budgets import Book, Budget, Former, cost_of
from callqueue.limits.kinds import (
    SECOND,
    FixedWindow,
    Limit,
    Meter,
    SlidingWindow,
    TokenBucket,
    Usage,
)

COARSE = 2000  # a window per rule or queue that may hold more calls than this is tallied
SHORT = 5 * SECOND  # a window per key that is longer is tallied
SHORT_UNITS = (
    60 * SECOND
)  # one of other units than calls that is longer, and may hold more, is tallied
LATE = 5 * SECOND  # how much later than it ended an attempt may be seen to have ended
ROOMY = 1000  # as long as so much is free, nobody asks what has left
RECOUNT = (
    3600 * SECOND
    # a tally is counted anew this long after it was, or after an eighth of its window if that is
    # longer
)
CORRECTIONS = 1000  # corrections that one pass takes in
# while former rules' attempts count, a tally is counted anew so often in a window, and nothing
# taken away between
FORMER = 100
SLOTS = 240  # parts of a bucket's window that a recount tells apart

Scope = tuple[str, str]  # a budget's id, and the value of its `per` ("" for per="rule")


def is_tallied(limit: Limit) -> bool:
    """Whether the limit's window may hold so many attempts that they are not read at every pass."""
    if isinstance(limit, TokenBucket):
        return limit.is_keyed and limit.window_us > 60 * SECOND
    if not isinstance(limit, SlidingWindow | FixedWindow):
        return False
    if limit.is_keyed:
        return limit.period_us > SHORT
    return limit.n > COARSE and (limit.unit == "calls" or limit.period_us > SHORT_UNITS)


@dataclass
class Tally:
    """What is charged for one value; `full_at`: when the bucket would be full again, open charges
    apart (microseconds).
    """

    used: int = 0
    full_at: int = 0
    pk: int | None = None
    is_changed: bool = False


@dataclass
class Kept:
    """What the rules' locked row remembers of a budget's tallies.

    `print`: of what budget they are. `left`: the instant until whose end attempts have been taken
    away. `has_former`: whether attempts of former rules are among them. `values`: the tallies
    themselves, of a budget that is not per key.
    """

    print: str
    left: int
    counted: int
    has_former: bool = False
    values: dict[str, int] = field(default_factory=dict)


class Tallies:
    """The tallies of one budget at `now`. Only what was loaded or is not per key is known."""

    def __init__(
        self, using: str, budget: Budget, now: int, kept: Mapping[str, Any] | None, until: int
    ) -> None:
        self.using, self.budget, self.limit, self.now, self.until = (
            using,
            budget,
            budget.limit,
            now,
            until,
        )
        self.print = fingerprint(budget)
        self.by_value: dict[str, Tally] = {}
        self.near: dict[
            str, list[tuple[int, int]]
        ] = {}  # what leaves until `until`: (ended, cost), sorted
        self.freed: set[str] = set()  # values that have more room than before
        self.is_anew = False
        self._next_leave: int | None = None
        self._has_advanced = False
        self.kept = self._believed(kept)
        if self.kept is None:
            self.recount()
        elif not self.limit.is_keyed:
            self.by_value = {value: Tally(used) for value, used in self.kept.values.items()}

    def of(self, value: str) -> Tally:
        """The tally of a value."""
        return self.by_value.setdefault(value, Tally())

    def meter(self, value: str) -> Meter:
        """A meter over one tally; what it takes is charged to it."""
        if isinstance(self.limit, TokenBucket):
            return _BucketMeter(self, value)
        return _WindowMeter(self, value)

    def load(self, values: Iterable[str]) -> None:
        """Read the tallies of these values, of a budget per key."""
        wanted = [value for value in dict.fromkeys(values) if value not in self.by_value]
        if self.is_anew or not wanted:
            return
        for value in wanted:
            self.by_value[value] = Tally()
        for tally in _stored(self.using, self.budget, wanted):
            self.by_value[tally.value] = Tally(tally.used, tally.full_at, tally.pk)

    def advance(self) -> None:
        """Take away what has left since the last pass, and see what leaves next. One statement; the
        second time none.
        """
        if self._has_advanced or self.kept is None:
            return
        self._has_advanced = True
        if isinstance(self.limit, FixedWindow) or self.kept.has_former:
            # all of them leave at once, with the window; what former rules used is counted anew
            return
        begin, end = self.kept.left, self._horizon()
        ahead = end if isinstance(self.limit, TokenBucket) else end + self.until - self.now
        found = _left(self.using, self.budget, begin, end, ahead)
        self.load(value for value, _, _ in found)
        for value, ended, cost in found:
            if ended <= end:
                self._take_away(value, ended, cost)
            else:
                self.near.setdefault(value, []).append((ended, cost))
        for listed in self.near.values():
            listed.sort()
        if (
            found or end - begin > longest_gap(self.limit) // 2
        ):  # else nothing new is to be remembered
            self.kept.left = max(begin, end)

    def correct(self, value: str, less: int) -> None:
        """An attempt cost less than it was charged (or more, where that is negative)."""
        if less:
            self.load([value])
            self._change(value, -less)

    def next_leave(self) -> int:
        """The earliest instant past `until` at which more may leave than is known now."""
        if self._next_leave is None:
            self._next_leave = max(self.until + 1, self._find_next())
        return self._next_leave

    def recount(self) -> None:
        """Count the tallies anew from the attempts."""
        self.is_anew = self._has_advanced = True
        self.near, self.by_value = {}, {}
        horizon = self.limit.horizon(self.now) - 1
        self.kept = Kept(self.print, self._horizon(), self.now)
        if isinstance(self.limit, TokenBucket):
            self._recount_buckets(horizon)
            horizon = self.kept.left  # what ended before is in the level
        else:
            for value, cost in _charged(self.using, self.budget, horizon):
                self.of(value).used += cost
        if self.budget.former:
            self._count_former(horizon)

    def remembered(self) -> dict[str, Any]:
        """What the rules' row is to remember."""
        assert self.kept is not None
        values = (
            {}
            if self.limit.is_keyed
            else {value: tally.used for value, tally in self.by_value.items()}
        )
        counted = {
            "left": self.kept.left,
            "counted": self.kept.counted,
            "has_former": self.kept.has_former,
        }
        return {"print": self.print, **counted, "values": values}

    def save(self) -> None:
        """Write what changed, of a budget per key. At most three statements."""
        if not self.limit.is_keyed:
            return
        name, stored = _name(self.budget), tables.Tally.objects.using(self.using)
        if self.is_anew:
            stored.filter(budget=name).delete()
        idle = [
            t.pk
            for t in self.by_value.values()
            if t.pk and t.used == 0 and t.full_at <= self.now and not self.is_anew
        ]
        if idle:
            stored.filter(pk__in=idle).delete()
        changed = [t for t in self.by_value.values() if t.is_changed and t.pk and t.pk not in idle]
        database.update_each(
            tables.Tally,
            self.using,
            [{"pk": t.pk, "used": t.used, "full_at": t.full_at} for t in changed],
        )
        new = {
            v: t
            for v, t in self.by_value.items()
            if (t.used or t.full_at > self.now) and (self.is_anew or not t.pk)
        }
        stored.bulk_create(
            [
                tables.Tally(budget=name, value=v, used=t.used, full_at=t.full_at)
                for v, t in new.items()
            ]
        )

    def _believed(self, kept: Mapping[str, Any] | None) -> Kept | None:
        """What is kept, where it is of this very budget, not too old, and of this calendar
        window.
        """
        if kept is None or kept["print"] != self.print:
            return None
        known, horizon = Kept(**{**kept, "values": dict(kept["values"])}), self._horizon()
        good_for = (
            self.limit.window_us // FORMER
            if known.has_former
            else max(RECOUNT, self.limit.window_us // 8)
        )
        if not known.counted <= self.now <= known.counted + good_for:
            return None
        if isinstance(self.limit, FixedWindow):
            return known if known.left == horizon else None
        return (
            known if known.has_former or horizon - known.left <= longest_gap(self.limit) else None
        )

    def _horizon(self) -> int:
        """Until when attempts have left the window, or the bucket: those that ended by then."""
        return (
            self.now - LATE
            if isinstance(self.limit, TokenBucket)
            else self.limit.horizon(self.now) - 1
        )

    def _take_away(self, value: str, ended: int, cost: int) -> None:
        if isinstance(self.limit, TokenBucket):
            tally = self.of(value)
            tally.full_at = max(tally.full_at, ended) + time_to_fill(self.limit, cost)
        self._change(value, -cost)

    def _change(self, value: str, by: int) -> None:
        tally = self.of(value)
        tally.used, tally.is_changed = max(0, tally.used + by), True
        if by < 0:
            self.freed.add(value)

    def _count_former(self, horizon: int) -> None:
        """Add what former rules used. They are charged no more, so that it can only become less
        until it is counted anew.
        """
        assert self.kept is not None
        for value, cost in _charged_by_former(self.using, self.budget, horizon):
            self.of(value).used += cost
            self.kept.has_former = True

    def _recount_buckets(self, horizon: int) -> None:
        assert isinstance(self.limit, TokenBucket) and self.kept is not None
        limit, sealed = self.limit, self.kept.left
        empty_until = horizon + time_to_fill(limit, limit.burst)
        for value, ended, cost in _by_slots(self.using, self.budget, horizon, sealed):
            tally = self.of(value)
            tally.full_at = max(tally.full_at or empty_until, ended) + time_to_fill(limit, cost)
        for value, cost in _charged(self.using, self.budget, sealed):
            tally = self.of(value)
            tally.used, tally.full_at = tally.used + cost, tally.full_at or empty_until

    def _find_next(self) -> int:
        if self.kept is not None and self.kept.has_former:
            return self.kept.counted + self.limit.window_us // FORMER + 1
        if isinstance(self.limit, FixedWindow):
            return self.limit.window(self.now - round(self.limit.jitter * SECOND))[1] + round(
                self.limit.jitter * SECOND
            )
        if isinstance(self.limit, TokenBucket):
            return self.now + SECOND
        after = self._horizon() + self.until - self.now
        ended = _first_end(self.using, self.budget, after)
        return (self.now if ended is None else ended) + self.limit.window_us + 1


class _WindowMeter(Meter):
    """A tallied window. Asks what has left only when little is free."""

    def __init__(self, tallies: Tallies, value: str) -> None:
        self._tallies, self._value = tallies, value
        self._n, self._now = tallies.limit.capacity, tallies.now

    @property
    def used(self) -> int:  # type: ignore[override]
        if self._n - self._tallies.of(self._value).used < ROOMY:
            self._tallies.advance()
        return self._tallies.of(self._value).used

    @property
    def free(self) -> int:  # type: ignore[override]
        return max(0, self._n - self.used)

    def free_at(self, cost: int) -> int | None:
        instant = self.known_at(cost)
        return self._tallies.next_leave() if instant is None else instant

    def known_at(self, cost: int) -> int | None:
        """When the cost fits; None where all that is known is that it does not before more has
        left.
        """
        excess = self._tallies.of(self._value).used + cost - self._n
        if excess > 0:
            self._tallies.advance()
            excess = self._tallies.of(self._value).used + cost - self._n
        if excess <= 0:
            return self._now
        for ended, leaving in self._tallies.near.get(self._value, ()):
            excess -= leaving
            if excess <= 0:
                return max(self._now, ended + self._tallies.limit.window_us + 1)
        return None

    def take(self, cost: int) -> None:
        tally = self._tallies.of(self._value)
        tally.used, tally.is_changed = tally.used + cost, True


class _BucketMeter(Meter):
    """A tallied bucket: what ended less than LATE ago is taken to be leaving it now."""

    def __init__(self, tallies: Tallies, value: str) -> None:
        self._tallies, self._tally, limit = tallies, tallies.of(value), tallies.limit
        assert isinstance(limit, TokenBucket)
        level = limit.burst * limit.period_us - limit.n * max(0, self._tally.full_at - tallies.now)
        self._meter = limit.meter(Usage(self._tally.used, (), tallies.now, level), tallies.now)

    @property
    def used(self) -> int:  # type: ignore[override]
        return self._meter.used

    @property
    def free(self) -> int:  # type: ignore[override]
        return self._meter.free

    def free_at(self, cost: int) -> int | None:
        instant = self.known_at(cost)
        return self._tallies.next_leave() if instant is None else instant

    def known_at(self, cost: int) -> int | None:
        """When the cost fits; None where it waits for what is open."""
        return self._meter.free_at(cost)

    def take(self, cost: int) -> None:
        self._meter.take(cost)
        self._tally.used, self._tally.is_changed = self._tally.used + cost, True


def fingerprint(budget: Budget) -> str:
    """Of what budget a tally is: the limit as it is in force, and the rules that it counts."""
    text = repr((budget.limit, budget.rules, budget.former))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def time_to_fill(limit: TokenBucket, cost: int) -> int:
    """How long a bucket takes to get so many tokens, in whole microseconds, rounded up."""
    return -(-cost * limit.period_us // limit.n)


def tallied_rules(book: Book) -> frozenset[str]:
    """The rules that are in a tallied budget: what their attempts cost after all is to be told to
    the tallies.
    """
    return frozenset(
        rule for budget in book.all_budgets() if is_tallied(budget.limit) for rule in budget.rules
    )


def longest_gap(limit: Limit) -> int:
    """How long after it left an attempt may still be wanted, to be taken away; a tally that is
    further behind is counted anew.
    """
    return max(60 * SECOND, limit.window_us // 4)


def take_corrections(using: str, group: Sequence[str], tallies: Iterable[Tallies]) -> None:
    """Tell the tallies what attempts of these rules cost less than they were charged. One
    statement, and one if there are any.

    To be called after recounts: those count what is still to be corrected as it was charged.
    """
    table, key = _attempts_table(using), quoted(using, "key")
    found = rows(
        using,
        f"SELECT id, rule, {key}, queue, cost, charged, outcome FROM {table} "
        f"WHERE correction_pending AND rule IN ({places(group)}) ORDER BY id LIMIT {CORRECTIONS}{database.skip_locked(using)}",
        list(group),
    )
    if not found:
        return
    ids = database.listed(row[0] for row in found)
    database.run(
        using, f"UPDATE {table} SET correction_pending = FALSE, charged = NULL WHERE id IN ({ids})"
    )
    for one in tallies:
        for _, rule, text, queue, cost, charged, outcome in found:
            if rule in one.budget.rules:
                unit = one.limit.unit
                final = 0 if outcome == states.VOIDED else cost_of(database.loaded(cost), unit)
                one.correct(
                    one.budget.value_of(text, queue),
                    cost_of(database.loaded(charged), unit) - final,
                )


def _stored(using: str, budget: Budget, values: Sequence[str]) -> Iterable[Any]:
    return tables.Tally.objects.using(using).filter(budget=_name(budget), value__in=values)


def _name(budget: Budget) -> str:
    """The budget's id as a column holds it."""
    digest = hashlib.sha256(budget.id.encode()).hexdigest()[:16]
    return budget.id if len(budget.id) <= 120 else f"{budget.id[:120]}:{digest}"


def _left(
    using: str, budget: Budget, begin: int, end: int, ahead: int
) -> list[tuple[str, int, int]]:
    """What ended in (begin, ahead]: (value, ended, cost); what ended by `end` summed up, at its
    latest end.
    """
    key, what = quoted(using, "key"), _cost_sql(using, budget)
    names = _columns(using, budget)
    sql = (
        f"SELECT {names}, MAX(finished_at), SUM({what[0]}) FROM {_attempts_table(using)} "
        f"WHERE rule IN ({places(budget.rules)}) AND finished_at > %s AND finished_at <= %s AND outcome <> %s "
        f"GROUP BY {names}, CASE WHEN finished_at > %s THEN finished_at END"
    )
    instants = [as_parameter(using, from_us(instant)) for instant in (begin, ahead, end)]
    params = [*what[1], *budget.rules, *instants[:2], states.VOIDED, instants[2]]
    return [
        (budget.value_of(text, queue), instant_us(ended), int(cost or 0))
        for text, queue, ended, cost in _named(rows(using, sql, params), names, key)
    ]


def _charged(using: str, budget: Budget, horizon: int) -> Iterable[tuple[str, int]]:
    """What is open or ended after the horizon: (value, cost).

    What is to be corrected still costs what it was charged, since the correction comes after; ended
    before, the difference.
    """
    key, what, unit = quoted(using, "key"), _cost_sql(using, budget), budget.limit.unit
    of_corrected = [
        f"CASE WHEN correction_pending THEN {part} END"
        for part in ("cost", "outcome", "finished_at")
    ]
    sql = (
        f"SELECT {_columns(using, budget)}, charged, {', '.join(of_corrected)}, COUNT(*), SUM({what[0]}) "
        f"FROM {_attempts_table(using)} WHERE rule IN ({places(budget.rules)}) "
        "AND (finished_at IS NULL OR finished_at > %s OR correction_pending) AND (outcome <> %s OR correction_pending) "
        "GROUP BY 1, 2, 3, 4, 5"
    )
    params = [*what[1], *budget.rules, as_parameter(using, from_us(horizon)), states.VOIDED]
    for text, queue, charged, cost, outcome, ended, count, total in _named(
        rows(using, sql, params), _columns(using, budget), key
    ):
        used = int(total or 0)
        if ended is not None:
            used = cost_of(database.loaded(charged), unit) * int(count)
            if outcome != states.VOIDED and instant_us(ended) <= horizon:
                used -= cost_of(database.loaded(cost), unit) * int(count)
        yield budget.value_of(text, queue), used


def _charged_by_former(using: str, budget: Budget, horizon: int) -> Iterable[tuple[str, int]]:
    """What former rules' attempts cost that are open or ended after the horizon: (value, cost)."""
    key, what = quoted(using, "key"), _cost_sql(using, budget)
    names, formers = (
        _columns(using, budget),
        [former_sql(using, former) for former in budget.former],
    )
    sql = (
        f"SELECT {names}, SUM({what[0]}) FROM {_attempts_table(using)} WHERE ({' OR '.join(where for where, _ in formers)}) "
        f"AND (finished_at IS NULL OR finished_at > %s) AND outcome <> %s GROUP BY {names}"
    )
    params = [
        *what[1],
        *(one for _, some in formers for one in some),
        as_parameter(using, from_us(horizon)),
        states.VOIDED,
    ]
    for text, queue, cost in _named(rows(using, sql, params), names, key):
        yield budget.value_of(text, queue), int(cost or 0)


def former_sql(using: str, former: Former) -> tuple[str, list[Any]]:
    """The condition of attempts that a former rule released while it was charged, and its
    parameters.
    """
    rule, until = former
    if until is None:
        return "(rule = %s)", [rule]
    return "(rule = %s AND released_at <= %s)", [rule, as_parameter(using, from_us(until))]


def _by_slots(using: str, budget: Budget, begin: int, end: int) -> Iterable[tuple[str, int, int]]:
    """What ended in (begin, end], summed up by slots of the window at each one's latest end, oldest
    first.
    """
    key, what = quoted(using, "key"), _cost_sql(using, budget)
    names, width = _columns(using, budget), max(1, budget.limit.window_us // SLOTS)
    slot = database.slot_sql(using, "finished_at", begin, width)
    formers = [former_sql(using, former) for former in budget.former]
    of_rules = " OR ".join([f"rule IN ({places(budget.rules)})", *(where for where, _ in formers)])
    sql = (
        f"SELECT {names}, MAX(finished_at), SUM({what[0]}) FROM {_attempts_table(using)} "
        f"WHERE ({of_rules}) AND finished_at > %s AND finished_at <= %s AND outcome <> %s "
        f"GROUP BY {names}, {slot} ORDER BY 2"
    )
    instants = [as_parameter(using, from_us(instant)) for instant in (begin, end)]
    params = [
        *what[1],
        *budget.rules,
        *(one for _, some in formers for one in some),
        *instants,
        states.VOIDED,
    ]
    found = rows(using, sql, params)
    for text, queue, ended, cost in _named(found, names, key):
        yield budget.value_of(text, queue), instant_us(ended), int(cost or 0)


def _first_end(using: str, budget: Budget, after: int) -> int | None:
    """The first end of an attempt after this instant."""
    one = (
        f"SELECT MIN(finished_at) FROM {_attempts_table(using)} "
        f"WHERE rule = %s AND finished_at IS NOT NULL AND finished_at > %s AND outcome <> %s"
    )
    params = [
        p
        for rule in budget.rules
        for p in (rule, as_parameter(using, from_us(after)), states.VOIDED)
    ]
    found = [
        ended
        for (ended,) in rows(using, " UNION ALL ".join([one] * len(budget.rules)), params)
        if ended is not None
    ]
    return min(map(instant_us, found), default=None)


def _columns(using: str, budget: Budget) -> str:
    """The columns that tell the budget's values apart."""
    if budget.limit.per == "rule":
        return "rule"
    return "queue" if budget.limit.per == "queue" else quoted(using, "key")


def _named(found: Iterable[Sequence[Any]], names: str, key: str) -> Iterable[list[Any]]:
    """The rows with key and queue in front, whichever of the two was selected."""
    for first, *rest in found:
        yield [
            first if names.startswith(key) else "",
            first if names.startswith("queue") else "",
            *rest,
        ]


def _cost_sql(using: str, budget: Budget) -> tuple[str, list[Any]]:
    """What an attempt costs in the budget's unit, and the parameters of that."""
    if budget.limit.unit == "calls":
        return "calls", []
    return database.json_number_sql(using, "cost", budget.limit.unit)


def _attempts_table(using: str) -> str:
    return quoted(using, tables.CallAttempt._meta.db_table)
