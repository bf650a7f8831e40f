"""Results of Django's Tasks API, read from a call's row and its attempts.

`base` is the API's module of that name: `django.tasks.base`, or that of the backport.
"""

from __future__ import annotations

import json
import re
import sys
from traceback import format_exception
from typing import TYPE_CHECKING, Any

from callqueue import states, tables
from callqueue.security.log_scrubbing import cleaned

if TYPE_CHECKING:
    from callqueue.models import CallQueue

HEAD, TAIL = 400, 1400  # characters of an error's own words, and of its traceback's end
_RAISED = re.compile(r"([A-Za-z_][\w.]*\.[A-Za-z_]\w*)(?:: |\n|$)")
_UNRAISED = "callqueue.exceptions.CallQueueError"


def result_of(base: Any, call: CallQueue, task: Any, alias: str) -> Any:
    """The result of a task, from its call. `alias` is the backend's name in TASKS."""
    begun = (
        tables.attempts(call._state.db or "default")
        .charged()
        .filter(call_id=call.pk, started_at__isnull=False)
    )
    attempts = list(begun.order_by("number"))
    params = call.call_data["params"]
    result = base.TaskResult(
        task=task,
        id=str(call.pk),
        status=_status(base, call, bool(attempts) and attempts[-1].finished_at is None),
        enqueued_at=call.created_dt,
        started_at=attempts[0].started_at if attempts else None,
        finished_at=call.finished_at_dt,
        last_attempted_at=attempts[-1].started_at if attempts else None,
        args=params["args"],
        kwargs=params["kwargs"],
        backend=alias,
        errors=_errors(base, call, attempts),
        worker_ids=[attempt.worker for attempt in attempts],
    )
    if call.status == states.DONE and attempts and attempts[-1].response_body:
        put(result, _return_value=json.loads(attempts[-1].response_body))
    return result


def error_of(base: Any, message: str) -> Any:
    """An error of an attempt, by the text that was recorded."""
    raised = _RAISED.match(message)
    _, _, traceback = message.partition("\n")
    path = raised.group(1) if raised and _is_known_error(raised.group(1)) else _UNRAISED
    return base.TaskError(exception_class_path=path, traceback=traceback or message)


def told_of(error: BaseException) -> str:
    """The error as an attempt keeps it: its class's path and its words, then the end of its
    traceback; cleaned, then cut.
    """
    kind = type(error)
    head = cleaned(f"{kind.__module__}.{kind.__qualname__}: {error}".rstrip(": ")).replace(
        "\n", " "
    )[:HEAD]
    return f"{head}\n{cleaned(''.join(format_exception(error)))[-TAIL:]}"


def put(result: Any, **values: Any) -> None:
    """Results are frozen; their backend is who writes them."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _status(base: Any, call: CallQueue, is_running: bool) -> Any:
    status = base.TaskResultStatus
    if call.status == states.DONE:
        return status.SUCCESSFUL
    if call.status in states.FINAL:
        return status.FAILED
    return status.RUNNING if is_running and call.status == states.DISPATCHED else status.READY


def _errors(base: Any, call: CallQueue, attempts: list[Any]) -> list[Any]:
    told = [a.error_message for a in attempts if a.error_message and a.outcome != states.SUCCEEDED]
    if not told and call.status in states.FINAL and call.status != states.DONE:
        told = [call.error_message or f"the call is {call.get_status_display()}"]
    return [error_of(base, message) for message in told]


def _is_known_error(path: str) -> bool:
    """Whether it names an exception that is there: the API imports what a result says was
    raised.
    """
    module, _, name = path.rpartition(".")
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return isinstance(found, type) and issubclass(found, BaseException)
