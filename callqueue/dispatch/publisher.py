"""Hands released attempts to Celery: one message for several attempts, with their ids alone. A
publish that fails is undone at once; one that is lost, recovery takes back when the lease ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from functools import partial

from celery import current_app

from callqueue import aside, broker, clocks, conf, database, events, transitions
from callqueue.broker import database_kwargs
from callqueue.dispatch.next_look import RuleGroup
from callqueue.dispatch.release_pass import SPREAD
from callqueue.handlers import HTTP_METHODS
from callqueue.ledger import ledger_time, rule_rows
from callqueue.ledger.ready_calls import Candidate

# attempts in a message at most: larger ones save little more, and all of one share its fate when a
# worker dies
MESSAGE_SIZE = 32
MAKE_API_CALL = "callqueue.make_api_call"
Message = tuple[str, list[int]]  # the queue, and the attempts' ids
Publish = Callable[[str, Sequence[Message]], object]  # raises BrokerAway
# seconds after a broker's refusal for which a process that makes calls itself releases no more than
# those: while the rest waits for the broker, it would make none. As many as the broker has been
# away by then, but no fewer and no more than these
ALONE, LONGEST_ALONE = 1.0, 20.0
PROMPT = 0.1  # seconds that the loop waits until what was released is published
DOUBT = 0.05  # seconds between two looks whether a commit that nobody knows of is over
SLOW = 8  # groups that have something published for longer, at most, before others are let be


def pack(released: Iterable[Candidate]) -> list[Message]:
    """Put releases into messages: HTTP calls of one rule and queue share some; others go alone."""
    packed: list[Message] = []
    kinds: dict[tuple[str, bool, bool, str], list[int]] = {}
    for one in sorted(released, key=_message_kind):
        kinds.setdefault((*_message_kind(one), one.rule), []).append(one.attempt_id)
    for (queue, alone, waits, _), ids in kinds.items():
        # what waits for its slot does so side by side; what waits for a worker wants no second
        spread = 1 if waits else SPREAD
        size = 1 if alone else max(1, min(MESSAGE_SIZE, -(-len(ids) // spread)))
        kind = IdsMadeHere if alone else list
        packed += [(queue, kind(ids[i : i + size])) for i in range(0, len(ids), size)]
    return packed


def _message_kind(released: Candidate) -> tuple[str, bool, bool]:
    return released.queue, released.method not in HTTP_METHODS, released.waits


class IdsMadeHere(list[int]):
    """The id of an attempt that the message's task makes itself, since it is no HTTP call."""


class BrokerAway(Exception):
    """The broker refused a message, or said nothing; the text says what it said."""


def publish(using: str, batch: Sequence[Message]) -> None:
    """Send the messages. BrokerAway where the broker refuses one: it and the rest are voided."""
    task = current_app.tasks[MAKE_API_CALL]
    for position, (queue, ids) in enumerate(batch):
        options = {
            **database_kwargs(using),
            **({"here": True} if isinstance(ids, IdsMadeHere) else {}),
        }
        try:
            if current_app.conf.task_always_eager:
                task.apply_async((ids,), options)
                continue
            broker.send(task, (ids,), options, queue=queue, lasts=conf.current().release_lease)
        except Exception as error:
            why = broker.why_away(current_app, error)
            events.emit("publish_failed", queue=queue, messages=len(batch) - position, error=why)
            transitions.void_and_log(using, [pk for _, rest in batch[position:] for pk in rest])
            raise BrokerAway(why) from None


OnRefusal = Callable[[RuleGroup, BrokerAway], None]


class Outbox:
    """What a dispenser has published. A group has no pass before that is done, or undone."""

    def __init__(self, using: str, publish: Publish, on_refusal: OnRefusal) -> None:
        self.using, self.publish, self.on_refusal = using, publish, on_refusal
        # until when (monotonic) a process that makes calls releases only those: no broker is asked
        self.alone_until = -math.inf
        self._away_since: float | None = None

    def send(self, group: RuleGroup, released: Sequence[Candidate], *, beside: bool) -> None:
        """Publish, here or `beside` the loop. Raises all but BrokerAway: then `undo_doubtful`."""
        messages = pack(released)
        if beside:
            group.sending = aside.Errand("publisher", lambda: self._send_beside(messages))
            self.notice_if_done(group, PROMPT)
            return
        error = None
        try:
            self.publish(self.using, messages)
        except BrokerAway as refusal:
            error = refusal
        self._note_end_of_sending(group, error)

    def notice_if_done(self, group: RuleGroup, within: float = 0.0) -> None:
        """Wait `within` seconds; notice if its messages are sent, or refused. Raises as `send`."""
        sending = group.sending
        if sending is None or not sending.done.wait(within):
            return
        group.sending = None
        if sending.error is not None and not isinstance(sending.error, BrokerAway):
            raise sending.error
        self._note_end_of_sending(group, sending.error)

    def _note_end_of_sending(self, group: RuleGroup, error: BrokerAway | None) -> None:
        """Note that the group's messages are published, or were refused and are voided."""
        if error is None:
            self.alone_until, self._away_since = -math.inf, None
        else:
            now = time.monotonic()
            self._away_since = now if self._away_since is None else self._away_since
            self.alone_until = now + max(ALONE, min(LONGEST_ALONE, now - self._away_since))
            self.on_refusal(group, error)
        group.unpublished_from = 0.0

    def undo_doubtful(self, groups: Iterable[RuleGroup]) -> None:
        """Void what groups in doubt released, and what others released since, unbegun, of the same
        rules. Where somebody has these rules' rows, later: the commit may come through yet.
        """
        for group in groups:
            if not group.is_in_doubt:
                continue
            with database.writing(self.using):
                is_over = rule_rows.try_lock(self.using, group.rules)
            if not is_over:
                continue
            if group.doubtful_worker:
                transitions.void_begun(self.using, group.doubtful_worker)
            now = ledger_time.now(self.using)
            since = now - timedelta(seconds=clocks.monotonic() - group.unpublished_from)
            transitions.void_released(self.using, group.rules, since)
            group.doubtful_worker, group.unpublished_from = "", 0.0

    def end(self, groups: Collection[RuleGroup], within: float) -> None:
        """Wait `within` seconds till all is published; undo the rest, for as long again at most."""
        end = time.monotonic() + within
        for group in groups:
            if group.sending is not None:
                group.sending.done.wait(max(0.0, end - time.monotonic()))
                if group.sending.done.is_set() and group.sending.error is None:
                    group.unpublished_from = 0.0
                group.sending = None
        undo = partial(self.undo_doubtful, groups)
        database.persist(self.using, undo, during="release", seconds=within)
        while any(group.unpublished_from for group in groups) and time.monotonic() < end:
            time.sleep(DOUBT)
            database.persist(self.using, undo, during="release", seconds=within)

    def _send_beside(self, messages: list[Message]) -> None:
        with database.kept_connection(self.using):
            self.publish(self.using, messages)


def must_publish_first(groups: Iterable[RuleGroup]) -> bool:
    """Whether so much is being published that no other group may release anything before."""
    return sum(group.sending is not None for group in groups) >= SLOW
