"""What a dispenser does besides releasing: a table of chores, each with how often it is done.

One round of chores makes calls ready that became due, takes back what was lost, and gives a sign of
life. It releases nothing, and takes the network for a message only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from callqueue import callbacks, database
from callqueue.dispatch import publisher
from callqueue.ledger import clock_jumps, ready_calls
from callqueue.maintenance import alerts, reconcile, recovery
from callqueue.operations import counting

ROUND = 0.5  # seconds between two rounds, at most
HEARTBEAT = 5.0  # seconds between two signs of life
WATCH = 30.0  # seconds between two looks at what alerts, and at what is to be reconciled
ALWAYS = 0.0  # a chore of every round


@dataclass
class Chore:
    """Something that is done `every` so many seconds, at the next round after them."""

    every: float
    do: Callable[[], object]
    due_at: float = 0.0  # monotonic seconds

    def do_if_due(self) -> None:
        """One that fails is not tried again before its time: it must not keep the others back."""
        now = time.monotonic()
        if now >= self.due_at:
            self.due_at = now + self.every
            self.do()


class Chores:
    """The chores of one dispenser, in the order in which a round does them."""

    def __init__(self, using: str, heartbeat: Callable[[], object]) -> None:
        self.using = using
        self.next_round_at = 0.0
        self._backlogs = alerts.Backlogs()
        self._promoted = 0  # calls made ready in this round, of those due by then
        self._looked_at: datetime = database.EPOCH
        self._heartbeat = Chore(HEARTBEAT, heartbeat)
        self._chores = (
            Chore(ALWAYS, self._look_at_clock),
            self._heartbeat,
            Chore(ALWAYS, self._promote),
            Chore(ALWAYS, lambda: recovery.recover(using)),
            Chore(ALWAYS, lambda: callbacks.deliver_owed(using)),
            Chore(ALWAYS, lambda: counting.count_on(using)),
            Chore(WATCH, lambda: self._backlogs.tell(using)),
            Chore(WATCH, lambda: publisher.ask_to_recover(using, reconcile.queues_wanted(using))),
        )

    def maintain_if_due(self) -> None:
        """A round of chores, where it is time for one."""
        now = time.monotonic()
        if now >= self.next_round_at:
            self.next_round_at = now + self.maintain()

    def maintain(self) -> float:
        """Do the chores that are due; the seconds until the next round."""
        for chore in self._chores:
            chore.do_if_due()
        if self._promoted >= ready_calls.PROMOTED:
            return 0.0
        due_in = ready_calls.next_due_in(self.using, after=self._looked_at)
        return min(ROUND, max(0.0, due_in))

    def start_over(self) -> None:
        """The database was away: first of all, look at its clock and give a sign of life."""
        self.next_round_at = self._heartbeat.due_at = 0.0

    def _look_at_clock(self) -> None:
        if not database.in_transaction(self.using):
            clock_jumps.watch(self.using).look()

    def _promote(self) -> None:
        self._looked_at = database.clock(self.using)
        self._promoted = ready_calls.promote(self.using)
