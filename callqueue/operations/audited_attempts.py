"""The attempts that an audit judges, read from the ledger page by page in the order of their
ends.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from callqueue import states, tables
from callqueue.database import as_parameter, from_us, micros_sql, quoted, rows
from callqueue.limits.budgets import Book

PAGE = 5000  # attempts that one statement reads


@dataclass(slots=True)
class Seen:
    """An attempt as the audit sees it, in microseconds. An open one has no `finished`."""

    rule: str
    key: str
    queue: str
    cost: Any
    counted: int
    began: int
    finished: int | None
    released: int = 0


def attempts(using: str, book: Book, cut: int, now: int) -> Iterator[Seen]:
    """The attempts of all rules by the end, page by page; the open ones that a worker has begun
    come last.
    """
    what = "cost" if any(b.limit.unit != "calls" for b in book.all_budgets()) else "calls"
    counted = {
        rule for b in book.all_budgets() for rule in (*b.rules, *(name for name, _ in b.former))
    }
    streams = [_ended(using, what, rule, cut) for rule in sorted(counted)]
    yield from heapq.merge(*streams, key=lambda seen: seen.finished or now)
    for row in _rows(using, what, "finished_at IS NULL AND started_at IS NOT NULL", []):
        yield _seen(row, now)


def _ended(using: str, what: str, rule: str, cut: int) -> Iterator[Seen]:
    where = (
        "rule = %s AND outcome <> %s AND finished_at >= %s AND (finished_at > %s OR id > %s) "
        f"ORDER BY finished_at, id LIMIT {PAGE}"
    )
    finished, last = as_parameter(using, from_us(cut)), 0
    while page := _rows(using, what, where, [rule, states.VOIDED, finished, finished, last]):
        for row in page:
            yield _seen(row, 0)
        finished, last = as_parameter(using, from_us(page[-1][7])), page[-1][0]


def _rows(using: str, what: str, where: str, params: list[Any]) -> list[Any]:
    """Attempts, their instants in microseconds."""
    columns = [quoted(using, name) for name in ("id", "rule", "key", "queue", what)]
    instants = ("sent_at", "COALESCE(started_at, released_at)", "finished_at", "released_at")
    listed = ", ".join(columns + [micros_sql(using, instant) for instant in instants])
    table = tables.name(using, "CallAttempt")
    return rows(using, f"SELECT {listed} FROM {table} WHERE {where}", params)


def _seen(row: Any, now: int) -> Seen:
    _, rule, key, queue, cost, sent, began, finished, released = row
    if sent is not None:
        counted = began = sent
    else:
        counted = now if finished is None else finished
    return Seen(
        rule,
        key,
        queue,
        json.loads(cost) if isinstance(cost, str | bytes) else cost,
        counted,
        began,
        finished,
        released,
    )
