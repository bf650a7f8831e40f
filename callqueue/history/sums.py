"""Sums: how many attempts ended, and how, by minutes, quarters of an hour, and since ever.

Added up by the database, a few seconds after the attempts ended. Minutes are kept for two hours,
quarters for a month, and those since ever only grow. A quarter is counted once more when all that
is recorded late is there. Whoever has the row of `Summed` adds up. Unix seconds; `until` in µs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from callqueue import conf, database, states, tables
from callqueue.clocks import Us
from callqueue.database import (
    as_parameter,
    from_us,
    micros_sql,
    part_sql,
    placeholders,
    rows,
)
from callqueue.ledger import ledger_time
from callqueue.limits.kinds import SECOND

MINUTE_S, QUARTER_S, HOUR_S, DAY_S = 60, 900, 3600, 86400
EVER = 0  # the width of a rule's row that sums up everything
LATE_S = 2  # after its end an attempt is added up: others that ended before may be recorded later
STEP_S = 300  # that one transaction adds up at most
SPENT_S = 0.25  # that bringing the sums up to now may take, but for the step that it is at
SETTLED_S = 3 * HOUR_S  # after its end a quarter of an hour is counted once more
# for how long each is kept
MINUTES_KEPT_S, QUARTERS_KEPT_S = 2 * HOUR_S, 32 * DAY_S
# upper bounds of the buckets of waits and answer times, in seconds; one more has what took longer
BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
FAILED = (states.ERRORED, states.GAVE_UP, states.LOST)


def new_buckets() -> list[int]:
    return [0] * (len(BOUNDS) + 1)


@dataclass
class Sums:
    """What attempts came to that may have reached the provider."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    throttled: int = 0
    lost: int = 0  # of those that failed, without an answer that is known
    # how many waited so long from when they were due, by bucket
    waits: list[int] = field(default_factory=new_buckets)
    # how many answers took so long, by bucket
    answers: list[int] = field(default_factory=new_buckets)

    def add(self, other: Sums) -> Self:
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for own, others in ((self.waits, other.waits), (self.answers, other.answers)):
            for place, count in enumerate(others):
                own[place] += count
        return self

    def beyond(self, other: Sums) -> Sums:
        """What these have that the other has not: no count is less than none."""
        lost, throttled = max(0, self.lost - other.lost), max(0, self.throttled - other.throttled)
        done, failed = max(0, self.done - other.done), max(lost, self.failed - other.failed)
        waits, answers = (
            [max(0, one - known) for one, known in zip(own, others, strict=True)]
            for own, others in ((self.waits, other.waits), (self.answers, other.answers))
        )
        return Sums(done + failed + throttled, done, failed, throttled, lost, waits, answers)

    def count(self, outcome: str, wait: int, answer: int, many: int) -> None:
        """Count so many attempts of one outcome and of these buckets (-1: not known)."""
        self.sent += many
        self.done += many if outcome == states.SUCCEEDED else 0
        self.failed += many if outcome in FAILED else 0
        self.throttled += many if outcome == states.THROTTLED else 0
        self.lost += many if outcome == states.LOST else 0
        if wait >= 0:
            self.waits[wait] += many
        if answer >= 0:
            self.answers[answer] += many


COUNTS = ("sent", "done", "failed", "throttled", "lost")
COLUMNS = (*COUNTS, "waits", "answers")
Stretches = dict[tuple[str, int, int], Sums]  # by rule, width and start


@dataclass
class Recent:
    quarter: Sums = field(default_factory=Sums)
    hour: Sums = field(default_factory=Sums)


def bound_of_share(buckets: Sequence[int], share: float) -> float | None:
    """Seconds (inf: longer) that such a share of what is counted took at most; None: nothing is."""
    wanted, seen = share * sum(buckets), 0
    for bound, count in zip((*BOUNDS, float("inf")), buckets, strict=True):
        seen += count
        if count and seen >= wanted:
            return bound
    return None


# --- adding up


def bring_up_to_date(using: str) -> None:
    """Bring the sums up to now. Takes a bounded time, and goes on at the next call."""
    late = time.monotonic() + SPENT_S
    while (add_up(using) or recount(using)) and time.monotonic() < late:
        pass


