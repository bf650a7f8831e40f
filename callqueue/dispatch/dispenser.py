"""Releases calls exactly as fast as every limit of their rules allows, whoever else is releasing.

The loop of a process sleeps until a slot opens, an answer comes or a call becomes due, makes a
pass, and has published what that released. Any number may run, each with its signs of life. What
may take its time is done beside the loop, in threads: messages, the project's own code, sums.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Protocol

from celery import current_app
from django.db import DatabaseError, InterfaceError, connections

from callqueue import broker, clocks, conf, database, events, tables, texts
from callqueue.database import MICROSECOND, from_us
from callqueue.dispatch import publisher
from callqueue.dispatch.chores import HEARTBEAT, Chores
from callqueue.dispatch.next_look import NO_ROOM, ROOMY, Room, RuleGroup
from callqueue.dispatch.publisher import DOUBT, Outbox, must_publish_first
from callqueue.dispatch.release_pass import Pass, Taker, release, tell_of_unfit
from callqueue.ledger import account, holds, ledger_time, ready_calls, tallies
from callqueue.ledger.settings import Party, book_in_force
from callqueue.limits import in_force
from callqueue.limits.budgets import Book
from callqueue.look.alive import BEAT, RUN, STEADY
from callqueue.maintenance import cleanup

SHORT = 0.01  # seconds: a shorter wait is not worth being woken from
DEAF = 0.2  # seconds for which it may not notice that it is to stop
REST = 0.05  # seconds for which senders wake nobody after a dispenser was woken for nothing twice
ANSWERS = 0.005  # seconds between two looks for answers, while calls wait for one
AWAY = 1.0  # seconds between two looks for a database, or tries with a broker, that is away
SENT = 0.025  # seconds between two looks at what is being published
MINUTE = 60.0  # seconds between two events that say the same
LEAVING = 5.0  # seconds that one which ends waits for what is done beside its loop
# how long it may take to put right what was written as the clock jumped
MENDING = timedelta(seconds=2)
WENT_BACK = "the database went back in time: what it forgot may still count at the provider"
_told: dict[str, float] = {}  # by database: when (monotonic) this process said that beat runs


class Listener:
    """What a dispenser waits by, in its thread. On PostgreSQL an idle one wakes at the commit of a
    `send`; elsewhere it just waits. A NOTIFY takes a lock that all commits share, so busy senders
    must not make one each: an idle dispenser holds an advisory lock, and the trigger on calls
    notifies only meanwhile. What is missed (a pooler, another holder) is made up for by the next
    look, POLL seconds later.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        # armed: it has the lock by which senders notify
        self._is_armed = self._is_listening = self._was_for_nothing = False
        self._not_before = 0.0  # when (monotonic) it may be armed again
        self._connection: object | None = None  # that can listen

    def wait(self, stop: threading.Event, seconds: float) -> set[str]:
        """Wait so long at most, or until a send: the rules that may have calls now, "" for any."""
        if seconds < SHORT or time.monotonic() < self._not_before:
            self.disarm()
        elif self._follow_connection():
            if self._is_armed:
                return self._hear(min(seconds, DEAF))
            self._is_armed = database.raise_flag(self.using)
            self._set_listening(self._is_armed)  # else senders would wake this backend, too
            if self._is_armed:
                return {""}  # for what was sent between the last look and now
        stop.wait(seconds)
        return set()

    def _hear(self, seconds: float) -> set[str]:
        """Wait for a sender's word. After two for nothing, senders are let be for a while."""
        told = database.wait_for_notification(self.using, seconds)
        if told:
            if self._was_for_nothing:
                self._not_before = time.monotonic() + REST
            self._was_for_nothing = True
        return told

    def note_useful_wake(self) -> None:
        self._was_for_nothing = False

    def disarm(self) -> None:
        if self._is_armed and self._connection is database.raw_connection(self.using):
            database.lower_flag(self.using)
        self._is_armed = False

    def close(self) -> None:
        self.disarm()
        if self._connection is not None and self._connection is database.raw_connection(self.using):
            self._set_listening(False)
        self._connection = None

    def _follow_connection(self) -> bool:
        """Whether its connection can listen; on a new one it begins anew."""
        raw = database.raw_connection(self.using)
        if raw is None or raw is not self._connection:
            self._is_armed, self._is_listening, self._connection = False, False, None
            if raw is not None and database.can_listen(self.using):
                self._connection = raw
        return self._connection is not None

    def _set_listening(self, wanted: bool) -> None:
        if wanted != self._is_listening:
            database.set_listening(self.using, wanted)
            self._is_listening = wanted


