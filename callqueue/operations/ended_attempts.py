"""The attempts that ended in a stretch of time, for what is counted once as they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from callqueue import states, tables
from callqueue.database import (
    as_parameter,
    from_us,
    instant_us,
    listed,
    loaded,
    micros_sql,
    places,
    quoted,
    rows,
)
from callqueue.operations.backlog import each

FAILED = (states.ERRORED, states.GAVE_UP, states.LOST)


class Ended(NamedTuple):
    """An attempt that has ended; instants in microseconds. `due`: when its call was due, where the
    call still says.
    """

    pk: int
    rule: str
    key: str
    queue: str
    cost: Any
    released: int
    began: int
    sent: int | None
    finished: int
    outcome: str
    due: int | None

    @property
    def is_charged(self) -> bool:
        """Whether it may have reached the wire."""
        return self.outcome != states.VOIDED


def ended(using: str, rules: Sequence[str], since: int, until: int) -> list[Ended]:
    """The attempts of these rules that ended in [since, until), in the order of their ends. One
    statement.
    """
    if not rules:
        return []
    where = f"a.rule IN ({places(rules)}) AND a.finished_at >= %s AND a.finished_at < %s"
    bounds = [as_parameter(using, from_us(instant)) for instant in (since, until)]
    return sorted(_read(using, where, [*rules, *bounds]), key=_end)


def ended_of(using: str, pks: Sequence[int], until: int) -> list[Ended]:
    """Those of these attempts that ended before `until`. One statement, if any are asked for."""
    if not pks:
        return []
    where = f"a.id IN ({listed(pks)}) AND a.finished_at < %s"
    return sorted(_read(using, where, [as_parameter(using, from_us(until))]), key=_end)


def under_way(using: str, until: int) -> dict[int, int]:
    """The open attempts that were released before `until`: by primary key, when. One statement."""
    sql = (
        f"SELECT id, {micros_sql(using, 'released_at')} FROM {tables.name(using, 'CallAttempt')} "
        "WHERE finished_at IS NULL AND released_at < %s"
    )
    return dict(rows(using, sql, [as_parameter(using, from_us(until))]))


def first_begun(using: str, rules: Sequence[str], since: int) -> int | None:
    """When the first of those was begun that ended since; None where none did. One statement."""
    if not rules:
        return None
    sql = (
        f"SELECT MIN(COALESCE(started_at, released_at)) FROM {tables.name(using, 'CallAttempt')} "
        f"WHERE rule IN ({places(rules)}) AND finished_at >= %s"
    )
    ((first,),) = rows(using, sql, [*rules, as_parameter(using, from_us(since))])
    return None if first is None else instant_us(first)


def next_end(using: str, rules: Sequence[str], since: int) -> int | None:
    """When the first attempt ended from `since` on; None where none did."""
    sql = (
        f"SELECT %s, MIN(finished_at) FROM {tables.name(using, 'CallAttempt')} "
        "WHERE rule = %s AND finished_at >= %s"
    )
    at = as_parameter(using, from_us(since))
    found = each(using, sql, [(rule, rule, at) for rule in rules])
    return min((instant_us(first) for _, first in found if first is not None), default=None)


def _end(one: Ended) -> tuple[int, int]:
    return one.finished, one.pk


def _read(using: str, where: str, params: Sequence[Any]) -> list[Ended]:
    columns = ["a.id", "a.rule", f"a.{quoted(using, 'key')}", "a.queue", "a.cost"]
    columns += [
        micros_sql(using, instant)
        for instant in (
            "a.released_at",
            "COALESCE(a.started_at, a.released_at)",
            "a.sent_at",
            "a.finished_at",
        )
    ]
    columns += ["a.outcome", micros_sql(using, "c.due_at_dt")]
    sql = (
        f"SELECT {', '.join(columns)} FROM {tables.name(using, 'CallAttempt')} a "
        f"LEFT JOIN {tables.name(using, 'CallQueue')} c "
        f"ON c.id = a.call_id AND c.last_attempt = a.number WHERE {where}"
    )
    found = (Ended._make(row) for row in rows(using, sql, params))
    return [one._replace(cost=loaded(one.cost)) for one in found]
