"""Reads what attempts charge: those that are open, summed up, and those that were answered, one by
one. SQL alone: account.py says which budgets they count in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callqueue import states
from callqueue.database import as_parameter, from_us, instant_us, loaded, places, quoted, rows
from callqueue.ledger.tally_rows import attempts_table, former_sql
from callqueue.limits.budgets import Former

LATELY = 2_000_000  # microseconds
GLANCED = 1000
SAMPLE = 500  # open attempts that are read where no limit asks how many there are
SUMS = (
    "SUM(calls), COUNT(*), MIN(released_at), MIN(CASE WHEN started_at IS NULL THEN released_at END)"
)


@dataclass(frozen=True)
class Open:
    """Open attempts of one rule, `count` of them, that do not differ in what was asked for.

    `cost`: of each one; None: they cost `calls` calls together. `former`: by which former rule they
    are charged; None: by a rule of the group. Instants are of the oldest, `unbegun_since` of the
    oldest that no worker has begun.
    """

    former: Former | None
    rule: str
    key: str
    queue: str
    cost: Any
    calls: int
    count: int
    released_at: int
    unbegun_since: int | None


@dataclass(frozen=True)
class Aged:
    """An answered attempt."""

    rule: str
    key: str
    queue: str
    cost: Any
    sent_at: int | None
    finished_at: int
    released_at: int = 0  # read where a budget has former rules


def open_sums(
    using: str,
    rules: Sequence[str],
    columns: Sequence[str],
    formers: Sequence[Former],
    *,
    samples: bool,
) -> Iterator[Open]:
    """The open attempts of these rules, and of former ones, summed up over the columns that are to
    be told apart; with `samples` a sample of them. One statement.
    """
    names = ", ".join(quoted(using, column) for column in columns)
    source = f"{attempts_table(using)} WHERE finished_at IS NULL AND rule IN ({places(rules)})"
    if samples:
        inner = f"SELECT {names}, calls, released_at, started_at FROM {source} LIMIT {SAMPLE}"
        source = f"({inner}) AS sample"
    parts, params = [f"SELECT 0, {SUMS}, {names} FROM {source} GROUP BY {names}"], list[Any](rules)
    for place, former in enumerate(formers, start=1):
        where, of_former = former_sql(using, former)
        of_it = f"{attempts_table(using)} WHERE finished_at IS NULL AND {where}"
        parts.append(f"SELECT {place}, {SUMS}, {names} FROM {of_it} GROUP BY {names}")
        params += of_former
    for place, calls, count, released_at, unbegun, *values in rows(
        using, " UNION ALL ".join(parts), params
    ):
        row = dict(zip(columns, values, strict=True))
        yield Open(
            former=formers[place - 1] if place else None,
            rule=row["rule"],
            key=row.get("key", ""),
            queue=row.get("queue", ""),
            cost=loaded(row["cost"]) if "cost" in row else None,
            calls=int(calls or 0),
            count=count,
            released_at=instant_us(released_at),
            unbegun_since=None if unbegun is None else instant_us(unbegun),
        )


def aged_since(
    using: str, rules_by_since: Mapping[int, Sequence[str]], *, by_units: bool, by_release: bool
) -> Iterator[Aged]:
    """The attempts of these rules that were answered since, whatever their keys. One statement, if
    any is wanted.

    `by_units`: their cost in all units rather than in calls; `by_release`: when they were released.
    """
    what, released = "cost" if by_units else "calls", ", released_at" if by_release else ""
    columns = f"rule, {quoted(using, 'key')}, queue, {what}, sent_at, finished_at{released}"
    parts, params = [], list[Any]()
    for since, rules in rules_by_since.items():
        parts.append(
            f"SELECT {columns} FROM {attempts_table(using)} "
            f"WHERE rule IN ({places(rules)}) AND finished_at > %s AND outcome <> %s"
        )
        params += [*rules, as_parameter(using, from_us(since)), states.VOIDED]
    found = rows(using, " UNION ALL ".join(parts), params) if parts else ()
    for rule, key, queue, cost, sent_at, finished_at, *released_at in found:
        spent = loaded(cost) if by_units else cost
        sent = None if sent_at is None else instant_us(sent_at)
        ended = instant_us(finished_at)
        yield Aged(rule, key, queue, spent, sent, ended, *map(instant_us, released_at))


def answered_lately(using: str, rules: Sequence[str], now: int) -> list[tuple[str, str]]:
    """The rules and keys of what was answered in the last seconds. One statement."""
    sql = (
        f"SELECT DISTINCT rule, {quoted(using, 'key')} FROM {attempts_table(using)} "
        f"WHERE rule IN ({places(rules)}) AND finished_at > %s"
    )
    return rows(using, sql, [*rules, as_parameter(using, from_us(now - LATELY))])


def open_counts(using: str) -> dict[str, int]:
    """How many attempts of each rule are open. One statement."""
    of_open = f"FROM {attempts_table(using)} WHERE finished_at IS NULL"
    return dict(rows(using, f"SELECT rule, COUNT(*) {of_open} GROUP BY rule"))


def answers(using: str, rules: Sequence[str]) -> dict[str, tuple[int, int]]:
    """What changes when an answer comes, by rule: how many attempts are open, up to GLANCED, and
    when the last one ended.

    What a dispenser that waits for answers looks at. One statement, which reads no more rows
    however many there are.
    """
    table = attempts_table(using)
    few = f"SELECT 1 FROM {table} WHERE finished_at IS NULL AND rule = %s LIMIT {GLANCED}"
    newest = f"SELECT MAX(finished_at) FROM {table} WHERE finished_at IS NOT NULL AND rule = %s"
    each = f"SELECT %s, (SELECT COUNT(*) FROM ({few}) o), ({newest})"
    found = rows(using, " UNION ALL ".join([each] * len(rules)), [r for r in rules for _ in "123"])
    return {
        rule: (int(is_open), 0 if ended is None else instant_us(ended))
        for rule, is_open, ended in found
    }