class Maker(Protocol):
    """Who makes in this process what is released, or a part of it: see callqueue.maker."""

    kind: str  # as DispenserState has it

    def room(self) -> Room:
        """How many calls may be released now."""

    def taker(self) -> Taker | None:
        """Who begins what the next pass releases, and makes it; None where nobody here does."""


class Dispenser:
    """A dispenser of one process: `run` until told to stop, or `run_once`, then `leave`.
    Released attempts that the `maker` begins are made here, and the others go to `publish`.
    `settings` gives the book of its settings. `rules`: it serves only their groups; empty: all.
    """

    def __init__(
        self,
        using: str = "default",
        *,
        rules: Sequence[str] = (),
        publish: publisher.Publish = publisher.publish,
        maker: Maker | None = None,
        settings: Callable[[], Book] = lambda: conf.current().book,
        name: str = "",
    ) -> None:
        self.using, self.only, self.maker = using, frozenset(rules), maker
        self.outbox = Outbox(using, publish, self._broker_refused)
        self.settings = settings
        self.name = name or name_of_process(os.getpid())
        self.groups: dict[tuple[str, ...], RuleGroup] = {}
        # groups that new settings replaced before all that they released was published
        self._former: list[RuleGroup] = []
        self.membership = Membership(using, self.name, settings)
        if (maker is None or maker.kind != RUN) and publish is publisher.publish:
            self.membership.broker = broker.address(current_app)
        self.chores = Chores(using, self.membership.heartbeat, cleans=maker is not None)
        self._listener = Listener(using)
        self._poll_at = 0.0  # when to look for calls that are ready
        self._emitted: dict[str, float] = {}  # by event: when (monotonic) it was emitted last

    def run(self, *, stop: threading.Event | None = None, seconds: float | None = None) -> None:
        """Release until `stop` is set, or for `seconds`. A database or broker is waited for; so is,
        for some seconds at the end, what is done beside the loop.
        """
        stop, self.membership.runs = stop or threading.Event(), True
        # Of somebody's transaction, a thread beside this one would see nothing.
        self.chores.is_loop = not database.in_transaction(self.using)
        if self.maker is not None:
            self.membership.kind = self.maker.kind
        elif seconds is None and not self.only:
            self.membership.kind = STEADY
        end, pause = math.inf if seconds is None else time.monotonic() + seconds, 0.0
        try:
            while not stop.is_set() and time.monotonic() < end:
                try:
                    self.wait_until_clock_settles(stop)
                    wanted = self.tick()
                    left = max(0.0, min(wanted, end - time.monotonic()))
                    self._on_notify(self._listener.wait(stop, left))
                    pause = 0.0
                except (DatabaseError, InterfaceError) as error:
                    self._reconnect(error, is_again=pause > 0)
                    stop.wait(max(0.0, min(pause, end - time.monotonic())))
                    pause = AWAY
        finally:
            with suppress(DatabaseError, InterfaceError):
                self.outbox.end(self._all_groups, broker.PATIENCE + LEAVING)
            self.chores.wait(LEAVING)
            database.close_kept(self.using)
            with suppress(DatabaseError, InterfaceError):
                self._listener.close()

    def leave(self) -> None:
        """End this dispenser: its opinion counts no more, unless another that lives has it."""
        self.membership.leave()

    def wait_until_clock_settles(self, stop: threading.Event) -> None:
        # Only others can have seen a jump just before this process came. They look this often.
        left = ledger_time.watch(self.using).seconds_to_settle()
        if left > 0 and has_other_dispensers(self.using, self.name):
            stop.wait(left)

    def run_once(self, *, maintain: bool = True) -> int:
        """Do a round of chores (`maintain`), then release what may go; the count of attempts."""
        released: list[int] = []
        database.persist(self.using, lambda: self._run_once(maintain, released), during="release")
        return sum(released)

    def _run_once(self, maintain: bool, released: list[int]) -> None:
        self.outbox.undo_doubtful(self._all_groups)
        self._follow_settings()
        if maintain:
            self.chores.maintain()
        for group in self.groups.values():
            goes_on = not group.unpublished_from
            while goes_on:
                done = self._release(group)
                released.append(len(done.released))
                goes_on = done.next_look.goes_on

    def tick(self) -> float:
        """One turn of the loop: what is due is done; the seconds until the next turn."""
        self.outbox.undo_doubtful(self._all_groups)
        self._follow_settings()
        self.chores.maintain_if_due()
        self._poll_ready_if_due()
        self._poll_answers()
        for group in self._all_groups:
            self._do_apart(group, self.outbox.notice_if_done)
        for group in self.groups.values():
            if self._wants_pass(group) and not must_publish_first(self._all_groups):
                self._do_apart(group, self._release)
        return self._seconds_to_next_turn()

    def _wants_pass(self, group: RuleGroup) -> bool:
        """Whether a pass is due, with room for it. Where room grew, one is wanted soon."""
        is_short = group.next_look.on_room
        if self.maker is None or not (is_short or group.is_due(time.monotonic())):
            return group.is_due(time.monotonic())
        room = self._room(self.maker)  # only here: that looks at all that is in flight
        if is_short and room.is_more_than(group.room_left):
            group.want_pass_soon()
        return group.is_due(time.monotonic()) and room.most >= 1

    def _do_apart(self, group: RuleGroup, work: Callable[[RuleGroup], object]) -> None:
        """Do `work`. A fault in it puts off this group alone; database errors are raised."""
        try:
            work(group)
        except (DatabaseError, InterfaceError):
            raise
        except Exception as error:
            group.put_off(time.monotonic() + AWAY)
            why = f"{type(error).__name__}: {error}"
            self._emit_once_a_minute("pass_failed", rules=",".join(group.rules), error=why)

    def _release(self, group: RuleGroup) -> Pass:
        """Run a pass, and have made or published what it released, once that is committed."""
        taker = None if self.maker is None else self.maker.taker()
        room = ROOMY if self.maker is None else self._room(self.maker)
        group.doubtful_worker = taker.worker if taker is not None else ""
        group.unpublished_from = group.unpublished_from or clocks.monotonic()
        done = self._run_pass(group, room, taker)
        # What there is room for yet may stand behind what there was none for.
        group.room_left = NO_ROOM if done.released else room
        group.doubtful_worker = ""
        tell_of_unfit(self.using, done)
        if done.released:
            rules = ",".join(group.rules)
            events.emit("calls_released", rules=rules, attempts=len(done.released))
        if rest := [one for one in done.released if not one.is_begun]:
            beside = self.chores.is_loop and not current_app.conf.task_always_eager
            self.outbox.send(group, rest, beside=beside)
        else:
            group.unpublished_from = 0.0
        return done

    def _room(self, maker: Maker) -> Room:
        """What may be released now: while the broker is away, no more than this process makes."""
        if time.monotonic() >= self.outbox.alone_until:
            return maker.room()
        taker = maker.taker()
        return Room(taker.most or 0, 0) if taker is not None else NO_ROOM

    def _run_pass(self, group: RuleGroup, room: Room, taker: Taker | None) -> Pass:
        book, last = self.membership.book, group.next_look.streak
        done = release(self.using, group.rules, book, last=last, room=room, taker=taker)
        self.membership.is_outdated |= done.next_look.joins
        group.set_next_look(done.next_look, time.monotonic())
        return done

    def _broker_refused(self, group: RuleGroup, error: publisher.BrokerAway) -> None:
        rules = ",".join(group.rules)
        self._emit_once_a_minute("broker_away", rules=rules, error=str(error))
        group.put_off(time.monotonic() + AWAY)

    def _poll_ready_if_due(self) -> None:
        """Wake the groups that rest, and have rested long enough, where calls are ready."""
        now = time.monotonic()
        if now < self._poll_at:
            return
        own = self.settings().rules
        polled = [
            rule
            for group in self.groups.values()
            if group.rests and group.look_at <= now
            for rule in group.rules
            if rule in own
        ]
        self._wake_groups(ready_calls.rules_with_ready(self.using, polled))
        self._poll_at = time.monotonic() + conf.current().poll

    def _on_notify(self, rules: set[str]) -> None:
        """Wake the groups of the rules that senders name; "": look soon which have ready calls."""
        if "" in rules:
            self._poll_at = 0.0
        self._wake_groups(rules)

    def _wake_groups(self, rules: Set[str]) -> None:
        for group in self.groups.values():
            if group.rests and not rules.isdisjoint(group.rules):
                group.wake()
                self._listener.note_useful_wake()

    def _poll_answers(self) -> None:
        """Of groups that wait for an answer, make a pass due where the ledger has news of them."""
        waiting = self._waiting_for_answers()
        if waiting:
            glances = account.glances(self.using, [rule for one in waiting for rule in one.rules])
            for group in waiting:
                group.notice_answers(glances)

    def _waiting_for_answers(self) -> list[RuleGroup]:
        return [group for group in self.groups.values() if group.waits_for_answer]

    def _seconds_to_next_turn(self) -> float:
        now = time.monotonic()
        wakes = [self._poll_at, self.chores.next_round_at]
        sending = [group for group in self._all_groups if group.sending is not None]
        has_room = self.maker is None or self._room(self.maker).most >= 1
        if has_room and not must_publish_first(sending):
            known = [group for group in self.groups.values() if not group.unpublished_from]
            wakes += [group.look_at for group in known if not group.rests]
        is_short = any(group.next_look.on_room for group in self.groups.values())
        if is_short or not has_room or self._waiting_for_answers():
            wakes.append(now + ANSWERS)
        if any(group.is_in_doubt for group in self._all_groups):
            wakes.append(now + DOUBT)
        if sending:
            wakes.append(now + SENT)
        return max(0.0, min(wakes) - now)

    def _follow_settings(self) -> None:
        """If what is in force has changed, serve its readable groups that have own rules."""
        book = self.membership.follow_settings()
        if book is None:
            return
        own, before = book.settings.rules.keys(), self._all_groups
        self.groups = {
            rules: self.groups.get(rules, RuleGroup(rules))
            for rules in book.distinct_groups()
            if not own.isdisjoint(rules) and book.unreadable.isdisjoint(rules)
            if not self.only or not self.only.isdisjoint(rules)
        }
        here = set(map(id, self.groups.values()))
        self._former = [one for one in before if one.unpublished_from and id(one) not in here]

    @property
    def _all_groups(self) -> list[RuleGroup]:
        return [*self.groups.values(), *self._former]

    def _reconnect(self, error: Exception, *, is_again: bool = True) -> None:
        """Drop the connection, for a new one. An event if `is_again`: once may be a deadlock."""
        if is_again:
            why = f"{type(error).__name__}: {str(error).strip()[:200]}"
            self._emit_once_a_minute("database_away", error=why)
        connections[self.using].close()
        self.chores.start_over()

    def _emit_once_a_minute(self, event: str, **facts: Any) -> None:
        now = time.monotonic()
        if now - self._emitted.get(event, -MINUTE) >= MINUTE:
            self._emitted[event] = now
            events.emit(event, **facts)


