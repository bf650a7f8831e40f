"""QueuedResult: the Celery result of a task that waits as a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from callqueue import states
from callqueue.exceptions import AnswerCut

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
    """A Celery result that carries its call. Without a result backend, `state` and `result` are
    read from the call.
    """

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
            return {"task_id": self.id, **_meta_of(self.call)}
        meta = super()._get_task_meta()
        if self.ignored or meta.get("status") != "PENDING":
            return meta
        of_row = {"task_id": self.id, **_meta_of(self.call)}
        return meta if of_row["status"] == "STARTED" else of_row  # Celery's to say, if anybody's


def _meta_of(call: CallQueue) -> dict[str, Any]:
    """What a result backend would say, from the call's row and its last attempt."""
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
