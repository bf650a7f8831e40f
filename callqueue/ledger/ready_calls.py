"""The waiting set: which calls of a rule may go next, found without reading the backlog.

Calls go by priority, then by the time they were due. Where limits are per key, the keys of a
priority take turns: see key_turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from callqueue import database, states, tables

PROMOTED = 2000  # calls that one promotion makes ready at most
PRIORITIES = 16  # levels of priority that those who only look tell apart
TABLE = "callqueue_callqueue"
TOP = 40_000  # higher than any priority
WAITING = f"status IN ({database.listed(states.WAITING)})"
READY = f"ready AND {WAITING} AND rule = %s"


@dataclass(frozen=True)
class Asked:
    """What a permit wants besides what a call does. `owner`: who waits for it; `until`: the last
    instant (microseconds) at which it is to begin, None: any.

    `lease`: where this process itself waits for it, and begins it as soon as it is charged, for how
    many seconds.
    """

    owner: str
    label: str = ""
    until: int | None = None
    lease: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A call that might be released, or a permit: what was `asked`, and `id` is of its request.

    `queue`: by which it went before, if it did.
    """

    id: int
    rule: str
    key: str
    priority: int
    cost: Any
    method: str
    last_attempt: int
    queue: str = ""
    due_at: datetime | None = None
    asked: Asked | None = None

    @property
    def order(self) -> tuple[int, datetime]:
        """By this, lowest first, calls of a rule and permits go."""
        return -self.priority, self.due_at or database.EPOCH


def promote(using: str, limit: int = PROMOTED) -> int:
    """Make calls ready that are due: scheduled ones, retries, others' rows. The count."""
    rows = (
        tables.calls(using)
        .waiting()
        .filter(ready=False, due_at_dt__lte=database.ClockNow())
        .order_by("due_at_dt")
    )
    with database.writing(using):
        ids = list(database.locked(rows).values_list("pk", flat=True)[:limit])
        if ids:
            tables.calls(using).filter(pk__in=ids).update(ready=True)
    return len(ids)


def next_due_in(using: str, after: datetime | None = None) -> float:
    """Seconds until the next call that is not ready becomes due, by the database's clock; a day
    where there is none.

    `after`: what was due by then is left out. If a promotion since then has not made it ready,
    somebody has it locked.
    """
    rows = (
        tables.calls(using)
        .waiting()
        .filter(ready=False)
        .order_by("due_at_dt")
        .values_list("due_at_dt", flat=True)
    )
    rows = rows if after is None else rows.filter(due_at_dt__gt=after)
    due = next(iter(rows[:1]), None)
    return 86400.0 if due is None else (due - database.clock(using)).total_seconds()


def rules_with_ready(using: str, rules: Sequence[str]) -> set[str]:
    """Which of these rules have a call that is ready. One index look-up each, one statement."""
    if not rules:
        return set()
    dual = " FROM DUAL" if database.is_mysql(using) else ""
    table = tables.name(using, "CallQueue")
    one = f"SELECT %s{dual} WHERE EXISTS (SELECT 1 FROM {table} WHERE {READY})"
    sql = " UNION ALL ".join([one] * len(rules))
    return {row[0] for row in database.rows(using, sql, [rule for rule in rules for _ in range(2)])}


def rules_of_ready(using: str) -> list[str]:
    """The rules that ready calls name, whether the settings know them or not."""
    where = f"ready AND {WAITING}"
    found: list[str] = database.distinct_next(
        using, TABLE, "rule", where, [], after="", down=False, count=1000
    )
    return found


def of_rule_sql(rule: str) -> str:
    """The condition of the ready calls of the rule that an expression names."""
    return READY.replace("%s", rule)


def first(
    using: str, rule: str, now: datetime, count: int, least: int = -TOP, *, locks: bool = True
) -> list[Candidate]:
    """The next `count` calls of a rule, of priority `least` or higher, locked; calls that someone
    else has locked are passed over. Without `locks`, for who will not release them, all.
    """
    where, params = f"{READY} AND due_at_dt <= %s", [rule, database.as_parameter(using, now)]
    if least > -TOP:
        where, params = f"{where} AND priority >= %s", [*params, least]
    where += f" ORDER BY priority DESC, due_at_dt, id LIMIT {int(count)}"
    return _candidates(using, where, params, locks=locks)


