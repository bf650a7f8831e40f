"""The snapshot that a status report is made of: what is read once, for all rules together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from callqueue import database
from callqueue.database import from_us, to_us
from callqueue.ledger import account as ledger
from callqueue.ledger import agreement, holds, ready_calls
from callqueue.limits.budgets import Book
from callqueue.operations import answer_rates, ledger_view, not_queued, waiting_counts
from callqueue.operations.answer_rates import Rate
from callqueue.operations.attempt_sums import AttemptSums
from callqueue.operations.ledger_view import LedgerView
from callqueue.operations.not_queued import NotQueued
from callqueue.operations.waiting_counts import Scheduled, Waiting

KEYS = 10  # keys of a rule that an account reads at least, those with most calls waiting


@dataclass
class Snapshot:
    """What all rules have in common, as of `now` (microseconds). `keys`: so many are to be shown of
    each rule. `next_keys`: how many of a rule's next `next_count` calls each key has.
    """

    using: str
    book: Book
    keys: int
    now: int
    sums: AttemptSums | None
    memos: Mapping[str, tuple[int, Mapping[str, Any]]]
    held: holds.Held
    in_flight: Mapping[str, int]
    waiting: Waiting
    next_count: int
    next_keys: Mapping[str, Counter[str]]
    priorities: Mapping[str, Sequence[int]]
    oldest_due: Mapping[str, int]
    rates: Mapping[str, Rate]
    not_queued: Mapping[str, NotQueued]
    _accounts: dict[tuple[str, ...], LedgerView] = field(default_factory=dict)

    def account(self, rule: str) -> LedgerView:
        """The account of the rule's group, beginning with what the dispensers remember of it."""
        group = self.book.groups[rule]
        if group not in self._accounts:
            self._accounts[group] = self._read_account(group)
        return self._accounts[group]

    def _read_account(self, group: tuple[str, ...]) -> LedgerView:
        remembered = {rule: self.memos[rule] for rule in group if rule in self.memos}
        memo = ledger.Memo.load(group, remembered, self.book.agreement)
        account = ledger_view.look(self.using, self.book, group, self.now, memo, sums=self.sums)
        counted = [self.next_keys.get(name, Counter()) for name in group]
        most = max(self.keys, KEYS)
        account.read_keys([key for keys in counted for key, _ in keys.most_common(most)])
        return account


def read(
    using: str, book: Book, names: Sequence[str], *, exact: bool, keys: int, until: float
) -> Snapshot:
    """Read what these rules have in common. `until`: when (monotonic) it is late, and what large
    windows hold is estimated; with `exact` it is counted.
    """
    now = to_us(database.clock(using))
    memos = agreement.memos(using, {rule for name in names for rule in book.groups[name]})
    held = holds.in_force(using, names, from_us(now))
    in_flight = ledger.open_counts(using)
    scheduled = waiting_counts.scheduled(using)
    waiting = waiting_counts.waiting(using, names, scheduled, exact)
    next_count = waiting_counts.CAP if exact else waiting_counts.NEXT
    priorities = {
        name: ready_calls.priorities(using, name)
        for name in names
        if waiting.by_rule[name] > scheduled.get(name, Scheduled()).calls
    }
    return Snapshot(
        using=using,
        book=book,
        keys=keys,
        now=now,
        sums=None if exact else AttemptSums(using, now, until),
        memos=memos,
        held=held,
        in_flight=in_flight,
        waiting=waiting,
        next_count=next_count,
        next_keys={
            name: waiting_counts.next_keys(using, name, next_count)
            for name in names
            if any(budget.limit.is_keyed for budget in book.budgets[name])
        },
        priorities=priorities,
        oldest_due=waiting_counts.oldest_due(using, priorities, scheduled, now),
        rates=answer_rates.rates(using, names, now),
        not_queued=not_queued.by_rule(using),
    )
