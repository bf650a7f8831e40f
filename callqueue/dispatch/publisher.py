"""Hands released attempts to Celery: one message for one or several attempts, carrying their ids
and nothing else.

Enters after the commit that charged the attempts. A publish that fails at once is undone at once;
one that is lost, or whose process dies here, is taken back by recovery when the attempts' lease
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from celery import current_app

from callqueue import broker, conf, events, transitions
from callqueue.dispatch.charging import Released
from callqueue.handlers import HTTP_METHODS

# attempts in a message at most: larger ones save little more, and all of one share its fate when a
# worker dies
MESSAGE_SIZE = 32
# seconds until the broker drops a message that asks to recover, by its own clock; and until a
# worker does, whose clock may be ten minutes off, for brokers that drop nothing
RECOVER_LASTS = 30.0
RECOVER_EXPIRES = 3600.0
# messages that a pass makes for a queue before any of them carries more than one attempt
SPREAD = 4

MAKE_API_CALL, RECOVER = "callqueue.make_api_call", "callqueue.recover_lost_calls"

Message = tuple[str, list[int]]  # the queue, and the attempts' ids
Publish = Callable[[str, Sequence[Message]], object]  # raises BrokerAway


def pack(released: Iterable[Released]) -> list[Message]:
    """Attempts as messages: only HTTP calls of one rule share one, and only where there are several
    for the same queue.
    """
    packed: list[Message] = []
    kinds: dict[tuple[str, bool, bool, str], list[int]] = {}
    for one in sorted(released, key=_kind):
        kinds.setdefault((*_kind(one), one.rule), []).append(one.attempt_id)
    for (queue, alone, waits, _), ids in kinds.items():
        # what waits for its slot does so side by side; what waits for a worker wants no second
        spread = 1 if waits else SPREAD
        size = 1 if alone else max(1, min(MESSAGE_SIZE, -(-len(ids) // spread)))
        packed += [(queue, ids[i : i + size]) for i in range(0, len(ids), size)]
    return packed


def _kind(released: Released) -> tuple[str, bool, bool]:
    return released.queue, released.method not in HTTP_METHODS, released.waits


class BrokerAway(Exception):
    """The broker refused a message, or said nothing; the text says what it said."""


def publish(using: str, batch: Sequence[Message]) -> None:
    """Send the messages. BrokerAway where the broker refuses one: the rest is undone."""
    task = current_app.tasks[MAKE_API_CALL]
    for position, (queue, ids) in enumerate(batch):
        try:
            if current_app.conf.task_always_eager:
                task.apply_async((ids,), _options(using))
                continue
            broker.send(
                task, (ids,), _options(using), queue=queue, lasts=conf.current().release_lease
            )
        except Exception as error:
            why = broker.why_away(current_app, error)
            events.emit("publish_failed", queue=queue, messages=len(batch) - position, error=why)
            transitions.undo(using, [pk for _, rest in batch[position:] for pk in rest])
            raise BrokerAway(why) from None


def ask_to_recover(using: str, queues: Iterable[str]) -> None:
    """Have a worker of each queue recover and reconcile: a dispenser does not take the network."""
    for queue in queues:
        try:
            task, given = current_app.tasks[RECOVER], _options(using)
            broker.send(task, (), given, queue=queue, lasts=RECOVER_LASTS, expires=RECOVER_EXPIRES)
        except Exception as error:
            why = broker.why_away(current_app, error)
            events.emit("broker_away", during="reconcile", error=why)
            return


def _options(using: str) -> dict[str, str]:
    return {} if using == "default" else {"using": using}
