"""How many calls wait, by rule and by key, and since when the oldest of them is due.

In: a database alias, the rules' names. Out: counts. Every read is bounded: it costs the same with a
million calls waiting as with ten thousand. Past the bound a count is an estimate; only `exact`
counts read an index entry for each call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django.db.models import Count

from callqueue import database, tables
from callqueue.database import instant_us, quoted, rows
from callqueue.ledger.ready_calls import READY, WAITING

CAP = 10_000  # calls of a rule that are counted one by one; more than that are estimated
SMALLEST_CAP = 1000  # the cap of one rule where there are many rules
NEXT = 1000  # calls whose keys are looked at: those that go next; CAP where counts are to be exact
OF_KEY = 1000  # calls of a key that are counted one by one
SAMPLE = 20_000  # rows that the estimate reads
CHUNK = 200  # SELECTs that one statement joins


class Scheduled(NamedTuple):
    """A rule's calls that wait and are not ready: how many, and when the first of them is due, in
    microseconds.
    """

    calls: int = 0
    first_due: int = 0


class Waiting(NamedTuple):
    """Calls waiting by rule, and the rules whose number is an estimate."""

    by_rule: Mapping[str, int]
    estimated: frozenset[str] = frozenset()


def waiting(
    using: str, names: Sequence[str], scheduled: Mapping[str, Scheduled], exact: bool
) -> Waiting:
    """Count the waiting calls of these rules: with `exact` all of them, else as far as CAP."""
    if exact:
        return Waiting(_exact(using, names))
    counts, many = _counted(using, names, scheduled)
    if not many:
        return Waiting(counts)
    sampled = _sampled(using)
    if sampled is None:
        return Waiting(_exact(using, names))
    estimates = {name: max(_rounded(sampled[name]), counts[name]) for name in many}
    return Waiting({**counts, **estimates}, frozenset(many))


def scheduled(using: str) -> dict[str, Scheduled]:
    """Of the calls that are not ready, the first CAP to become so, by rule."""
    first = (
        f"SELECT rule, due_at_dt FROM {_table(using)} "
        f"WHERE {WAITING} AND NOT ready ORDER BY due_at_dt LIMIT {CAP + 1}"
    )
    counted = f"SELECT rule, COUNT(*), MIN(due_at_dt) FROM ({first}) AS first_due GROUP BY rule"
    return {
        rule: Scheduled(int(count), instant_us(due)) for rule, count, due in rows(using, counted)
    }


def oldest_due(
    using: str,
    priorities: Mapping[str, Iterable[int]],
    scheduled: Mapping[str, Scheduled],
    now: int,
) -> dict[str, int]:
    """By rule: the instant at which the call became due that has been due longest; rules that have
    none are left out.

    `priorities`: those of each rule's ready calls. The index gives the first call of each.
    """
    found = {
        rule: those.first_due
        for rule, those in scheduled.items()
        if those.calls and those.first_due <= now
    }
    first = (
        f"SELECT %s, MIN(due_at_dt) FROM (SELECT due_at_dt FROM {_table(using)} "
        f"WHERE {READY} AND priority = %s ORDER BY due_at_dt LIMIT 1) AS first_call"
    )
    params = [(name, name, priority) for name, listed in priorities.items() for priority in listed]
    for name, due in each(using, first, params):
        if due is not None and instant_us(due) <= now:
            found[name] = min(found.get(name, now), instant_us(due))
    return found


def next_keys(using: str, name: str, most: int) -> Counter[str]:
    """How many of the rule's next `most` calls each key has."""
    key, table = quoted(using, "key"), _table(using)
    # Their ids first: to read their keys there, PostgreSQL would rather sort all that waits by an
    # index that has the keys.
    ids = f"SELECT id FROM {table} WHERE {READY} ORDER BY priority DESC, due_at_dt, id LIMIT {most}"
    sql = (
        f"SELECT c.{key}, COUNT(*) FROM ({ids}) AS next_calls "
        f"JOIN {table} c ON c.id = next_calls.id GROUP BY c.{key}"
    )
    return Counter({text: int(count) for text, count in rows(using, sql, [name])})


def of_keys(using: str, name: str, keys: Sequence[str], priorities: Sequence[int]) -> Counter[str]:
    """How many ready calls of the rule each of these keys has, counted up to one more than
    OF_KEY.
    """
    where = f"{READY} AND priority = %s AND {quoted(using, 'key')} = %s"
    few = f"SELECT 1 AS one FROM {_table(using)} WHERE {where} LIMIT {OF_KEY + 1}"
    params = [(key, name, priority, key) for key in keys for priority in priorities]
    found: Counter[str] = Counter()
    for key, count in each(using, f"SELECT %s, COUNT(*) FROM ({few}) AS few", params):
        found[key] = min(OF_KEY + 1, found[key] + count)
    return found


def each(using: str, select: str, params: Sequence[Sequence[Any]]) -> list[Any]:
    """What a SELECT returns for each of these parameters, CHUNK of them in a statement. The first
    parameter names what the row is about.
    """
    found: list[Any] = []
    for chunk in (params[at : at + CHUNK] for at in range(0, len(params), CHUNK)):
        sql = " UNION ALL ".join([select] * len(chunk))
        found += rows(using, sql, [value for one in chunk for value in one])
    return found


def _counted(
    using: str, names: Sequence[str], scheduled: Mapping[str, Scheduled]
) -> tuple[dict[str, int], set[str]]:
    """Calls waiting by rule as far as they are counted, and the rules that may have more."""
    cap = max(SMALLEST_CAP, min(CAP, 5 * CAP // max(1, len(names))))
    few = f"SELECT 1 AS one FROM {_table(using)} WHERE {READY} LIMIT {cap + 1}"
    params = [(name, name) for name in names]
    ready = dict(each(using, f"SELECT %s, COUNT(*) FROM ({few}) AS few", params))
    many = {name for name in names if ready[name] > cap}
    if sum(those.calls for those in scheduled.values()) > CAP:
        many |= set(names) & scheduled.keys()
    return {name: ready[name] + scheduled.get(name, Scheduled()).calls for name in names}, many


def _exact(using: str, names: Sequence[str]) -> dict[str, int]:
    """Each half of the waiting set has an index of its own."""
    counts: Counter[str] = Counter()
    for ready in (True, False):
        half = tables.calls(using).waiting().filter(ready=ready, rule__in=names).order_by()
        counts.update(dict(half.values_list("rule").annotate(count=Count("pk"))))
    return {name: counts[name] for name in names}


def _sampled(using: str) -> Counter[str] | None:
    """Calls waiting by rule, from a part of the table; None where the database cannot read a
    part.
    """
    table = tables.CallQueue._meta.db_table
    total = database.estimated_rows(using, table) or 0
    percent = min(100.0, 100 * SAMPLE / max(total, 1))
    source = database.sample_of(using, table, percent)
    if source is None:
        return None
    found = rows(using, f"SELECT rule, COUNT(*) FROM {source} WHERE {WAITING} GROUP BY rule")
    return Counter({rule: round(count * 100 / percent) for rule, count in found})


def _rounded(count: int) -> int:
    """To two digits: an estimate claims no more."""
    unit: int = 10 ** max(0, len(str(count)) - 2)
    return round(count / unit) * unit


def _table(using: str) -> str:
    return tables.name(using, "CallQueue")
