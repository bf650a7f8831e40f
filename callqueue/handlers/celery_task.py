"""celery_task: runs a registered Celery task in this worker, under the call's limits; its result
lands in the attempt.

Celery's own tracer runs it, so that signals, hooks, callbacks, chains and chords see what they
always see. A failure or a retry goes back to the table; errbacks and the result backend's FAILURE
come once, with the last attempt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import current_app, signals
from celery import states as celery_states
from celery.app.trace import ExceptionInfo, TraceInfo, build_tracer
from celery.exceptions import MaxRetriesExceededError
from kombu.exceptions import EncodeError

from callqueue import broker
from callqueue.handlers import celery_json, task_run
from callqueue.handlers.task_request import request_of
from callqueue.handlers.task_run import Asked, TaskGaveUp
from callqueue.outcome import GiveUp, HoldUntil, Outcome, RetryLater, Succeeded
from callqueue.security.log_scrubbing import cleaned

if TYPE_CHECKING:
    from callqueue.handlers import Context

HEAD, TAIL = 500, 1400  # characters of an error's own words, and of its traceback's end


def run_task(params: Mapping[str, Any], context: Context) -> Outcome:
    """Run the task `name` with `args` and `kwargs`, here and now. Its exception is a failure; its
    `retry` a retry later.

    A task may return an outcome of callqueue's, such as HoldUntil, as any handler may.
    """
    app = current_app._get_current_object()
    task = broker.registered(app, params["name"])
    if task is None:
        return GiveUp(
            f"this worker has no task {params['name']!r}; is its module imported by the worker?"
        )
    if (params.get("options") or {}).get("typed"):
        params = celery_json.decoded(params)
    args, kwargs = list(params.get("args") or ()), dict(params.get("kwargs") or {})
    request = _request(task, params, context)
    told: list[Outcome] = []
    information = partial(_Information, context, told)
    with task_run.running(task):
        tracer = build_tracer(
            task.name, task, eager=False, propagate=False, app=app, Info=information
        )
        done = tracer(request["id"], args, kwargs, request)
    if told:
        return told[-1]
    if done.info is not None:  # Ignore and Reject: the task wants no more of it
        return Succeeded(done.info.state)
    return Succeeded(_as_json(done.retval))


def _request(task: Any, params: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """The task's request, with what the call is."""
    retries = max(0, context.attempt - 1)
    return {
        **request_of(task, params, context.idempotency_key, retries),
        "callqueue": {
            "call_id": context.call_id,
            "attempt": context.attempt,
            "rule": context.rule,
            "key": context.key,
            "deadline": context.deadline.isoformat(),
        },
    }


class _Information(TraceInfo):  # type: ignore[misc]
    """Celery's account of a failure. It tells the table, and the backend only of the last."""

    retval: Any

    def __init__(self, context: Context, told: list[Outcome], state: str, retval: Any = None):
        super().__init__(state, retval)
        self._context, self._told = context, told

    def handle_retry(self, task: Any, req: Any, store_errors: bool = True, **kwargs: Any) -> Any:
        retry = self.retval
        changed = _changes(retry, req)
        outcome = _refused_change(changed) if changed else _asked_retry(retry, req)
        self._told.append(outcome)
        if changed or (self._context.is_last and not isinstance(outcome, HoldUntil)):
            self.state = celery_states.FAILURE
            self.retval = TaskGaveUp(retry.outcome.why) if isinstance(retry, Asked) else retry.exc
            if self.retval is None:
                self.retval = retry
            return super().handle_failure(task, req, store_errors=store_errors, call_errbacks=True)
        return super().handle_retry(task, req, store_errors=store_errors, **kwargs)

    def handle_failure(
        self, task: Any, req: Any, store_errors: bool = True, call_errbacks: bool = True
    ) -> Any:
        error, is_final = self.retval, _is_final(self.retval, req)
        einfo = ExceptionInfo((type(error), error, error.__traceback__))
        why = _worded("", error, str(einfo.traceback))
        if isinstance(error, TaskGaveUp):
            why = str(error)
        self._told.append(GiveUp(why) if is_final else RetryLater(why))
        if is_final or self._context.is_last:
            return super().handle_failure(
                task, req, store_errors=store_errors, call_errbacks=call_errbacks
            )
        self.state = celery_states.RETRY
        if store_errors:
            task.backend.mark_as_retry(req.id, error, einfo.traceback, request=req)
        task.on_retry(error, req.id, req.args, req.kwargs, einfo)
        signals.task_retry.send(sender=task, request=req, reason=error, einfo=einfo)
        return einfo


def _refused_change(changed: str) -> Outcome:
    return GiveUp(
        f"retry({changed}=...) is not offered: a call goes again as it was sent; send another"
    )


def _asked_retry(retry: Any, request: Any) -> Outcome:
    """A retry when the task says, or after the rule's backoff where Celery would back off."""
    if isinstance(retry, Asked):
        return retry.outcome
    after = None if getattr(request, "callqueue_backoff", False) else _seconds_until(retry)
    return RetryLater(_worded("the task asked to be retried", retry.exc or retry), after=after)


def _is_final(error: BaseException, request: Any) -> bool:
    """Whether another attempt cannot help: no retries are left, or no result can be stored."""
    return isinstance(error, MaxRetriesExceededError | EncodeError | TaskGaveUp) or bool(
        getattr(request, "callqueue_exhausted", False)
    )


def _changes(retry: Any, request: Any) -> str:
    """Which of the arguments `retry` would change: they are the call's, and stay."""
    if retry.sig is None:
        return ""
    if list(retry.sig.args) != list(request.args or ()):
        return "args"
    return "kwargs" if dict(retry.sig.kwargs) != dict(request.kwargs or {}) else ""


def _worded(what: str, error: BaseException, traceback: str = "") -> str:
    """What went wrong, cleaned, then cut: the error's own words, the end of its traceback."""
    said = cleaned(f"{type(error).__name__}: {error}".rstrip(": "))[:HEAD]
    head = f"{what}: {said}" if what else said
    return f"{head}\n{cleaned(traceback)[-TAIL:]}" if traceback else head


def _as_json(value: Any) -> Any:
    """The result as the attempt can keep it: as JSON, or its text where it has no such form."""
    try:
        return json.loads(json.dumps(value, default=str))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _seconds_until(retry: Any) -> float | None:
    when = retry.when
    if isinstance(when, int | float):
        return max(0.0, float(when))
    if isinstance(when, datetime):
        aware = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max(0.0, (aware - datetime.now(UTC)) / timedelta(seconds=1))
    return None
