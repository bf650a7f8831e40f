"""Tells the result backend of tasks whose calls ended while no run said so: they expired, were
cancelled, are unknown, or failed since they could not be run. Whoever waits for the result, and a
chord that waits for its part, then go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery import current_app, signals
from celery.app.task import Context
from celery.exceptions import WorkerLostError
from celery.states import READY_STATES

from callqueue import states, tables
from callqueue.handlers import celery_json
from callqueue.handlers.task_request import request_of
from callqueue.handlers.task_run import TaskGaveUp

_REASONS = {states.EXPIRED: "expired", states.CANCELLED: "revoked"}


def tell(using: str, call_ids: Sequence[int]) -> int:
    """Write the ends of these calls that the backend does not know; the count of them."""
    ended = tables.calls(using).final().exclude(status=states.DONE)
    found = ended.filter(pk__in=call_ids, method="celery_task").order_by("pk")
    return sum([_tell(call) for call in found])


def _tell(call: tables.CallQueue) -> bool:
    params = _params_of(call)
    task = current_app.tasks.get(params.get("name")) or _unknown(str(params.get("name")))
    request = _request(task, params, call)
    if request.ignore_result and not request.chord:
        return False
    if task.backend.get_state(request.id) in READY_STATES:
        return False
    wanted = not request.ignore_result
    if call.status in _REASONS:
        reason = _REASONS[call.status]
        task.backend.mark_as_revoked(request.id, reason, request=request, store_result=wanted)
        is_expired = call.status == states.EXPIRED
        signals.task_revoked.send(
            sender=task, request=request, terminated=False, signum=None, expired=is_expired
        )
    else:
        why = call.error_message.partition("\n")[0]
        is_lost = call.status == states.UNKNOWN
        error = WorkerLostError(why) if is_lost else TaskGaveUp(why)
        task.backend.mark_as_failure(request.id, error, request=request, store_result=wanted)
    return True


def _unknown(name: str) -> Any:
    """Stands for a task that this worker does not have: the backend is the same."""
    task = current_app.Task()
    task.name = name
    return task


def _params_of(call: tables.CallQueue) -> Any:
    data: Any = call.call_data
    params = data.get("params") if isinstance(data, Mapping) else None
    if not isinstance(params, Mapping):
        return {}
    is_typed = (params.get("options") or {}).get("typed")
    plain: Mapping[str, Any] = json.loads(json.dumps(params, default=repr))  # it may be kept
    return celery_json.decoded(plain) if is_typed else plain


def _request(task: Any, params: Mapping[str, Any], call: tables.CallQueue) -> Any:
    args, kwargs = list(params.get("args") or ()), dict(params.get("kwargs") or {})
    request = request_of(task, params, str(call.idempotency_key), call.failed_count)
    return Context(request, args=args, kwargs=kwargs, called_directly=False)
