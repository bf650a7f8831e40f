"""celery_task: runs a registered Celery task in this worker, under the call's limits; its result
lands in the attempt.

Celery's own tracer runs it, so that signals, hooks, callbacks, chains and chords see what they
always see. A failure or a retry goes back to the table; errbacks and the result backend's FAILURE
come once, with the last attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery import current_app, signals
from celery import states as celery_states
from celery.app.trace import ExceptionInfo, TraceInfo, build_tracer
from celery.exceptions import MaxRetriesExceededError
from kombu.exceptions import EncodeError

from callqueue import broker
from callqueue.handlers.celery_message import request_of
from callqueue.handlers.celery_run import Asked, CallsRun, TaskGaveUp, wrap
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
    request = request_of(task, params, context.idempotency_key, max(0, context.attempt - 1))
    run = CallsRun(context.is_last)
    request |= {"callqueue": _told(context), "callqueue_run": run}
    wrap(task)
    tracer = build_tracer(task.name, task, app=app, Info=_Account)
    done = tracer(request["id"], request["args"], request["kwargs"], request)
    if run.outcome is not None:
        return run.outcome
    if done.info is not None:  # Ignore and Reject: the task wants no more of it
        return Succeeded(done.info.state)
    return Succeeded(done.retval)


def _told(context: Context) -> dict[str, Any]:
    """What the task may read of its call, as `self.request.callqueue`."""
    return {
        "call_id": context.call_id,
        "attempt": context.attempt,
        "rule": context.rule,
        "key": context.key,
        "deadline": context.deadline.isoformat(),
    }


class _Account(TraceInfo):  # type: ignore[misc]
    """Celery's account of a failure. It tells the table, and the backend only of the last."""

    retval: Any

    def handle_retry(self, task: Any, req: Any, store_errors: bool = True, **kwargs: Any) -> Any:
        retry, run = self.retval, req.callqueue_run
        changed = _changes(retry, req)
        run.outcome = _refused_change(changed) if changed else _asked_retry(retry)
        if changed or (run.is_last and not isinstance(run.outcome, HoldUntil)):
            self.state = celery_states.FAILURE
            self.retval = TaskGaveUp(retry.outcome.why) if isinstance(retry, Asked) else retry.exc
            if self.retval is None:
                self.retval = retry
            return super().handle_failure(task, req, store_errors=store_errors, call_errbacks=True)
        return super().handle_retry(task, req, store_errors=store_errors, **kwargs)

    def handle_failure(
        self, task: Any, req: Any, store_errors: bool = True, call_errbacks: bool = True
    ) -> Any:
        error, run = self.retval, req.callqueue_run
        is_final = run.is_exhausted or isinstance(
            error, MaxRetriesExceededError | EncodeError | TaskGaveUp
        )
        einfo = ExceptionInfo((type(error), error, error.__traceback__))
        is_told = isinstance(error, TaskGaveUp)
        why = str(error) if is_told else _worded("", error, str(einfo.traceback))
        run.outcome = GiveUp(why) if is_final else RetryLater(why)
        if is_final or run.is_last:
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


def _asked_retry(retry: Any) -> Outcome:
    """A retry when the task says, or after the rule's backoff where it does not say when."""
    if isinstance(retry, Asked):
        return retry.outcome
    why = _worded("the task asked to be retried", retry.exc or retry)
    return RetryLater(why, after=_seconds_until(retry.when))


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


def _seconds_until(when: Any) -> float | None:
    if isinstance(when, int | float):
        return max(0.0, float(when))
    if isinstance(when, datetime):
        aware = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max(0.0, (aware - datetime.now(UTC)) / timedelta(seconds=1))
    return None