@lru_cache
def name_of_process(pid: int) -> str:
    """A name that no other dispenser has: containers often share hosts' names and process ids."""
    return f"{texts.host_name()}:{pid}:{secrets.token_hex(2)}"


# --- A dispenser among the others: its signs of life


class Membership:
    """A dispenser among the others: it gives signs of life, and goes by what is in force."""

    def __init__(self, using: str, name: str, settings: Callable[[], Book]) -> None:
        self.using, self.name, self.settings = using, name, settings
        self.party = Party(using)
        self.is_outdated = True
        self.runs = False  # it goes on running, so that its signs of life prove something
        self.kind, self.broker, self.digest = "", "", ""  # as DispenserState has them
        self._own: Book | None = None
        self._last_sign: OwnSign | None = None

    @property
    def book(self) -> Book | None:
        return self.party.book  # None before it has joined

    def heartbeat(self) -> None:
        """Give a sign of life, and one of its opinion; note whether others' have changed."""
        self._give_sign()
        self.is_outdated |= self.party.heartbeat()

    def follow_settings(self) -> Book | None:
        """Join anew if settings changed, here or elsewhere: the book in force then; else None."""
        own = self.settings()
        if own is self._own and not self.is_outdated:
            return None
        if self._own is None:  # this process may have had a dispenser before
            self.party.digest = last_digest_of(self.using, self.name)
        self.digest = in_force.digest_of(in_force.opinion_of(own))
        self._give_sign()
        book = self.party.join(own)
        self._own, self.is_outdated = own, False
        return book

    def leave(self) -> None:
        self.is_outdated, self.digest = True, ""
        with suppress(DatabaseError, InterfaceError):  # one that is away notices by the silence
            note_dispenser_gone(self.using, self.name)
            self.party.leave()

    def _give_sign(self) -> None:
        """Write one. If the database has forgotten the last, every rule is held before."""
        last = self._last_sign
        if last is not None and has_database_gone_back(self.using, self.name, last):
            hold_everything(self.using)
        sign = give_sign_of_life(self.using, self.name, self.kind, self.broker, self.digest)
        self._last_sign = sign if self.runs else None


