"""Tells the result backend of tasks whose calls ended while no run said so: they expired, were
cancelled, are unknown, or failed since they could not be run. Whoever waits for the result, and a
chord that waits for its part, then go on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery import current_app, signals
from celery.app.task import Context
from celery.exceptions import WorkerLostError
from celery.states import READY_STATES

from callqueue import states, tables
from callqueue.handlers.celery_message import request_of
from callqueue.handlers.celery_task import TaskGaveUp

_REASONS = {states.EXPIRED: "expired", states.CANCELLED: "revoked"}


def tell(using: str, call_ids: Sequence[int]) -> int:
    """Write the ends of these calls that the backend does not know; the count of them."""
    ended = tables.calls(using).final().exclude(status=states.DONE)
    found = ended.filter(pk__in=call_ids, method="celery_task").order_by("pk")
    return sum([_tell(call) for call in found])


def _tell(call: tables.CallQueue) -> bool:
    data: Any = call.call_data
    params = data.get("params") if isinstance(data, Mapping) else None
    params = params if isinstance(params, Mapping) else {}
    task = current_app.tasks.get(params.get("name")) or _unknown(str(params.get("name")))
    try:
        told = request_of(task, params, str(call.idempotency_key), call.failed_count)
    except (ValueError, TypeError, AttributeError):  # it never ran: its message cannot be read
        return False
    request = Context(told, called_directly=False)
    is_wanted = not request.ignore_result
    if not (is_wanted or request.chord) or task.backend.get_state(request.id) in READY_STATES:
        return False
    why = call.error_message.partition("\n")[0]
    if call.status in _REASONS:
        task.backend.mark_as_revoked(
            request.id, _REASONS[call.status], request=request, store_result=is_wanted
        )
        signals.task_revoked.send(
            sender=task,
            request=request,
            terminated=False,
            signum=None,
            expired=call.status == states.EXPIRED,
        )
    else:
        error = WorkerLostError(why) if call.status == states.UNKNOWN else TaskGaveUp(why)
        task.backend.mark_as_failure(request.id, error, request=request, store_result=is_wanted)
    return True


def _unknown(name: str) -> Any:
    """Stands for a task that this worker does not have: the backend is the same."""
    task = current_app.Task()
    task.name = name
    return task
