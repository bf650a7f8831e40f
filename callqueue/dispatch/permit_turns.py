"""Permits among the calls of a pass: which wait, and where each takes its turn.

A permit that waits is a row, `PermitRequest`, and a candidate of every pass over its rule: by
priority, then by due time, as calls go. In: the rules of a pass, and the candidates of their calls.
Out: both in order. Callers hold the lock of the rules' rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from callqueue import database, tables
from callqueue.database import from_us, to_us
from callqueue.ledger.ready_calls import TOP, Asked, Candidate
from callqueue.limits.budgets import Book

MOST = 500  # permits that one pass looks at
DEAD = 60_000_000  # microseconds after which a waiter that was taken for dead does not come back


@dataclass(frozen=True)
class Asking:
    """The permits of a pass, in the order in which they go. `alone`: the pass grants these, and
    releases no call: whoever makes it can publish none. `rules_with_calls`: which have any that are
    ready.
    """

    permits: Sequence[Candidate] = ()
    alone: bool = False
    rules_with_calls: frozenset[str] = frozenset()
    by_rule: Mapping[str, list[Candidate]] = field(init=False)

    def __post_init__(self) -> None:
        by_rule: dict[str, list[Candidate]] = {}
        for one in sorted(self.permits, key=lambda permit: permit.order):
            by_rule.setdefault(one.rule, []).append(one)
        object.__setattr__(self, "by_rule", by_rule)

    def concerns(self, rule: str, book: Book) -> bool:
        """Whether the rule's calls are to be looked at: all may go before a permit but those of
        rules with a lower priority.
        """
        if not self.alone:
            return True
        least = min((book.rules[name].priority for name in self.by_rule), default=TOP)
        return book.rules[rule].priority >= least

    def least(self, rule: str) -> int:
        """The lowest priority of the rule's calls that are to be looked at."""
        if not self.alone or rule not in self.by_rule:
            return -TOP
        return min(one.priority for one in self.by_rule[rule])


NOBODY = Asking()


def waiting(using: str, group: Sequence[str], now: int) -> list[Candidate]:
    """The permits of these rules that wait, and whose waiters live; locked. One statement, and one
    that deletes the rows of waiters that died, where there are no others. What those were granted
    ends with its lease.
    """
    stored = tables.permit_requests(using).filter(rule__in=group)
    living = stored.filter(attempt_id__isnull=True, alive_until__gt=from_us(now))
    rows = list(database.locked(living.order_by("-priority", "due_at_dt", "pk"))[:MOST])
    if not rows:
        stored.filter(alive_until__lt=from_us(now - DEAD)).delete()
    return [
        Candidate(
            id=row.pk,
            rule=row.rule,
            key=row.key,
            priority=row.priority,
            cost=row.cost,
            method="",
            last_attempt=0,
            due_at=row.due_at_dt,
            asked=Asked(row.owner, row.label, None if row.until is None else to_us(row.until)),
        )
        for row in rows
    ]


def merged(
    calls: Sequence[Candidate], permits: Sequence[Candidate], *, is_full: bool
) -> tuple[list[Candidate], bool]:
    """The rule's calls with its permits in their turns, where both come as they go; and whether
    permits are left out, since calls that were not listed (`is_full`) may go before them.
    """
    found, place = list[Candidate](), 0
    for permit in permits:
        while place < len(calls) and calls[place].order <= permit.order:
            found.append(calls[place])
            place += 1
        if is_full and place == len(calls):
            return found, True
        found.append(permit)
    return found + list(calls[place:]), False
