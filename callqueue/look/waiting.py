"""What waits of each rule, how it is spread over keys, and how many come in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
    quoted,
    rows,
)
from callqueue.ledger.ready_calls import WAITING
from callqueue.limits.kinds import SECOND

LATER = 10_000  # calls that are due later, of all rules together; of more, an index by rule tells
NEWEST = 5_000  # calls that are looked at for how many come in
RECENT_S = 60  # over which that is taken
PARTS = 6  # of that time; one of them that is full of calls says nothing of the others


@dataclass
class Waiting:
    """Calls of a rule that wait."""

    ready: int = 0  # for nothing but their turn
    later: int = 0  # until they are due
    # with a limit per key: (calls ready, keys that have so many)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    oldest_due: Us | None = None  # microseconds

    @property
    def calls(self) -> int:
        return self.ready + self.later


def read(
    using: str, names: Sequence[str], keyed: Collection[str], now: Us, moved: int
) -> tuple[dict[str, Waiting], Mapping[str, float]]:
    """What waits of each of these rules; of `keyed` ones also how it is spread over keys, which
    takes thrice as long to count. And by rule, calls that come in each second, over the last minute
    before now: a burst that is over is none.
    """
    found = {name: Waiting() for name in names}
    created: list[tuple[str, int, int, int]] = []
    later = 0
    for kind, rule, calls, keys, first in rows(
        using, *_counts_sql(using, names, keyed, now, moved)
    ):
        if kind == _CREATED:
            created.append((rule, int(calls), int(keys), instant_us(first)))
            continue
        later += calls if kind == _LATER else 0
        one = found.get(rule)
        if one is None:
            continue
        if kind == _LATER:
            one.later = int(calls)
            continue
        due = instant_us(first)
        one.ready += int(calls) * int(keys)
        one.oldest_due = min(one.oldest_due or due, due)
        if rule in keyed:
            one.sizes.append((int(calls), int(keys)))
    if later > LATER:
        for rule, waiting in _all(using, names):
            found[rule].later = max(0, waiting - found[rule].ready)
    return found, _incoming(created, now + moved)


_LATER, _READY, _CREATED = range(3)


def _counts_sql(
    using: str, names: Sequence[str], keyed: Collection[str], now: Us, moved: int
) -> tuple[str, Sequence[Any]]:
    """Its rows: what waits, a rule, so many calls, of how many keys each, and when the oldest was
    due; of the newest calls, in which part of the last minute so many came in, and when the first
    did.
    """
    table, key = tables.name(using, "CallQueue"), quoted(using, "key")
    later = (
        f"SELECT rule, due_at_dt FROM {table} WHERE {WAITING} AND NOT ready "
        f"ORDER BY due_at_dt LIMIT {LATER + 1}"
    )
    parts = [
        f"SELECT {_LATER}, rule, COUNT(*), 1, MIN(due_at_dt) FROM ({later}) AS later GROUP BY rule",
    ]
    by_key, plain = [n for n in names if n in keyed], [n for n in names if n not in keyed]
    ready = f"FROM {table} WHERE {WAITING} AND ready AND rule IN"
    if plain:
        parts.append(
            f"SELECT {_READY}, rule, COUNT(*), 1, MIN(due_at_dt) {ready} ({placeholders(plain)}) "
            "GROUP BY rule"
        )
    if by_key:
        of_keys = (
            f"SELECT rule, {key}, COUNT(*) AS calls, MIN(due_at_dt) AS first_due "
            f"{ready} ({placeholders(by_key)}) GROUP BY rule, {key}"
        )
        parts.append(
            f"SELECT {_READY}, rule, calls, COUNT(*), MIN(first_due) "
            f"FROM ({of_keys}) AS of_keys GROUP BY rule, calls"
        )
    since = now + moved - RECENT_S * SECOND
    part = part_sql(using, "created_dt", since, RECENT_S * SECOND // PARTS)
    newest = f"SELECT rule, created_dt FROM {table} ORDER BY id DESC LIMIT {NEWEST}"
    parts.append(
        f"SELECT {_CREATED}, rule, COUNT(*), {part}, MIN(created_dt) FROM ({newest}) AS newest "
        f"WHERE created_dt > %s GROUP BY rule, {part}"
    )
    return " UNION ALL ".join(parts), [*plain, *by_key, as_parameter(using, from_us(since))]


def _all(using: str, names: Sequence[str]) -> list[tuple[str, int]]:
    sql = (
        f"SELECT rule, COUNT(*) FROM {tables.name(using, 'CallQueue')} "
        f"WHERE {WAITING} AND rule IN ({placeholders(names)}) GROUP BY rule"
    )
    return [(rule, int(count)) for rule, count in rows(using, sql, list(names))]


def _incoming(created: Sequence[tuple[str, int, int, int]], now: Us) -> Mapping[str, float]:
    # each of `created`: rule, how many, in which part, since when
    first, width = 0, RECENT_S * SECOND // PARTS  # the first part that was read whole
    if sum(count for _, count, _, _ in created) >= NEWEST:
        first = PARTS - max(1, (now - min(us for *_, us in created)) // width)
    parts: dict[str, list[int]] = {}
    for rule, count, place, _ in created:
        if first <= (at := min(PARTS - 1, place)):
            parts.setdefault(rule, [0] * (PARTS - first))[at - first] += count
    return {
        rule: min(mean(counts), 3 * median(counts)) * PARTS / RECENT_S
        for rule, counts in parts.items()
    }
