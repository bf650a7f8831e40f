"""Limits over a simulated run: when each call fits, and when its charge leaves."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from callqueue.limits.kinds.base import Limit, Usage


# microseconds after which the ledger knows, usually, that a call was sent which is not answered
TOLD = 150_000


class Lane:
    """One limit over the whole run. All calls cost the same, are sent in order and answered in
    order. Instants and `notice` are microseconds. `is_told`: whether the ledger is told that a call
    was sent before it is answered.

    Here a call fits once the charge of the call `room` places before it has ended: so it is with
    windows, and with what is in flight.
    """

    def __init__(self, limit: Limit, cost: int, values: int) -> None:
        self.limit, self.cost, self.values = limit, cost, values
        self.is_told = True
        self.waited = 0
        self.jitter = limit.jitter_us
        self._room = limit.capacity // cost
        self._ends: list[deque[tuple[int, bool]]] = [
            deque(maxlen=self._room) for _ in range(values)
        ]

    def free_at(self, number: int, at: int, notice: int) -> tuple[int, bool]:
        """From when on, not before `at`, call `number` fits; and whether that waits for an answer,
        which is noticed so much later.
        """
        ends = self._ends[number % self.values]
        if len(ends) < self._room:
            return at, False
        end, by_answer = ends[0]
        return max(at, end + notice if by_answer else end), by_answer

    def take(self, number: int, sent: int, answered: int) -> None:
        """Charge call `number`."""
        self._ends[number % self.values].append(self._end(sent, answered))

    def charge(self, usage: Usage, start: int, latency: int) -> None:
        """Charge what others took before `start`. Open attempts are answered like the rest."""
        aged = [(self.leaves(at), False, cost) for at, cost in usage.aged]
        charges = [charge for charge in aged if charge[0] > start]
        charges.append((*self._end(start, start + latency), usage.open))
        owed = 0
        for end, by_answer, cost in charges:
            owed += cost
            while owed >= self.cost:
                owed -= self.cost
                self._ends[0].append((end, by_answer))

    def leaves(self, instant: int) -> int:
        """When a charge that ages from `instant` no longer counts."""
        return instant + self.limit.window_us + 1 if self.limit.window_us else instant

    def known_at(self, sent: int, answered: int) -> int:
        """When the ledger knows that a call was sent: until then it is open."""
        if self.is_told and self.limit.ages_unanswered:
            return min(answered, sent + TOLD)
        return answered

    def aged_from(self, sent: int, answered: int) -> int:
        """From when a call ages."""
        return self.limit.aged_from(sent, answered)

    def _end(self, sent: int, answered: int) -> tuple[int, bool]:
        """When a call's charge ends, and whether that is with its answer, or with being told."""
        left, known = self.leaves(self.aged_from(sent, answered)), self.known_at(sent, answered)
        return (known, True) if known >= left else (left, False)
