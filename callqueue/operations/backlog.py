"""The backlog: how many calls wait, of every rule, and how they are spread over its keys. Exact.

In: a database alias, the rules' names. Out: a Backlog for each. One statement for all rules, or
two where much is due later; they read an index entry for each call that waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from callqueue import tables
from callqueue.database import instant_us, places, quoted, rows
from callqueue.ledger.ready_calls import WAITING
from callqueue.limits.budgets import key_part

CAP = 10_000  # calls that are due later, of all rules together; of more, an index by rule tells
CHUNK = 250  # SELECTs that one statement joins


@dataclass
class Backlog:
    """Calls of a rule that wait. `ready`: for nothing but their turn; `later`: those that are due
    later. `sizes`: of a rule with a limit per key, how many keys have so many calls ready, by pairs
    (calls, keys). `oldest_due`: in microseconds.
    """

    ready: int = 0
    later: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)
    oldest_due: int | None = None

    @property
    def waiting(self) -> int:
        """All calls that wait."""
        return self.ready + self.later


def backlogs(using: str, names: Sequence[str], keyed: Collection[str]) -> dict[str, Backlog]:
    """The backlog of each of these rules; of `keyed` ones also how it is spread over keys, which
    takes thrice as long to count.
    """
    found = {name: Backlog() for name in names}
    counted = 0
    for is_ready, rule, calls, keys, first in rows(using, *_counts_sql(using, names, keyed)):
        counted += 0 if is_ready else calls
        one, due = found.get(rule), instant_us(first)
        if one is None:
            continue
        if not is_ready:
            one.later = int(calls)
            continue
        one.ready += int(calls) * int(keys)
        one.oldest_due = min(one.oldest_due or due, due)
        if rule in keyed:
            one.sizes.append((int(calls), int(keys)))
    if counted > CAP:
        for rule, waiting in _waiting(using, names):
            found[rule].later = max(0, waiting - found[rule].ready)
    return found


def _counts_sql(
    using: str, names: Sequence[str], keyed: Collection[str]
) -> tuple[str, Sequence[str]]:
    """The statement and its parameters. Its rows: whether the calls are ready, a rule, so many
    calls, of how many keys each, and when the oldest was due.
    """
    table, key = tables.name(using, "CallQueue"), quoted(using, "key")
    later = (
        f"SELECT rule, due_at_dt FROM {table} WHERE {WAITING} AND NOT ready "
        f"ORDER BY due_at_dt LIMIT {CAP + 1}"
    )
    parts = [f"SELECT 0, rule, COUNT(*), 1, MIN(due_at_dt) FROM ({later}) AS later GROUP BY rule"]
    by_key, plain = [n for n in names if n in keyed], [n for n in names if n not in keyed]
    ready = f"FROM {table} WHERE {WAITING} AND ready AND rule IN"
    if plain:
        parts.append(
            f"SELECT 1, rule, COUNT(*), 1, MIN(due_at_dt) {ready} ({places(plain)}) GROUP BY rule"
        )
    if by_key:
        of_keys = (
            f"SELECT rule, {key}, COUNT(*) AS calls, MIN(due_at_dt) AS first_due "
            f"{ready} ({places(by_key)}) GROUP BY rule, {key}"
        )
        parts.append(
            "SELECT 1, rule, calls, COUNT(*), MIN(first_due) "
            f"FROM ({of_keys}) AS of_keys GROUP BY rule, calls"
        )
    return " UNION ALL ".join(parts), [*plain, *by_key]


def _waiting(using: str, names: Sequence[str]) -> list[tuple[str, int]]:
    """How many calls of each rule wait, whenever they are due."""
    sql = (
        f"SELECT rule, COUNT(*) FROM {tables.name(using, 'CallQueue')} "
        f"WHERE {WAITING} AND rule IN ({places(names)}) GROUP BY rule"
    )
    return [(rule, int(count)) for rule, count in rows(using, sql, list(names))]


def of_keys(using: str, names: Sequence[str]) -> dict[str, list[tuple[str, int]]]:
    """The keys of each of these rules that have calls ready, and how many, most first. One
    statement, which reads an index entry for each call.
    """
    if not names:
        return {}
    table, key = tables.name(using, "CallQueue"), quoted(using, "key")
    sql = (
        f"SELECT rule, {key}, COUNT(*) FROM {table} "
        f"WHERE {WAITING} AND ready AND rule IN ({places(names)}) GROUP BY rule, {key}"
    )
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    for rule, text, count in rows(using, sql, list(names)):
        found[rule].append((text, int(count)))
    for listed in found.values():
        listed.sort(key=lambda one: (-one[1], one[0]))
    return found


def each(using: str, select: str, params: Sequence[Sequence[Any]]) -> list[Any]:
    """What a SELECT returns for each of these parameters, CHUNK of them in a statement."""
    found: list[Any] = []
    for chunk in (params[at : at + CHUNK] for at in range(0, len(params), CHUNK)):
        sql = " UNION ALL ".join([select] * len(chunk))
        found += rows(using, sql, [value for one in chunk for value in one])
    return found


def sizes_of(keys: Sequence[tuple[str, int]], per: str) -> list[tuple[int, int]]:
    """How many values of a `per` have so many calls, from the keys' counts."""
    values: dict[str, int] = {}
    for key, count in keys:
        value = key_part(key, per)
        values[value] = values.get(value, 0) + count
    sizes: dict[int, int] = {}
    for count in values.values():
        sizes[count] = sizes.get(count, 0) + 1
    return sorted(sizes.items())