def stand_by(using: str, dispenser: Dispenser) -> None:
    """Have beat's task release nothing, hold no limits, and give a sign of life now and then."""
    if dispenser.membership.book is not None:
        dispenser.leave()
    now = time.monotonic()
    if now - _told.get(using, -HEARTBEAT) >= HEARTBEAT:
        _told[using] = now
        give_sign_of_life(using, dispenser.name, BEAT)


@dataclass(frozen=True)
class OwnSign:
    """A sign of life that this process gave, and what the database had by then."""

    at: datetime
    newest: tuple[int, datetime, str] | None  # attempt then: its id, its release, its rule
    moved: int = 0  # microseconds: wall time less ledger time


def give_sign_of_life(
    using: str, name: str, kind: str = "", broker: str = "", digest: str = ""
) -> OwnSign | None:
    """Write a dispenser's sign. Returns it; None, if it proves nothing: the clock may be off."""
    reading = ledger_time.read(using)
    has_jumped = ledger_time.watch(using).keep_and_credit(reading) is None
    now = from_us(reading.at)
    rows = tables.dispensers(using)
    said = {"seen_at": now, "kind": kind, "broker": broker[:255], "digest": digest}
    if not rows.filter(pk=name).update(**said):
        row = tables.DispenserState(name=name, started_at=now, **said)
        rows.bulk_create([row], ignore_conflicts=True)
    attempts = tables.attempts(using).order_by("-pk")
    newest = attempts.values_list("pk", "released_at", "rule").first()
    return None if has_jumped else OwnSign(now, newest, reading.moved)


