"""What waits of each rule, and how many come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from callqueue import tables
from callqueue.clocks import Us
from callqueue.database import (
    as_parameter,
    from_us,
    instant_us,
    part_sql,
    placeholders,
    rows,
)
from callqueue.ledger.ready_calls import WAITING
from callqueue.limits.kinds import SECOND

LATER = 10_000  # calls due later that are read, of all rules together; more are counted by rule
NEWEST = 5_000  # calls that are looked at for how many come in
RECENT_S = 60  # over which that is taken
PARTS = 6  # of that time; one of them that is full of calls says nothing of the others


@dataclass
class Waiting:
    """Calls of a rule that wait."""

    ready: int = 0  # for nothing but their turn
    later: int = 0  # until they are due
    oldest_due: Us | None = None  # of the ready ones, in wall time

    @property
    def calls(self) -> int:
        return self.ready + self.later


def read(
    using: str, names: Sequence[str], now: Us, moved: int
) -> tuple[dict[str, Waiting], Mapping[str, float]]:
    """What waits of each of these rules; calls a second, over a minute, of all that had any."""
    found = {name: Waiting() for name in names}
    created: list[tuple[str, int, int, int]] = []
    later = 0
    for kind, rule, calls, part, first in rows(using, *_counts_sql(using, names, now, moved)):
        if kind == _CREATED:
            created.append((rule, int(calls), int(part), instant_us(first)))
            continue
        later += calls if kind == _LATER else 0
        one = found.get(rule)
        if one is None:
            continue
        if kind == _LATER:
            one.later = int(calls)
        else:
            one.ready, one.oldest_due = int(calls), instant_us(first)
    if later > LATER:
        for rule, waiting in _count_waiting(using, names):
            found[rule].later = max(0, waiting - found[rule].ready)
    return found, _incoming_rates(created, now + moved)


_LATER, _READY, _CREATED = range(3)


def _counts_sql(using: str, names: Sequence[str], now: Us, moved: int) -> tuple[str, Sequence[Any]]:
    """Its rows: _LATER or _READY, a rule, so many calls, 0, when the oldest was due; and _CREATED,
    a rule, so many of the newest calls, in which part of the last minute, when the first came in.
    """
    table = tables.name(using, "CallQueue")
    later = (
        f"SELECT rule, due_at_dt FROM {table} WHERE {WAITING} AND NOT ready "
        f"ORDER BY due_at_dt LIMIT {LATER + 1}"
    )
    parts = [
        f"SELECT {_LATER}, rule, COUNT(*), 0, MIN(due_at_dt) FROM ({later}) AS later GROUP BY rule",
    ]
    parts.append(
        f"SELECT {_READY}, rule, COUNT(*), 0, MIN(due_at_dt) FROM {table} "
        f"WHERE {WAITING} AND ready AND rule IN ({placeholders(names)}) GROUP BY rule"
    )
    since = now + moved - RECENT_S * SECOND
    part = part_sql(using, "created_dt", since, RECENT_S * SECOND // PARTS)
    newest = f"SELECT rule, created_dt FROM {table} ORDER BY id DESC LIMIT {NEWEST}"
    parts.append(
        f"SELECT {_CREATED}, rule, COUNT(*), {part}, MIN(created_dt) FROM ({newest}) AS newest "
        f"WHERE created_dt > %s GROUP BY rule, {part}"
    )
    return " UNION ALL ".join(parts), [*names, as_parameter(using, from_us(since))]


def _count_waiting(using: str, names: Sequence[str]) -> list[tuple[str, int]]:
    sql = (
        f"SELECT rule, COUNT(*) FROM {tables.name(using, 'CallQueue')} "
        f"WHERE {WAITING} AND rule IN ({placeholders(names)}) GROUP BY rule"
    )
    return [(rule, int(count)) for rule, count in rows(using, sql, list(names))]


def _incoming_rates(created: Sequence[tuple[str, int, int, int]], wall: Us) -> Mapping[str, float]:
    # each of `created`: rule, how many, in which part, since when
    first, width = 0, RECENT_S * SECOND // PARTS  # the first part that was read whole
    if sum(count for _, count, _, _ in created) >= NEWEST:
        first = PARTS - max(1, (wall - min(us for *_, us in created)) // width)
    parts: dict[str, list[int]] = {}
    for rule, count, place, _ in created:
        if first <= (at := min(PARTS - 1, place)):
            parts.setdefault(rule, [0] * (PARTS - first))[at - first] += count
    return {
        rule: min(mean(counts), 3 * median(counts)) * PARTS / RECENT_S
        for rule, counts in parts.items()
    }
