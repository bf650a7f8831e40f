"""The Celery tasks: each parses its message, calls one function of a room, and returns a count."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from celery import shared_task
from django.db.models import BigAutoField

from callqueue import broker, callbacks, conf, database, events
from callqueue.dispatch.dispenser import Dispenser, stand_by
from callqueue.execution import executor, process
from callqueue.integrations import queued_result
from callqueue.look import alive
from callqueue.maintenance import cleanup, reconcile, recovery

_dispensers: dict[str, Dispenser] = {}


@shared_task(
    name="callqueue.make_api_call",
    ignore_result=True,
    acks_late=True,
    reject_on_worker_lost=True,
    serializer="json",
    max_retries=0,
)
def make_api_call(
    attempt_ids: Sequence[int] | int, using: str = "default", here: bool = False, **newer: Any
) -> int:
    """Make the calls of these attempts; the count of those that this worker began. `here`: none of
    them is an HTTP call, and this task makes them itself. What a newer release adds is ignored.
    """
    ids = _valid_ids([attempt_ids] if isinstance(attempt_ids, int) else attempt_ids)
    request = make_api_call.request
    if request.is_eager or request.called_directly:
        return executor.execute(using, ids)
    return (process.make_calls_here if here else process.take_attempts)(using, ids, make_api_call)


def _valid_ids(given: Sequence[Any]) -> list[int]:
    # Whoever writes to the broker can send anything. An id that no database takes would fail the
    # statement that begins other messages' attempts, too.
    return [pk for pk in given if isinstance(pk, int) and 0 < pk <= BigAutoField.MAX_BIGINT]


def _kept_connection(task: Any, using: str) -> AbstractContextManager[None]:
    """A worker's connection, kept between its messages; who runs the task himself keeps his own."""
    is_own = task.request.is_eager or task.request.called_directly
    return nullcontext() if is_own else database.kept_connection(using)


@shared_task(name="callqueue.dispenser", ignore_result=True, serializer="json", max_retries=0)
def dispense(seconds: float | None = None, using: str = "default") -> int:
    """Release calls for `seconds` (None: nine tenths of the beat interval); none while a process or
    a worker dispenses all rules. Returns 0. Where eager, it does one round; the count of attempts.
    """
    dispenser = _dispensers.setdefault(using, Dispenser(using))
    if dispense.request.is_eager:
        return dispenser.run_once()
    with _kept_connection(dispense, using):
        if alive.is_outranked(using, alive.BEAT):
            stand_by(using, dispenser)
        else:
            dispenser.membership.kind = alive.BEAT
            # then the worker's slot is others'
            dispenser.run(seconds=conf.current().interval * 0.9 if seconds is None else seconds)
    return 0


@shared_task(
    name="callqueue.recover_lost_calls", ignore_result=True, serializer="json", max_retries=0
)
def recover_lost_calls(using: str = "default") -> int:
    """Take back what no worker began, end what fell silent, expire, reconcile; the count."""
    recovered = database.persist(using, lambda: recovery.recover(using), during="recovery")
    return recovered + reconcile.ask_hooks(using)


@shared_task(
    name="callqueue.cleanup_call_queue", ignore_result=True, serializer="json", max_retries=0
)
def cleanup_call_queue(using: str = "default", vacuum: bool = True) -> int:
    """Delete calls past their retention and vacuum; the count of calls deleted."""
    return cleanup.clean(using, vacuum=vacuum).calls


@shared_task(name=broker.ANNOUNCE, ignore_result=True, serializer="json", max_retries=0)
def announce(
    call_ids: Sequence[int],
    using: str = "default",
    event: str = "",
    facts: dict[str, Any] | None = None,
    **newer: Any,
) -> int:
    """Send the event's signal, if any; announce the ends of these calls; the count of announced."""
    events.send_signal_of(event, facts or {})
    if not call_ids:
        return 0
    with _kept_connection(announce, using):
        return callbacks.announce_owed_ends(using, call_ids, queued_result.write_ends)
