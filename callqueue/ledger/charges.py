"""Reads what attempts charge: those that are open, summed up, and those that age, one by one. SQL
alone: account.py says which budgets they count in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callqueue import states
from callqueue.database import as_parameter, from_us, instant_us, loaded, places, quoted, rows
from callqueue.ledger.tally_rows import attempts_table, former_sql
from callqueue.limits.budgets import Former, cost_of
from callqueue.limits.kinds import Limit

LATELY = 2_000_000  # microseconds
# microseconds by which the ledger may be told of a call after it has aged away, and still see it
BELATED = 4_000_000
GLANCED = 1000
SAMPLE = 500  # open attempts that are read where no limit asks how many there are
SUMS = (
    "SUM(calls), COUNT(*), MIN(released_at), MIN(CASE WHEN started_at IS NULL THEN released_at END)"
)


@dataclass(frozen=True)
class Open:
    """Open attempts of one rule, `count` of them, that do not differ in what was asked for.

    `is_told`: whether the ledger knows since when they age; `cost`: of each one; None: they cost
    `calls` calls together. `former`: by which former rule they are charged; None: by a rule of the
    group. Instants are of the oldest, `unbegun_since` of the oldest that no worker has begun.
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
    is_told: bool


@dataclass(frozen=True)
class Aged:
    """An attempt that ages: answered, or known to be sent. `charged`: what it was charged at its
    release, where the answer said that it cost more than that.
    """

    rule: str
    key: str
    queue: str
    cost: Any
    charged: Any
    sent_at: int | None
    finished_at: int | None
    released_at: int = 0  # read where a budget has former rules

    def charges(self, limit: Limit) -> list[tuple[int, int]]:
        """What it charges a limit, and since when that ages; what its answer added, since then."""
        cost, more, found = cost_of(self.cost, limit.unit), 0, []
        if self.charged is not None and self.finished_at is not None:
            more = max(0, cost - cost_of(self.charged, limit.unit))
            found = [(self.finished_at, more)] if more else []
        if cost > more:
            found.append((limit.aged_from(self.sent_at, self.finished_at), cost - more))
        return found


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
    sql, params = _open_sums_sql(using, rules, columns, formers, samples)
    for place, calls, count, released_at, unbegun, told, *values in rows(using, sql, params):
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
            is_told=bool(told),
        )


def _open_sums_sql(
    using: str,
    rules: Sequence[str],
    columns: Sequence[str],
    formers: Sequence[Former],
    samples: bool,
) -> tuple[str, list[Any]]:
    """The statement and its parameters. Its rows begin with the place of the former rule, from 1;
    0: a rule of the group.
    """
    names = ", ".join(quoted(using, column) for column in columns)
    is_told = "CASE WHEN sent_at IS NULL THEN 0 ELSE 1 END"
    source = f"{attempts_table(using)} WHERE finished_at IS NULL AND rule IN ({places(rules)})"
    if samples:
        inner = f"SELECT {names}, calls, released_at, started_at, sent_at FROM {source}"
        source = f"({inner} LIMIT {SAMPLE}) AS sample"
    sums, grouped = f"{SUMS}, {is_told}, {names}", f"GROUP BY {is_told}, {names}"
    parts, params = [f"SELECT 0, {sums} FROM {source} {grouped}"], list[Any](rules)
    for place, former in enumerate(formers, start=1):
        where, of_former = former_sql(using, former)
        of_it = f"{attempts_table(using)} WHERE finished_at IS NULL AND {where}"
        parts.append(f"SELECT {place}, {sums} FROM {of_it} {grouped}")
        params += of_former
    return " UNION ALL ".join(parts), params


def aged_since(
    using: str,
    rules_by_since: Mapping[int, Sequence[str]],
    *,
    told: int | None,
    by_units: bool,
    by_release: bool,
) -> Iterator[Aged]:
    """The attempts of these rules that were answered since, and those that are not answered and
    known to be sent since, or up to `told` microseconds before; whatever their keys. One statement,
    if any is wanted: of an attempt that is answered meanwhile it sees the one or the other.

    `told`: None where nothing ages unanswered; `by_units`: their cost in all units rather than in
    calls; `by_release`: when they were released.
    """
    what, released = "cost" if by_units else "calls", ", released_at" if by_release else ""
    columns = (
        f"rule, {quoted(using, 'key')}, queue, {what}, charged, sent_at, finished_at{released}"
    )
    parts, params = [], list[Any]()
    for since, rules in rules_by_since.items():
        of_rules = f"SELECT {columns} FROM {attempts_table(using)} WHERE rule IN ({places(rules)})"
        parts.append(f"{of_rules} AND finished_at > %s AND outcome <> %s")
        params += [*rules, as_parameter(using, from_us(since)), states.VOIDED]
        if told is not None:
            parts.append(f"{of_rules} AND finished_at IS NULL AND sent_at > %s")
            params += [*rules, as_parameter(using, from_us(since - told))]
    found = rows(using, " UNION ALL ".join(parts), params) if parts else ()
    for rule, key, queue, cost, charged, sent_at, finished_at, *released_at in found:
        yield Aged(
            rule,
            key,
            queue,
            loaded(cost) if by_units else cost,
            None if charged is None else loaded(charged),
            None if sent_at is None else instant_us(sent_at),
            None if finished_at is None else instant_us(finished_at),
            *map(instant_us, released_at),
        )


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


@dataclass(frozen=True)
class Glance:
    """What may make room, of one rule: how many attempts are open, and how many of these the ledger
    knows nothing of yet, each up to GLANCED; and when the last one ended.
    """

    open: int
    untold: int
    newest_end: int


def glances(using: str, rules: Sequence[str]) -> dict[str, Glance]:
    """A glance at each of these rules: what a dispenser looks at that waits for an answer, or until
    the ledger is told that a call was sent. One statement, which reads no more rows however many
    have ended.
    """
    table = attempts_table(using)
    few = f"SELECT 1 FROM {table} WHERE finished_at IS NULL AND rule = %s"
    counts = ", ".join(
        f"(SELECT COUNT(*) FROM ({few}{which} LIMIT {GLANCED}) o)"
        for which in ("", " AND sent_at IS NULL")
    )
    newest = f"SELECT MAX(finished_at) FROM {table} WHERE finished_at IS NOT NULL AND rule = %s"
    each = f"SELECT %s, {counts}, ({newest})"
    found = rows(using, " UNION ALL ".join([each] * len(rules)), [r for r in rules for _ in "1234"])
    return {
        rule: Glance(int(is_open), int(untold), 0 if ended is None else instant_us(ended))
        for rule, is_open, untold, ended in found
    }
