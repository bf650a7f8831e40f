"""The results of tasks that wait as calls: QueuedResult, whose caller has the call; and what tells
the result backend of a call's end that no run told: so whoever waits, a chord too, goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery import current_app, signals
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import TaskRevokedError, WorkerLostError
from celery.result import AsyncResult
from celery.states import READY_STATES

from callqueue import states, tables
from callqueue.exceptions import AnswerCut
from callqueue.handlers.celery_task import TaskGaveUp, request_of

if TYPE_CHECKING:
    from callqueue.models import CallQueue

_STATES = {
    states.NEW: "PENDING",
    states.DISPATCHED: "STARTED",
    states.ERROR: "RETRY",
    states.DONE: "SUCCESS",
    states.FAILED: "FAILURE",
    states.UNKNOWN: "FAILURE",
    states.CANCELLED: "REVOKED",
    states.EXPIRED: "REVOKED",
}

_REVOKED = {states.CANCELLED: "revoked", states.EXPIRED: "expired"}


class QueuedResult(AsyncResult):
    """Carries its call, from which `state` and `result` are read where no backend knows them."""

    def __init__(self, *args: Any, call: CallQueue | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.call = call

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """The task's result, once it is there: see celery.result.AsyncResult.get."""
        if isinstance(self.backend, RPCBackend):
            raise NotImplementedError(
                "the result backend rpc:// cannot answer for a QueuedTask: its answers go to the "
                "process that sent a message, and a call is none. Use Redis or a database, or read "
                "`result.call`"
            )
        return super().get(*args, **kwargs)

    wait = get

    def revoke(self, *args: Any, **kwargs: Any) -> None:
        """Cancel the call; one that a worker has begun goes on. `terminate` is not offered."""
        if self.call is not None:
            type(self.call).objects.using(self.call._state.db).filter(pk=self.call.pk).cancel()

    def _get_task_meta(self) -> Any:
        if self.call is None:
            return super()._get_task_meta()
        if isinstance(self.backend, DisabledBackend):
            return {"task_id": self.id, **_read_task_meta(self.call)}
        meta = super()._get_task_meta()
        if self.ignored or meta.get("status") != "PENDING":
            return meta
        of_row = {"task_id": self.id, **_read_task_meta(self.call)}
        return meta if of_row["status"] == "STARTED" else of_row  # STARTED is the backend's to say


def _read_task_meta(call: CallQueue) -> dict[str, Any]:
    fresh = type(call).objects.using(call._state.db).filter(pk=call.pk).first()
    if fresh is None:
        return {"status": "PENDING", "result": None}
    meta: dict[str, Any] = {"status": _STATES[fresh.status], "result": None, "traceback": None}
    if fresh.status in (states.CANCELLED, states.EXPIRED):
        meta["result"] = TaskRevokedError(_REVOKED[fresh.status])
    if fresh.status in (states.FAILED, states.UNKNOWN, states.ERROR):
        meta["result"] = RuntimeError(fresh.error_message.partition("\n")[0])
        meta["traceback"] = fresh.error_message
    if fresh.status == states.DONE and (answer := fresh.answer) is not None:
        try:
            meta["result"] = answer.json(scrubbed=True)
        except AnswerCut as cut:
            meta["result"] = cut
    return meta


# --- Ends that no run has told


def write_ends(using: str, call_ids: Sequence[int]) -> int:
    """Tell the backend how these tasks' calls ended, DONE ones aside; how many it was told of."""
    ended = tables.calls(using).final().exclude(status=states.DONE)
    return sum([_write_end(call) for call in ended.filter(pk__in=call_ids).order_by("pk")])


def _write_end(call: tables.CallQueue) -> bool:
    """Tell the backend how it ended (a revoke: by signal, too), if it lacks that; whether told."""
    data: Any = call.call_data
    params = data.get("params") if isinstance(data, Mapping) else None
    params = params if isinstance(params, Mapping) else {}
    task = current_app.tasks.get(params.get("name")) or _unregistered_task(str(params.get("name")))
    try:
        told = request_of(task, params, str(call.idempotency_key), call.failed_count)
    except (ValueError, TypeError, AttributeError):  # it never ran: its message cannot be read
        return False
    request = Context(told, called_directly=False)
    is_wanted = not request.ignore_result
    if not (is_wanted or request.chord) or task.backend.get_state(request.id) in READY_STATES:
        return False
    why = call.error_message.partition("\n")[0]
    if call.status in _REVOKED:
        task.backend.mark_as_revoked(
            request.id, _REVOKED[call.status], request=request, store_result=is_wanted
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


def _unregistered_task(name: str) -> Any:
    task = current_app.Task()
    task.name = name
    return task