def last_digest_of(using: str, name: str) -> str:
    """The digest of the opinion that a dispenser had last; "" if it took leave or is unknown."""
    return tables.dispensers(using).filter(pk=name).values_list("digest", flat=True).first() or ""


def note_dispenser_gone(using: str, name: str) -> None:
    """Write that a dispenser has gone, and holds no opinion any more."""
    tables.dispensers(using).filter(pk=name).update(digest="")


def has_other_dispensers(using: str, name: str) -> bool:
    """Whether others than this dispenser run, or have run and are remembered."""
    return tables.dispensers(using).exclude(pk=name).exists()


def has_database_gone_back(using: str, name: str, last: OwnSign) -> bool:
    """Whether the database, as a backup or a copy that lagged, has forgotten a dispenser's last
    sign. A row that is gone proves nothing where the ledger still has the attempt that was its
    newest then, or where others may have pruned the row for its age.
    """
    seen = tables.dispensers(using).filter(pk=name).values_list("seen_at", flat=True).first()
    if seen is None:
        is_recent = ledger_time.now(using) - last.at < cleanup.dispensers_remembered_for(using)
        return not _has_attempt(using, last.newest) and is_recent
    # If the clock had jumped before the last sign, that was put right once somebody saw the jump;
    # and so was, for as long as MENDING, what was written while things were put right.
    by = ledger_time.moved(using) - last.moved
    is_mended = by != 0
    right = last.at - max(0, by) * MICROSECOND - (MENDING if is_mended else timedelta(0))
    if seen < right:
        return True
    # An older sign may have been put right as well: a server was set back, its clock and its data.
    return is_mended and _has_forgotten_newest(using, last)


def _has_forgotten_newest(using: str, last: OwnSign) -> bool:
    """Whether the attempt that was the newest then is gone, though nobody prunes what may count."""
    if last.newest is None or _has_attempt(using, last.newest):
        return False
    _, released_at, rule = last.newest
    window = tallies.counting_times(book_in_force(using)).get(rule, tallies.MARGIN)
    return ledger_time.now(using) - released_at < timedelta(microseconds=window)


def _has_attempt(using: str, attempt: tuple[int, datetime, str] | None) -> bool:
    return attempt is not None and bool(
        tables.attempts(using).filter(pk=attempt[0], released_at=attempt[1]).exists()
    )


def hold_everything(using: str) -> None:
    """Hold each rule of these settings until what was forgotten has aged: for its longest window,
    or a call's time if longer. No pause shortens this: `control.resume(restored=True)` ends it.
    """
    config, book = conf.current(), book_in_force(using)
    for name, rule in config.rules.items():
        windows = [budget.limit.window_us for budget in book.budgets[name]]
        seconds = max(max(windows, default=0) / 1_000_000, rule.total_timeout + config.grace)
        lasts = timedelta(seconds=seconds)
        holds.lay(using, [name], "rule", "", lasts, WENT_BACK, source="restored")
    events.emit("ledger_went_back", rules=len(config.rules), reason=WENT_BACK)
