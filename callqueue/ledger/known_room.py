"""Known room: what a pass that counted left free, and those after it take from without counting.

A pass that takes from it decides as the one that counted would have at its own instant, had it had
more calls before it: nothing has been charged since but what was taken off. So it is believed only
as what passes remember is (`Memo`), and neither where a cost may turn out to be more, nor once one
has (`LockedRule.is_corrected`), nor once a hold was laid, nor in another frame of ledger time. It
is known of limits per rule alone: of keys and queues a pass asks which has most. Tallied limits
need none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Self

from callqueue.clocks import Us
from callqueue.ledger.tallies import is_tallied
from callqueue.ledger.tally_rows import fingerprint
from callqueue.limits.budgets import Book, Budget
from callqueue.limits.kinds import Meter


class NotKnown(Exception):
    """More is asked for than is known to be free: who asks has to count."""


@dataclass(frozen=True)
class KnownRoom:
    """What was free at an instant after which nothing was charged but what is taken off: by budget.

    `moved`: the frame of ledger time; `print`: of what budgets; `laid`: by rule, how many holds had
    been laid, of which none was in force; `open`: by rule, how many attempts are open at most.
    """

    at: Us
    moved: int
    print: str
    laid: Mapping[str, int]
    free: Mapping[str, int]
    open: Mapping[str, int]

    @classmethod
    def loaded(cls, kept: Mapping[str, Any]) -> Self | None:
        """As `dumped`; None where nothing was kept."""
        return cls(**kept) if kept else None

    def dumped(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def without(self, charged: Mapping[str, int], released: Mapping[str, int]) -> Self:
        """What is left after charges, by budget, of so many attempts of each rule."""
        free = {name: max(0, left - charged.get(name, 0)) for name, left in self.free.items()}
        more = {rule: count + released.get(rule, 0) for rule, count in self.open.items()}
        return replace(self, free=free, open=more)

    def is_of(
        self, budgets: Sequence[Budget], now: Us, moved: int, laid: Mapping[str, int]
    ) -> bool:
        """Whether it holds at `now` for these budgets, and there is some in each."""
        is_of_now = self.moved == moved and self.at <= now and self.laid == laid
        return is_of_now and all(self.free.values()) and self.print == print_of(tuple(budgets))


def promises_more(kept: Mapping[str, Any], than: Mapping[str, Any]) -> bool:
    """Whether what is kept as known would let more go than something else does."""
    free = than.get("free", {})
    return any(left > free.get(name, 0) for name, left in kept.get("free", {}).items())


def counted(book: Book, rules: Sequence[str]) -> list[Budget] | None:
    """The budgets of which room is to be known; None where passes over these rules always count."""
    budgets = book.group_budgets(rules)
    are_plain = all(len(book.rules[rule].queue_names) == 1 for rule in rules) and all(
        one.limit.is_per_rule and not book.may_owe(one) for one in budgets
    )
    return [one for one in budgets if not is_tallied(one.limit)] if are_plain else None


@lru_cache(maxsize=4096)
def print_of(budgets: tuple[Budget, ...]) -> str:
    """Which budgets these are."""
    return hashlib.sha256(" ".join(map(fingerprint, budgets)).encode()).hexdigest()[:16]


class KnownMeter(Meter):
    """A meter over known room: what fits, fits at once; of more it knows nothing."""

    def __init__(self, free: int, now: Us) -> None:
        self._n, self._now = free, now

    @property
    def used(self) -> int:
        return self._open

    def free_at(self, cost: int) -> Us:
        if cost > self.free:
            raise NotKnown
        return self._now

    def known_at(self, cost: int) -> Us | None:
        return None if cost > self.free else self._now
