"""The waiting set: which calls of a rule may go next, found without reading the backlog.

Calls go by priority, then by the time they were due. Under limits per key, the keys of a priority take turns: `turns`
remembers after which key the last pass stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from callqueue import database, states

PRIORITIES = 16  # levels of priority looked at in one pass
READY = "ready AND status IN (0, 2) AND rule = %s"


@dataclass(frozen=True)
class Candidate:
    """A call that might be released. `queue`: by which it went before, if it did."""

    id: int
    rule: str
    key: str
    priority: int
    cost: Any
    method: str
    last_attempt: int
    queue: str = ""


def promote(using: str, limit: int = 2000) -> int:
    """Make calls ready that have become due: scheduled ones, retries, and rows that other code made. The count."""
    rows = _calls(using).waiting().filter(ready=False, due_at_dt__lte=database.ClockNow()).order_by("due_at_dt")
    with database.writing(using):
        ids = list(database.locked(rows).values_list("pk", flat=True)[:limit])
        if ids:
            _calls(using).filter(pk__in=ids, status__in=states.WAITING).update(ready=True)
    return len(ids)


def next_due_in(using: str) -> float:
    """Seconds until the next call that is not ready becomes due, by the database's clock; a day where there is none."""
    rows = _calls(using).waiting().filter(ready=False).order_by("due_at_dt").values_list("due_at_dt", flat=True)[:1]
    due = next(iter(rows), None)
    return 86400.0 if due is None else (due - database.clock(using)).total_seconds()


def rules_with_ready(using: str, rules: Sequence[str]) -> set[str]:
    """Which of these rules have a call that is ready. One index look-up each, one statement."""
    if not rules:
        return set()
    dual = " FROM DUAL" if database.is_mysql(using) else ""
    one = f"SELECT %s{dual} WHERE EXISTS (SELECT 1 FROM {database.quoted(using, _table())} WHERE {READY})"
    sql = " UNION ALL ".join([one] * len(rules))
    return {row[0] for row in database.rows(using, sql, [rule for rule in rules for _ in range(2)])}


def rules_of_ready(using: str) -> list[str]:
    """The rules that ready calls name, whether the settings know them or not."""
    where = "ready AND status IN (0, 2)"
    found: list[str] = database.distinct_next(using, _table(), "rule", where, [], after="", down=False, count=1000)
    return found


def first(using: str, rule: str, now: datetime, count: int) -> list[Candidate]:
    """The next `count` calls of a rule, locked; calls that someone else has locked are passed over."""
    where = f"{READY} AND due_at_dt <= %s ORDER BY priority DESC, due_at_dt, id LIMIT {int(count)}"
    return _candidates(using, where, [rule, database.as_parameter(using, now)])


def priorities(using: str, rule: str) -> list[int]:
    """The priorities that ready calls of the rule have, highest first."""
    found: list[int] = database.distinct_next(
        using, _table(), "priority", READY, [rule], after=40000, down=True, count=PRIORITIES
    )
    return found


def keys(using: str, rule: str, priority: int, after: str | None, count: int) -> list[str]:
    """The next `count` keys past `after`, in order, that have ready calls of this priority; None begins with the first."""
    where, params = f"{READY} AND priority = %s", [rule, priority]
    if after is None and (
        empty := list(
            _calls(using)
            .filter(rule=rule, priority=priority, key="", ready=True, status__in=states.WAITING)
            .values_list("key", flat=True)[:1]
        )
    ):
        return empty + database.distinct_next(using, _table(), "key", where, params, after="", down=False, count=count - 1)
    return database.distinct_next(using, _table(), "key", where, params, after=after or "", down=False, count=count)


def first_of_keys(using: str, rule: str, priority: int, now: datetime, counts: dict[str, int]) -> list[Candidate]:
    """The next calls of these keys, so many of each, locked; the keys' first calls before any key's second."""
    where = f"{READY} AND priority = %s AND due_at_dt <= %s"
    found = database.first_of_each(
        using, _table(), "key", where, [rule, priority, database.as_parameter(using, now)], "due_at_dt, id", counts
    )
    place: dict[int, tuple[int, int]] = {}
    seen: dict[str, int] = {}
    order = {key: i for i, key in enumerate(counts)}
    for key, pk in found:
        place[pk] = (seen.get(key, 0), order[key])
        seen[key] = seen.get(key, 0) + 1
    if not place:
        return []
    candidates = _candidates(using, f"status IN (0, 2) AND id IN ({database.listed(place)})", [])
    return sorted(candidates, key=lambda candidate: place[candidate.id])


def _candidates(using: str, where: str, params: list[Any]) -> list[Candidate]:
    columns = _columns(using)
    sql = f"SELECT {columns.sql} FROM {database.quoted(using, _table())} c WHERE {where}{database.skip_locked(using)}"
    return [Candidate(*row) for row in columns.rows(sql, params)]


@lru_cache
def _columns(using: str) -> database.Columns:
    from callqueue.models import CallQueue

    names = ("id", "rule", "key", "priority", "cost", "method", "last_attempt", "queue")
    return database.Columns(using, {"c": (CallQueue, names)})


def _calls(using: str) -> Any:
    from callqueue.models import CallQueue

    return CallQueue.objects.using(using)


def _table() -> str:
    from callqueue.models import CallQueue

    return CallQueue._meta.db_table
