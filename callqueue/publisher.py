"""Hands released attempts to Celery: one message for one or several attempts, carrying their ids and nothing else.

Enters after the commit that charged the attempts. A publish that fails at once is undone at once; one that is lost, or
whose process dies here, is taken back by recovery when the attempts' lease ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from callqueue import database, events, messages, states
from callqueue.handlers import HTTP_METHODS
from callqueue.releasing import Released

MOST = 32  # attempts in a message: larger ones save little more, and all of one share its fate when a worker dies
SPREAD = 4  # messages that a pass makes for a queue before any of them carries more than one attempt

Message = tuple[str, list[int]]  # the queue, and the attempts' ids
Publish = Callable[[str, Sequence[Message]], bool]


def pack(released: Iterable[Released]) -> list[Message]:
    """Attempts as messages: only HTTP calls share one, and only where there are several for the same queue."""
    packed: list[Message] = []
    for (queue, alone, waits), group in groupby(sorted(released, key=_kind), key=_kind):
        ids = [r.attempt_id for r in group]
        spread = 1 if waits else SPREAD  # what waits for its slot does so side by side; what waits for a worker wants no second
        size = 1 if alone else max(1, min(MOST, -(-len(ids) // spread)))
        packed += [(queue, ids[i : i + size]) for i in range(0, len(ids), size)]
    return packed


def _kind(released: Released) -> tuple[str, bool, bool]:
    return released.queue, released.method not in HTTP_METHODS, released.waits


def publish(using: str, batch: Sequence[Message]) -> bool:
    """Send the messages; False when the broker refused one: it and those after it are undone."""
    from celery import current_app

    from callqueue.tasks import make_api_call

    for position, (queue, ids) in enumerate(batch):
        try:
            if current_app.conf.task_always_eager:
                make_api_call.apply_async((ids,), _options(using))
                continue
            messages.send(make_api_call, (ids,), _options(using), queue=queue)
        except Exception as error:
            events.tell("publish_failed", queue=queue, messages=len(batch) - position, error=type(error).__name__)
            undo(using, [pk for _, rest in batch[position:] for pk in rest])
            return False
    return True


def ask_to_recover(using: str, queues: Iterable[str]) -> None:
    """Have a worker of each of these queues recover, and reconcile: what takes the network is not for a dispenser."""
    from callqueue.tasks import recover_lost_calls

    for queue in queues:
        try:
            recover_lost_calls.apply_async((), _options(using), queue=queue or None, ignore_result=True, retry=False, expires=30)
        except Exception as error:
            events.tell("broker_away", during="reconcile", error=type(error).__name__)
            return


def undo(using: str, attempt_ids: Sequence[int]) -> int:
    """Void attempts that no worker has begun, and let their calls wait again; the count of them."""
    from callqueue.models import CallAttempt, CallQueue

    with database.writing(using):
        call_ids = CallAttempt.objects.using(using).void(attempt_ids)
        calls = CallQueue.objects.using(using).filter(pk__in=call_ids, status=states.DISPATCHED)
        count = calls.filter(failed_count=0, throttled_count=0).update(status=states.NEW, ready=True)
        count += calls.update(status=states.ERROR, ready=True)
    if count:
        events.tell("attempts_voided", calls=count)
    return int(count)


def _options(using: str) -> dict[str, str]:
    return {} if using == "default" else {"using": using}
