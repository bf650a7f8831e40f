"""What a dispenser does besides releasing: a table of chores, each with how often it is done. The
loop does those of a few statements itself, and has the others done aside, each in a thread of its
own: one that hangs keeps back nobody. `run_once` does all of them itself. One that fails says so,
and has its next turn later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

from django.db import DatabaseError, InterfaceError

from callqueue import broker, callbacks, database, events
from callqueue.aside import Errand
from callqueue.history import sums
from callqueue.ledger import holds, ledger_time, ready_calls, settings
from callqueue.maintenance import cleanup, reconcile, recovery

ROUND = 0.5  # seconds between two rounds, at most
HEARTBEAT = 5.0  # seconds between two signs of life
GATHER = 1.0  # seconds between two looks for keys that have calls ready and no turn
ADD_UP = 3.0  # seconds between two times that sums are added up
OWED = 10.0  # seconds between two looks for ends that nobody has announced
WATCH = 30.0  # seconds between two looks at what is to be reconciled
CLEAN = 600.0  # seconds between two looks whether it is time to clean up
DAY = timedelta(days=1)  # after which, since the last time or since calls were to go, it is
ALWAYS = 0.0  # a chore of every round
# a chore that reads all that is open, or all keys, waits this many times as long as it took
REST = 4.0
AGAIN = 5.0  # seconds until one is tried again that has failed
TELL = 60.0  # seconds between two events of one chore; and after which one that goes on is told of


@dataclass
class Chore:
    """Something that is done at the next round after `every` seconds."""

    name: str
    every: float
    do: Callable[[], object]
    aside: bool = True  # by a thread of its own
    rests: bool = False  # not sooner than REST times as long as it took
    due_at: float = 0.0  # monotonic seconds
    began_at: float = 0.0
    told_at: float = field(default=-TELL)  # when a failure was emitted last
    errand: Errand | None = None

    @property
    def is_under_way(self) -> bool:
        return self.errand is not None and self.errand.is_under_way

    def put_off(self, error: BaseException) -> None:
        self.due_at = time.monotonic() + AGAIN
        self.emit_failure(f"{type(error).__name__}: {str(error).strip()[:200]}")

    def emit_failure(self, error: str) -> None:
        """Emit a `chore_failed` with these words, at most one a minute."""
        now = time.monotonic()
        if now - self.told_at >= TELL:
            self.told_at = now
            events.emit("chore_failed", chore=self.name, error=error)


class Chores:
    """The chores of one dispenser, in order. `cleans`: nobody else is there to clean up."""

    def __init__(
        self, using: str, heartbeat: Callable[[], object], *, cleans: bool = False
    ) -> None:
        self.using = using
        self.is_loop = False  # their dispenser loops: long ones must not keep it waiting
        self.next_round_at = 0.0
        self._pause = ROUND  # seconds until the next round
        self._heartbeat = Chore("heartbeat", HEARTBEAT, heartbeat, aside=False)
        statements = [
            Chore(one.__name__, ALWAYS, partial(one, using), aside=False, rests=True)
            for one in recovery.ALL
        ]
        self.table = (
            Chore("clock", ALWAYS, self._look_at_clock, aside=False),
            self._heartbeat,
            Chore("promote", ALWAYS, self._promote, aside=False),
            Chore("keys", GATHER, self._gather_keys, rests=True),
            *statements,
            Chore("callbacks", OWED, partial(callbacks.ask_for_owed_ends, using)),
            Chore("history", ADD_UP, self._add_up_sums),
            Chore("reconcile", WATCH, self._ask_to_reconcile),
        )
        if cleans:
            self.table += (Chore("cleanup", CLEAN, self._clean_up),)
            self._cleaned_at = time.monotonic()

    def maintain_if_due(self) -> None:
        now = time.monotonic()
        if now >= self.next_round_at:
            self.next_round_at = now + self.maintain()

    def maintain(self) -> float:
        """Do a round; the seconds until the next one. Raises where the database is away."""
        self._pause = ROUND
        for chore in self.table:
            now = time.monotonic()
            if chore.is_under_way:
                if now - chore.began_at >= TELL:
                    chore.emit_failure(f"it has not ended for {now - chore.began_at:.0f} seconds")
            elif now >= chore.due_at:
                chore.due_at, chore.began_at = now + chore.every, now
                self._begin(chore)
        return self._pause

    def start_over(self) -> None:
        """Have the next round made at once, with a look at the clock and a sign of life."""
        self.next_round_at = self._heartbeat.due_at = 0.0

    def wait(self, seconds: float) -> None:
        """Wait for those that are under way, so long for all of them."""
        end = time.monotonic() + seconds
        for chore in self.table:
            if chore.errand is not None:
                chore.errand.done.wait(max(0.0, end - time.monotonic()))

    def _begin(self, chore: Chore) -> None:
        if not (chore.aside and self.is_loop):
            self._do(chore)
            return
        try:
            chore.errand = Errand(chore.name, lambda: self._do_aside(chore))
        except RuntimeError as error:  # no more threads
            chore.put_off(error)

    def _do(self, chore: Chore, *, again: bool = True) -> None:
        """Do it (`again`: twice if the database fails), or put it off; raise if that is away."""
        connection = database.raw_connection(self.using)
        try:
            chore.do()
            if chore.rests:
                ended = time.monotonic()
                chore.due_at = max(chore.due_at, ended + REST * (ended - chore.began_at))
        except Exception as error:
            is_of_database = isinstance(error, DatabaseError | InterfaceError)
            if is_of_database and not database.is_still_usable(self.using, connection):
                raise
            if is_of_database and again:  # two transactions were in each other's way, perhaps
                self._do(chore, again=False)
            else:
                chore.put_off(error)

    def _do_aside(self, chore: Chore) -> None:
        try:
            with database.kept_connection(self.using):
                self._do(chore)
        except (DatabaseError, InterfaceError):  # it is away, as the loop says
            chore.due_at = time.monotonic() + AGAIN
        except BaseException as error:
            chore.put_off(error)

    def _look_at_clock(self) -> None:
        if not database.in_transaction(self.using):
            ledger_time.watch(self.using).look()

    def _add_up_sums(self) -> None:
        # within somebody's transaction, such as a test's, it would see no more than that
        if not database.in_transaction(self.using):
            sums.bring_up_to_date(self.using)

    def _gather_keys(self) -> None:
        """Give the news of keys that nobody gave; forget the news that no pass takes."""
        book = settings.book_in_force(self.using)
        names = list(book.budgets)
        held = holds.in_force(self.using, names, ledger_time.now(self.using))
        in_turn = held.rules_taking_turns(book, names)
        ready_calls.forget_news(self.using, in_turn)
        for rule in ready_calls.rules_with_ready(self.using, in_turn):
            after: ready_calls.KeyAtPriority | None = ready_calls.FIRST
            while after is not None:
                after = ready_calls.give_missing_news(self.using, rule, after)

    def _promote(self) -> None:
        """Make due calls ready. The next round: at once if more may be due, or by the next due."""
        now = database.clock(self.using)
        if ready_calls.promote_due(self.using) >= ready_calls.PROMOTED:
            self._pause = 0.0
        else:
            due_in = ready_calls.next_due_in(self.using, after=now)
            self._pause = min(ROUND, max(0.0, due_in))

    def _ask_to_reconcile(self) -> None:
        # Workers do it, since it takes the network; or one thread of this process, where it makes
        # all calls: hooks that hang would take more.
        most = 1 if broker.is_bypassed() else None
        for queue in reconcile.queues_wanted(self.using)[:most]:
            broker.send_beside(broker.RECOVER, (self.using,), queue=queue)

    def _clean_up(self) -> None:
        """Clean up a day after this process began or last did, or once calls are a day overdue."""
        is_late = time.monotonic() - self._cleaned_at >= DAY.total_seconds()
        if is_late or cleanup.longest_overdue(self.using) >= DAY:
            self._cleaned_at = time.monotonic()
            cleanup.clean(self.using, vacuum=True)