def priorities(using: str, rule: str) -> list[int]:
    """The priorities that ready calls of the rule have, highest first."""
    found: list[int] = database.distinct_next(
        using, TABLE, "priority", READY, [rule], after=TOP, down=True, count=PRIORITIES
    )
    return found


def pairs(
    using: str, rule: str, after: tuple[int, str] | None, count: int
) -> list[tuple[int, str]]:
    """The next `count` pairs of priority and key past `after` that have ready calls: highest
    priority first, then by key.
    """
    return database.pairs_next(
        using, TABLE, "priority", "key", READY, [rule], after or (TOP, ""), count
    )


def sent_after(using: str, rule: str, pk: int, count: int) -> list[tuple[int, str]]:
    """The priorities and keys of ready calls sent after call `pk`; at most `count` pairs."""
    key, table = database.quoted(using, "key"), tables.name(using, "CallQueue")
    sent = f"FROM {table} WHERE id > %s AND {READY} LIMIT {int(count)}"
    sql = f"SELECT DISTINCT priority, {key} {sent}"
    return [(priority, text) for priority, text in database.rows(using, sql, [pk, rule])]


def newest(using: str) -> int:
    """The number of the call that was sent last."""
    return int(
        database.rows(using, f"SELECT MAX(id) FROM {tables.name(using, 'CallQueue')}")[0][0] or 0
    )


def without_ready(using: str, rule: str, wanted: Sequence[tuple[int, str]]) -> set[tuple[int, str]]:
    """Those of the pairs that have no ready call."""
    found = database.first_of_each(
        using, TABLE, ("priority", "key"), READY, [rule], "id", dict.fromkeys(wanted, 1)
    )
    return set(wanted) - {pair for pair, _ in found}


def first_of_pairs(
    using: str, rule: str, now: datetime, counts: dict[tuple[int, str], int]
) -> tuple[list[Candidate], set[tuple[int, str]]]:
    """The next calls of these keys, so many of each, locked: by priority, and there the keys' first
    before any key's second.

    And the keys that have no more ready calls than those.
    """
    where, params = f"{READY} AND due_at_dt <= %s", [rule, database.as_parameter(using, now)]
    wanted = {pair: count + 1 for pair, count in counts.items()}
    found = database.first_of_each(
        using, TABLE, ("priority", "key"), where, params, "due_at_dt, id", wanted
    )
    place: dict[int, tuple[int, int, int]] = {}
    seen = dict.fromkeys(counts, 0)
    order = {pair: i for i, pair in enumerate(counts)}
    for pair, pk in found:
        if seen[pair] < counts[pair]:
            place[pk] = (-pair[0], seen[pair], order[pair])
        seen[pair] += 1
    last = {pair for pair, count in seen.items() if count <= counts[pair]}
    if not place:
        return [], last
    candidates = _candidates(using, f"{WAITING} AND id IN ({database.listed(place)})", [])
    return sorted(candidates, key=lambda candidate: place[candidate.id]), last


def _candidates(
    using: str, where: str, params: list[Any], *, locks: bool = True
) -> list[Candidate]:
    columns = _columns(using)
    source = f"{tables.name(using, 'CallQueue')} c"
    locking = database.skip_locked(using) if locks else ""
    sql = f"SELECT {columns.sql} FROM {source} WHERE {where}{locking}"
    return [Candidate(*row) for row in columns.rows(sql, params)]


@lru_cache
def _columns(using: str) -> database.Columns:
    names = (
        "id",
        "rule",
        "key",
        "priority",
        "cost",
        "method",
        "last_attempt",
        "queue",
        "due_at_dt",
    )
    return database.Columns(using, {"c": (tables.CallQueue, names)})
