"""Releases calls: exactly as fast as every limit of their rules allows, whoever else is releasing.

The loop of a process: it sleeps until a slot opens, an answer comes or a call becomes due, lets
`releasing` make a pass over the rules concerned, and publishes what that released. Any number of
dispensers may run.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

from django.db import DatabaseError, InterfaceError, connections

from callqueue import callbacks, clocks, conf, database, events, texts, transitions
from callqueue.dispatch import listener, publisher
from callqueue.dispatch.release_pass import REVIEW, Pass, release
from callqueue.ledger import account, agreement, clock_jumps, ready_calls
from callqueue.limits.budgets import Book
from callqueue.maintenance import alerts, reconcile, recovery

CARE = 0.5  # seconds between two rounds of promotion, expiry and recovery
GLANCE = 0.005  # seconds between two looks for answers, while calls wait for one
HEARTBEAT = 5.0
AGREE = 0.02  # seconds between two tries to be of one mind with the other dispensers, at first
SLOWLY = 0.2  # the same in the end, while a pass that goes by what was in force before does not end
AWAY = 1.0  # seconds between two looks for a database that is away
WATCH = 30.0  # seconds between two looks at what alerts, and at what is to be reconciled


@dataclass
class Lane:
    """What a dispenser remembers of a group between passes; monotonic seconds."""

    rules: tuple[str, ...]
    wants: bool = False
    wake_at: float = 0.0
    on_answer: bool = False
    open_seen: int | None = -1  # open attempts; None: more than a glance counts
    newest_seen: int = 0  # when the last one ended
    fruitless: int = 0
    busy: int = 0  # passes in a row that found the rules' rows locked
    vain: int = 0  # passes in a row that found nothing at all: what a look saw, somebody has locked
    rest_until: float = 0.0  # until when a look may see such calls in vain
    # when the pass began whose releases may be unpublished; 0: all are
    unpublished_from: float = 0.0


class Dispenser:
    """A dispenser of one process. `run` until told to stop, or `run_once`, then `leave`.

    `publish` is where released attempts go, `settings` gives the book of its settings, and `name`
    is what others know it by.
    """

    def __init__(
        self,
        using: str = "default",
        *,
        rules: Sequence[str] = (),
        publish: publisher.Publish = publisher.publish,
        settings: Callable[[], Book] = lambda: conf.current().book,
        name: str = "",
    ) -> None:
        self.using, self.only, self.publish, self.settings = (
            using,
            frozenset(rules),
            publish,
            settings,
        )
        self.name = name or _name_of_process(os.getpid())
        self.lanes: dict[tuple[str, ...], Lane] = {}
        self.seat = agreement.Seat(using, self.name)
        self._own: Book | None = None
        self._is_outdated, self._next_join, self._agree = True, 0.0, AGREE
        self._next_care = self._next_look = self._next_beat = self._next_watch = 0.0
        self._backlogs = alerts.Backlogs()
        self._last_sign: recovery.Sign | None = None
        self._runs = self._has_settled = False
        self._told: dict[str, float] = {}
        self._bell = listener.Bell(using)

    def run(self, *, stop: threading.Event | None = None, seconds: float | None = None) -> None:
        """Release until `stop` is set or `seconds` have passed. A database or broker that is away
        is waited for.
        """
        stop, self._runs = stop or threading.Event(), True
        end, pause = math.inf if seconds is None else time.monotonic() + seconds, 0.0
        try:
            while not stop.is_set() and time.monotonic() < end:
                try:
                    self._settle(stop)
                    wanted = self.tick()
                    self._heed(self._bell.wait(stop, max(0.0, min(wanted, end - time.monotonic()))))
                    pause = 0.0
                except (DatabaseError, InterfaceError) as error:
                    self._lost_database(error, is_again=pause > 0)
                    stop.wait(max(0.0, min(pause, end - time.monotonic())))
                    pause = AWAY
        finally:
            with suppress(DatabaseError, InterfaceError):
                self._undo_unpublished()
                self._bell.close()

    def leave(self) -> None:
        """The end of this dispenser: what its settings hold of the limits counts no more."""
        self._is_outdated = True
        with suppress(DatabaseError, InterfaceError):
            self.seat.leave()

    def _settle(self, stop: threading.Event) -> None:
        """Before a process releases anything for the first time: if the clock has just jumped, only
        others can have seen it, and they look at least this often.
        """
        watch = clock_jumps.watch(self.using)
        if watch.since is None:
            watch.look()
        elif self._has_settled:
            return
        self._has_settled = True
        left = (watch.since or 0.0) + clock_jumps.SETTLED - clocks.monotonic()
        if left > 0 and recovery.has_others(self.using, self.name):
            stop.wait(left)

    def run_once(self, *, care: bool = True) -> int:
        """Look after time's doings once, then release whatever may go now; the count of attempts
        released.
        """
        released: list[int] = []
        database.persist(self.using, lambda: self._run_once(care, released), during="release")
        return sum(released)

    def _run_once(self, care: bool, released: list[int]) -> None:
        self._next_join = 0.0
        self._undo_unpublished()
        self._follow_settings()
        if care:
            self._care()
        for lane in self.lanes.values():
            while True:
                done = self._release(lane)
                released.append(len(done.released))
                if not done.more or (not done.released and lane.fruitless >= 2):
                    break

    def tick(self) -> float:
        """One turn of the loop: what is due is done; the seconds until the next turn."""
        self._undo_unpublished()
        self._follow_settings()
        now = time.monotonic()
        if now >= self._next_care:
            self._next_care = now + self._care()
        if now >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + conf.current().poll
        self._glance()
        for lane in self.lanes.values():
            if lane.wants and lane.wake_at <= time.monotonic():
                self._release_apart(lane)
        return self._pause()

    def _release_apart(self, lane: Lane) -> None:
        """Release, and let no fault in one group of rules stop the others; a database that is away
        concerns them all.
        """
        try:
            self._release(lane)
        except (DatabaseError, InterfaceError):
            raise
        except Exception as error:
            lane.wake_at = time.monotonic() + 1.0
            self._say_once_a_minute(
                "pass_failed", rules=",".join(lane.rules), error=f"{type(error).__name__}: {error}"
            )

    def _release(self, lane: Lane) -> Pass:
        """Run a pass over the lane's rules and publish what it released."""
        lane.unpublished_from = lane.unpublished_from or clocks.monotonic()
        done = release(self.using, lane.rules, self.seat.book)
        self._is_outdated |= done.is_outdated
        now = time.monotonic()
        lane.fruitless = 0 if done.released else lane.fruitless + done.wrapped
        lane.on_answer = done.on_answer
        if done.open_after is not None:
            # An answer that came meanwhile is seen, though releases made up for it.
            lane.open_seen = done.open_after if done.open_after < account.GLANCED else None
        lane.busy = lane.busy + 1 if done.busy and not done.is_outdated else 0
        if (
            done.busy
        ):  # another dispenser's pass takes no longer than ours; a transaction of an operator's may
            lane.wake_at = now + (
                AGREE if done.is_outdated else min(CARE, GLANCE * 2 ** min(lane.busy - 1, 10))
            )
        elif done.more and (done.released or lane.fruitless < 2):
            lane.wake_at = 0.0
        elif done.wake_in is not None or done.on_answer:
            lane.wake_at = now + min(REVIEW, REVIEW if done.wake_in is None else done.wake_in)
        else:
            lane.wants, lane.wake_at = False, 0.0
            lane.rest_until = (
                now + min(REVIEW, conf.current().poll * 2**lane.vain) if lane.vain else 0.0
            )
            lane.vain = 0 if done.released else min(lane.vain + 1, 10)
        if done.released:
            events.tell("calls_released", rules=",".join(lane.rules), attempts=len(done.released))
            if not self.publish(self.using, publisher.pack(done.released)):
                self._say_once_a_minute("broker_away", rules=",".join(lane.rules))
                lane.wake_at = now + 1.0
        lane.unpublished_from = 0.0
        return done

    def _undo_unpublished(self) -> None:
        """Let calls wait again whose release, as far as this dispenser knows, nobody was told of:
        the database went away at the commit or soon after, or something else was raised. What
        another dispenser has released of these rules meanwhile, and no worker has begun, goes again
        too.
        """
        for lane in self.lanes.values():
            if lane.unpublished_from:
                now = database.clock(self.using)
                since = now - timedelta(seconds=clocks.monotonic() - lane.unpublished_from)
                transitions.undo_released(self.using, lane.rules, since)
                lane.unpublished_from = 0.0

    def _look(self) -> None:
        """See which rules have calls ready."""
        own, now = self.settings().rules, time.monotonic()
        watched = [
            rule
            for lane in self.lanes.values()
            if lane.rest_until <= now
            for rule in lane.rules
            if rule in own
        ]
        self._want(ready_calls.rules_with_ready(self.using, watched))

    def _heed(self, told: set[str]) -> None:
        """Act on what ended a wait: senders name the rules that have calls now, or leave it to a
        look.
        """
        if "" in told:
            self._next_look = 0.0
        self._want(told)

    def _want(self, ready: Set[str]) -> None:
        """Serve the lanes of these rules, those that were at rest, at once."""
        for lane in self.lanes.values():
            if not lane.wants and not ready.isdisjoint(lane.rules):
                lane.wants, lane.wake_at = True, 0.0
                self._bell.has_served()

    def _glance(self) -> None:
        """Wake the lanes that wait for an answer, where one has come."""
        waiting_lanes = [lane for lane in self.lanes.values() if lane.wants and lane.on_answer]
        if not waiting_lanes:
            return
        seen = account.answers(self.using, [rule for lane in waiting_lanes for rule in lane.rules])
        for lane in waiting_lanes:
            count, newest = (
                sum(seen[rule][0] for rule in lane.rules),
                max(seen[rule][1] for rule in lane.rules),
            )
            if (lane.open_seen is not None and count != lane.open_seen) or (
                lane.newest_seen and newest != lane.newest_seen
            ):
                lane.open_seen, lane.wake_at = count, 0.0
            lane.newest_seen = newest

    def _pause(self) -> float:
        now = time.monotonic()
        wakes = [self._next_look, self._next_care]
        wakes += [lane.wake_at for lane in self.lanes.values() if lane.wants]
        if any(lane.wants and lane.on_answer for lane in self.lanes.values()):
            wakes.append(now + GLANCE)
        return max(0.0, min(wakes) - now)

    def _care(self) -> float:
        """Everything that time brings, releases apart; the seconds until it is wanted again."""
        if not database.in_transaction(self.using):
            clock_jumps.watch(self.using).look()
        self._beat()
        looked_at = database.clock(self.using)
        promoted = ready_calls.promote(self.using)
        recovery.recover(self.using)
        callbacks.deliver_owed(self.using)
        if time.monotonic() >= self._next_watch:
            self._next_watch = time.monotonic() + WATCH
            self._backlogs.tell(self.using)
            publisher.ask_to_recover(self.using, reconcile.queues_wanted(self.using))
        if promoted >= ready_calls.PROMOTED:
            return 0.0
        return min(CARE, max(0.0, ready_calls.next_due_in(self.using, after=looked_at)))

    def _beat(self) -> None:
        """Give a sign of life; where the database has forgotten the last one, its ledger is not to
        be trusted.
        """
        if time.monotonic() < self._next_beat:
            return
        self._give_sign()
        self._is_outdated |= self.seat.look()
        self._next_beat = time.monotonic() + HEARTBEAT

    def _give_sign(self) -> None:
        if self._last_sign is not None and recovery.has_gone_back(
            self.using, self.name, self._last_sign
        ):
            recovery.hold_everything(self.using)
        sign = recovery.beat(self.using, self.name)
        self._last_sign = sign if self._runs else None

    def _follow_settings(self) -> None:
        """Notice changed settings, here or elsewhere: agree with other dispensers on what is in
        force, and rebuild the lanes.
        """
        own = self.settings()
        if own is self._own and not (self._is_outdated and time.monotonic() >= self._next_join):
            return
        self._give_sign()
        book = self.seat.join(own)
        groups = [
            g
            for g in book.distinct_groups()
            if not own.rules.keys().isdisjoint(g) and book.unreadable.isdisjoint(g)
        ]
        groups = [g for g in groups if not self.only or not self.only.isdisjoint(g)]
        self.lanes = {group: self.lanes.get(group, Lane(group)) for group in groups}
        self._own, self._is_outdated, self._next_join = (
            own,
            not self.seat.is_complete,
            time.monotonic() + self._agree,
        )
        self._agree = AGREE if self.seat.is_complete else min(SLOWLY, 2 * self._agree)

    def _lost_database(self, error: Exception, *, is_again: bool = True) -> None:
        self.seat.look_afresh()
        if (
            is_again
        ):  # once may be a connection that was cut, or two transactions in each other's way
            self._say_once_a_minute(
                "database_away", error=f"{type(error).__name__}: {str(error).strip()[:200]}"
            )
        connections[self.using].close()
        # before anything is released: is it the same database, and as old as it was?
        self._next_care = self._next_beat = 0.0

    def _say_once_a_minute(self, event: str, **facts: Any) -> None:
        now = time.monotonic()
        if now - self._told.get(event, -60.0) >= 60.0:
            self._told[event] = now
            events.tell(event, **facts)


@lru_cache
def _name_of_process(pid: int) -> str:
    """What no other dispenser is called: in containers, hosts' names and process ids are alike more
    often than not.
    """
    return f"{texts.storable(socket.gethostname())[:100]}:{pid}:{secrets.token_hex(2)}"