def add_up(using: str) -> bool:
    """Add what ended since the last time, unless somebody else is at it; whether there is more."""
    with database.writing(using):
        summed = _lock_progress(using)
        if summed is None:
            return False
        reading = ledger_time.read(using)
        last = reading.at - LATE_S * SECOND
        until = min(last, summed.until + STEP_S * SECOND)
        if until <= summed.until:
            return False
        minutes = _count_ended(using, summed.until, until, reading.moved)
        _add_to_stored(using, minutes | _widened(minutes, QUARTER_S) | _widened(minutes, EVER))
        summed.until = until
        summed.save(update_fields=["until"])
    return bool(until < last)


def recount(using: str) -> bool:
    """Count a quarter of an hour once more, if it is old enough, add what was recorded late, delete
    old sums; whether there may be more. Attempts that were deleted meanwhile stay counted.
    """
    with database.writing(using):
        summed = _lock_progress(using)
        if summed is None:
            return False
        reading = ledger_time.read(using)
        now = reading.at // SECOND
        start = -(-max(summed.settled, now - DAY_S) // QUARTER_S) * QUARTER_S
        end = start + QUARTER_S
        if end > now - SETTLED_S or end * SECOND > summed.until:
            return False
        before = _read_by_rule(tables.sums(using).filter(width=QUARTER_S, start=start))
        bounds = Us(start * SECOND - 1), Us(end * SECOND - 1)
        counted = _widened(_count_ended(using, *bounds, reading.moved), QUARTER_S)
        late = {scope: one.beyond(before.get(scope[0], Sums())) for scope, one in counted.items()}
        late = {scope: one for scope, one in late.items() if one != Sums()}
        _add_to_stored(using, late | _widened(late, EVER))
        summed.settled = end
        summed.save(update_fields=["settled"])
        _delete_old_sums(using, now)
    return True


def _delete_old_sums(using: str, now: int) -> None:
    for width, kept in ((MINUTE_S, MINUTES_KEPT_S), (QUARTER_S, QUARTERS_KEPT_S)):
        tables.sums(using).filter(width=width, start__lt=now - kept).delete()


def _lock_progress(using: str) -> Any:
    """The row, made if missing, that says how far sums are; None where somebody else has it."""
    row = database.locked(tables.summed(using).all()).first()
    if row is None and not tables.summed(using).exists():
        now = ledger_time.read(using).at
        quarter = now // SECOND // QUARTER_S * QUARTER_S
        first = tables.Summed(pk=1, until=now - HOUR_S * SECOND, settled=quarter - HOUR_S)
        tables.summed(using).bulk_create([first], ignore_conflicts=True)
        row = database.locked(tables.summed(using).all()).first()
    return row


def _count_ended(using: str, since: Us, until: Us, moved: int) -> Stretches:
    """What ended in (since, until] of the settings' rules, voided left out, by ledger minutes."""
    names = list(conf.current().rules)
    sent, ended = micros_sql(using, "a.sent_at"), micros_sql(using, "a.finished_at")
    due = f"({micros_sql(using, 'c.due_at_dt')} - {moved})"
    start = part_sql(using, "a.finished_at", 0, MINUTE_S * SECOND)
    each = (
        f"SELECT a.rule AS rule, {start} AS part, a.outcome AS outcome, "
        f"{_bucket_sql(f'{sent} - {due}')} AS waited, {_bucket_sql(f'{ended} - {sent}')} AS took "
        f"FROM {tables.name(using, 'CallAttempt')} a "
        f"LEFT JOIN {tables.name(using, 'CallQueue')} c "
        "ON c.id = a.call_id AND c.last_attempt = a.number "
        f"WHERE a.rule IN ({placeholders(names)}) "
        "AND a.finished_at > %s AND a.finished_at <= %s AND a.outcome <> %s"
    )
    sql = (
        f"SELECT rule, part, outcome, waited, took, COUNT(*) FROM ({each}) AS ended "
        "GROUP BY rule, part, outcome, waited, took"
    )
    bounds = [as_parameter(using, from_us(instant)) for instant in (since, until)]
    found: Stretches = {}
    for rule, part, outcome, waited, took, many in rows(
        using, sql, [*names, *bounds, states.VOIDED]
    ):
        one = found.setdefault((rule, MINUTE_S, int(part) * MINUTE_S), Sums())
        one.count(outcome, int(waited), int(took), int(many))
    return found


def _bucket_sql(length: str) -> str:
    """SQL for the place among BOUNDS of a length (in µs); -1: unknown, or sent before due anew."""
    cases = " ".join(
        f"WHEN {length} <= {round(bound * SECOND)} THEN {place}"
        for place, bound in enumerate(BOUNDS)
    )
    return f"CASE WHEN {length} IS NULL OR {length} < 0 THEN -1 {cases} ELSE {len(BOUNDS)} END"


def _add_to_stored(using: str, found: Stretches) -> None:
    if not found:
        return
    rules, widths, starts = map(set, zip(*found, strict=True))
    known = tables.sums(using).filter(rule__in=rules, width__in=widths, start__in=starts)
    changed, left = [], dict(found)
    for row in known:
        if one := left.pop((row.rule, row.width, row.start), None):
            changed.append({"pk": row.pk, **_columns_of(_sums_of_row(row).add(one))})
    database.update_each(tables.Sum, using, changed)
    new = [
        tables.Sum(rule=rule, width=width, start=start, **_columns_of(one))
        for (rule, width, start), one in left.items()
    ]
    tables.sums(using).bulk_create(new)


def _columns_of(one: Sums) -> dict[str, Any]:
    return {name: getattr(one, name) for name in COLUMNS}


def _sums_of_row(row: Any) -> Sums:
    return Sums(*(getattr(row, name) for name in COLUMNS))


def _widened(found: Stretches, width: int) -> Stretches:
    # added up by stretches of this width; EVER: by one of all time
    longer: Stretches = {}
    for (rule, _, start), one in found.items():
        at = start // width * width if width else 0
        longer.setdefault((rule, width, at), Sums()).add(one)
    return longer


def _read_by_rule(stored: Any) -> dict[str, Sums]:
    by_rule: dict[str, Sums] = {}
    for rule, *counts in stored.values_list("rule", *COLUMNS):
        by_rule.setdefault(rule, Sums()).add(Sums(*counts))
    return by_rule


# --- reading


def read_recent(using: str, rules: Iterable[str], now: int) -> dict[str, Recent]:
    """These rules' last quarter of an hour and hour, without buckets. `now`: ledger seconds."""
    found = {rule: Recent() for rule in rules}
    minute = now // MINUTE_S * MINUTE_S
    lately = (f"CASE WHEN start >= {minute - QUARTER_S} THEN {name} ELSE 0 END" for name in COUNTS)
    summed = ", ".join(f"SUM({one})" for one in (*COUNTS, *lately))
    sql = (
        f"SELECT rule, {summed} FROM {tables.name(using, 'Sum')} "
        f"WHERE width = {MINUTE_S} AND start BETWEEN {minute - HOUR_S} AND {now} GROUP BY rule"
    )
    for rule, *counts in rows(using, sql):
        if rule in found:
            hour, quarter = counts[: len(COUNTS)], counts[len(COUNTS) :]
            found[rule] = Recent(_sums_of_counts(quarter), _sums_of_counts(hour))
    return found


def _sums_of_counts(counts: Sequence[Any]) -> Sums:
    sent, done, failed, throttled, lost = map(int, counts)
    return Sums(sent, done, failed, throttled, lost)


def read_quarters(using: str, rule: str, start: int, end: int) -> list[tuple[int, Sums]]:
    """(start, sums) of a rule's quarters of an hour, empty too, from that of `start` to `end`."""
    first = start // QUARTER_S * QUARTER_S
    found = {at: Sums() for at in range(first, end, QUARTER_S)}
    quarters = tables.sums(using).filter(rule=rule, width=QUARTER_S)
    kept = quarters.filter(start__gte=first, start__lt=end)
    found |= {at: Sums(*counts) for at, *counts in kept.values_list("start", *COLUMNS)}
    return sorted(found.items())


def total(found: Iterable[Sums]) -> Sums:
    whole = Sums()
    for one in found:
        whole.add(one)
    return whole


def read_since_ever(using: str, rules: Sequence[str]) -> dict[str, Sums]:
    """What each of these rules came to since its first attempt: these only grow. One statement."""
    return {rule: Sums() for rule in rules} | _read_by_rule(
        tables.sums(using).filter(rule__in=rules, width=EVER)
    )
