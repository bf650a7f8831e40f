"""Releases calls: exactly as fast as every limit of their rules allows, whoever else is releasing.

The loop of a process: it sleeps until a slot opens, an answer comes or a call becomes due, lets `releasing` make a pass over
the rules concerned, and publishes what that released. Any number of dispensers may run.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.db import DatabaseError, InterfaceError, connections

from callqueue import (
    alerts,
    callbacks,
    clockwork,
    conf,
    database,
    events,
    ledger,
    publisher,
    reconcile,
    recovery,
    waiting,
    wakeup,
)
from callqueue.budgets import Book
from callqueue.releasing import REVIEW, Pass, ensure_states, release

CARE = 0.5  # seconds between two rounds of promotion, expiry and recovery
GLANCE = 0.005  # seconds between two looks for answers, while calls wait for one
HEARTBEAT = 5.0
WATCH = 30.0  # seconds between two looks at what alerts, and at what is to be reconciled


@dataclass
class Lane:
    """What a dispenser remembers of a group between passes; monotonic seconds."""

    rules: tuple[str, ...]
    wants: bool = False
    wake_at: float = 0.0
    on_answer: bool = False
    open_seen: int = -1
    fruitless: int = 0


class Dispenser:
    """A dispenser of one process. `run` until told to stop, or `run_once`; `publish` is where released attempts go."""

    def __init__(
        self, using: str = "default", *, rules: Sequence[str] = (), publish: publisher.Publish = publisher.publish
    ) -> None:
        self.using, self.only, self.publish = using, frozenset(rules), publish
        self.name = _name_of_process(os.getpid())
        self.lanes: dict[tuple[str, ...], Lane] = {}
        self._book: Book | None = None
        self._next_care = self._next_look = self._next_beat = self._next_watch = 0.0
        self._backlogs = alerts.Backlogs()
        self._last_sign: recovery.Sign | None = None
        self._runs = False
        self._told: dict[str, float] = {}
        self._bell = wakeup.Bell(using)

    def run(self, *, stop: threading.Event | None = None, seconds: float | None = None) -> None:
        """Release until `stop` is set or `seconds` have passed. A database or broker that is away is waited for."""
        stop, self._runs = stop or threading.Event(), True
        end = None if seconds is None else time.monotonic() + seconds
        prepared = False
        while not stop.is_set() and (end is None or time.monotonic() < end):
            try:
                if not prepared:
                    database.prepare_dispenser(self.using)
                    prepared = True
                pause = self.tick()
                if end is not None:
                    pause = min(pause, max(0.0, end - time.monotonic()))
                self._heed(self._bell.wait(stop, pause))
            except (DatabaseError, InterfaceError) as error:
                prepared = False
                self._lost_database(error)
                stop.wait(1.0 if end is None else max(0.0, min(1.0, end - time.monotonic())))
        with suppress(DatabaseError, InterfaceError):
            self._bell.close()

    def run_once(self, *, care: bool = True) -> int:
        """Look after time's doings once, then release whatever may go now; the count of attempts released."""
        self._follow_settings()
        if care:
            self._care()
        released = 0
        for lane in self.lanes.values():
            while True:
                done = self._release(lane)
                released += len(done.released)
                if not done.more or (not done.released and lane.fruitless >= 2):
                    break
        return released

    def tick(self) -> float:
        """One turn of the loop: what is due is done; the seconds until the next turn."""
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
        """Release, and let no fault in one group of rules stop the others; a database that is away concerns them all."""
        try:
            self._release(lane)
        except (DatabaseError, InterfaceError):
            raise
        except Exception as error:
            lane.wake_at = time.monotonic() + 1.0
            self._say_once_a_minute("pass_failed", rules=",".join(lane.rules), error=f"{type(error).__name__}: {error}")

    def _release(self, lane: Lane) -> Pass:
        """Run a pass over the lane's rules and publish what it released."""
        done = release(self.using, lane.rules)
        now = time.monotonic()
        lane.fruitless = 0 if done.released else lane.fruitless + done.wrapped
        lane.on_answer = done.on_answer
        if done.open_after is not None:
            lane.open_seen = done.open_after  # an answer that came meanwhile is seen, though releases made up for it
        if done.busy:
            lane.wake_at = now + GLANCE
        elif done.more and (done.released or lane.fruitless < 2):
            lane.wake_at = 0.0
        elif done.wake_in is not None or done.on_answer:
            lane.wake_at = now + min(REVIEW, REVIEW if done.wake_in is None else done.wake_in)
        else:
            lane.wants, lane.wake_at = False, 0.0
        if done.released:
            events.tell("calls_released", rules=",".join(lane.rules), attempts=len(done.released))
            if not self.publish(self.using, publisher.pack(done.released)):
                self._say_once_a_minute("broker_away", rules=",".join(lane.rules))
                lane.wake_at = now + 1.0
        return done

    def _look(self) -> None:
        """See which rules have calls ready."""
        watched = [rule for lane in self.lanes.values() for rule in lane.rules]
        self._want(waiting.rules_with_ready(self.using, watched))

    def _heed(self, told: set[str]) -> None:
        """Act on what ended a wait: senders name the rules that have calls now, or leave it to a look."""
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
        """Wake the lanes that wait for an answer, where the count of open attempts has changed."""
        waiting_lanes = [lane for lane in self.lanes.values() if lane.wants and lane.on_answer]
        if not waiting_lanes:
            return
        counts = ledger.open_counts(self.using)
        for lane in waiting_lanes:
            count = sum(counts.get(rule, 0) for rule in lane.rules)
            if count != lane.open_seen:
                lane.open_seen, lane.wake_at = count, 0.0

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
            clockwork.watch(self.using).look()
        self._beat()
        waiting.promote(self.using)
        recovery.recover(self.using)
        callbacks.deliver_owed(self.using)
        if time.monotonic() >= self._next_watch:
            self._next_watch = time.monotonic() + WATCH
            self._backlogs.tell(self.using)
            publisher.ask_to_recover(self.using, reconcile.queues_wanted(self.using))
        return min(CARE, max(0.0, waiting.next_due_in(self.using)))

    def _beat(self) -> None:
        """Give a sign of life; where the database has forgotten the last one, its ledger is not to be trusted."""
        if time.monotonic() < self._next_beat:
            return
        if self._last_sign is not None:
            if recovery.has_gone_back(self.using, self.name, self._last_sign):
                recovery.hold_everything(self.using)
            ensure_states(self.using, [rule for lane in self.lanes.values() for rule in lane.rules])
        sign = recovery.beat(self.using, self.name)
        self._last_sign = sign if self._runs else None
        self._next_beat = time.monotonic() + HEARTBEAT

    def _follow_settings(self) -> None:
        """Notice changed settings: rebuild the lanes and make the rows that are their locks."""
        book = conf.current().book
        if book is self._book:
            return
        groups = [g for g in book.distinct_groups() if not self.only or not self.only.isdisjoint(g)]
        ensure_states(self.using, [rule for group in groups for rule in group])
        self.lanes = {group: self.lanes.get(group, Lane(group)) for group in groups}
        self._book = book

    def _lost_database(self, error: Exception) -> None:
        self._say_once_a_minute("database_away", error=f"{type(error).__name__}: {str(error).strip()[:200]}")
        connections[self.using].close()
        self._next_care = self._next_beat = 0.0  # before anything is released: is it the same database, and as old as it was?

    def _say_once_a_minute(self, event: str, **facts: Any) -> None:
        now = time.monotonic()
        if now - self._told.get(event, -60.0) >= 60.0:
            self._told[event] = now
            events.tell(event, **facts)


@lru_cache
def _name_of_process(pid: int) -> str:
    """What no other dispenser is called: in containers, hosts' names and process ids are alike more often than not."""
    return f"{socket.gethostname()[:100]}:{pid}:{secrets.token_hex(2)}"
