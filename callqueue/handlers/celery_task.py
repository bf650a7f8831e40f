"""celery_task: runs a registered Celery task in this worker, under the call's limits.

A call keeps Celery's own message of the task. One that was sent by hand has a name and arguments
only: the rest is what Celery would have said of it. Celery's own tracer runs it, so that signals,
hooks, callbacks, chains and chords see what they always see. A failure or a retry goes back to the
table; errbacks and the result backend's FAILURE come once, with the last attempt.

The tracer stores what a task returns before anybody else sees it, and lets pass what is no
Exception: so `task.run` is wrapped, once, as Celery does itself for `autoretry_for`. A run that no
call has asked for goes through unchanged.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery import current_app
from celery import states as celery_states
from celery.app import trace
from celery.app.task import Context as TaskRequest
from celery.app.trace import ExceptionInfo, TraceInfo, build_tracer
from celery.exceptions import MaxRetriesExceededError, Retry, WorkerShutdown, WorkerTerminate
from celery.utils.nodenames import gethostname
from kombu.exceptions import EncodeError
from kombu.utils.json import dumps, loads

from callqueue import broker, texts
from callqueue.exceptions import CallQueueError, InvalidCall
from callqueue.handlers import BuiltIn
from callqueue.outcome import OUTCOMES, GiveUp, HoldUntil, Outcome, RetryLater, Succeeded
from callqueue.security.secrets import Secret, has_secret
from callqueue.security.withholding import clean_of_call_in_hand
from callqueue.values import TASK_NAME, check_dict, check_list, is_secret, refuse_unknown

if TYPE_CHECKING:
    from callqueue.handlers import Context

OF_MESSAGE = ("embed", "headers", "properties")  # a QueuedTask's
PARAMS = ("name", "args", "kwargs", *OF_MESSAGE)
HEAD, TAIL = 500, 1400  # characters of an error's own words, and of its traceback's end
_LEAVING = (KeyboardInterrupt, WorkerShutdown, WorkerTerminate)


class TaskGaveUp(CallQueueError):
    """The task returned GiveUp: this is what hooks and result backend are told."""


class TaskExited(CallQueueError):
    """The task raised what is no Exception, such as SystemExit."""


class TaskAskedForRetry(Retry):  # type: ignore[misc]
    """The task returned RetryLater or HoldUntil: to Celery that is a retry."""

    def __init__(self, outcome: RetryLater | HoldUntil) -> None:
        super().__init__(outcome.why, exc=TaskGaveUp(outcome.why))
        self.outcome = outcome


@dataclass
class CallsRun:
    """One run of a task that a call asked for; in the task's request, as `callqueue_run`."""

    is_last: bool
    is_begun: bool = False
    retry: Retry | None = None  # which the task asked for with throw=False
    is_exhausted: bool = False  # no retries were left
    outcome: Outcome | None = None  # None: it has succeeded


def run_task(params: Mapping[str, Any], context: Context) -> Outcome:
    """Run the task `name` here and now. What it raises is a failure; it may return an outcome."""
    app = current_app._get_current_object()
    task = broker.registered_task(app, params["name"])
    if task is None:
        return GiveUp(
            f"this worker has no task {params['name']!r}; is its module imported by the worker?"
        )
    request = request_of(task, params, context.idempotency_key, max(0, context.attempt - 1))
    run = CallsRun(context.is_last)
    request |= {"callqueue": _facts_of(context), "callqueue_run": run}
    _wrap_run(task)
    tracer = build_tracer(task.name, task, app=app, Info=_CallsTraceInfo)
    done = tracer(request["id"], request["args"], request["kwargs"], request)
    if run.outcome is not None:
        return run.outcome
    if done.info is not None:  # Ignore and Reject: the task wants no more of it
        return Succeeded(done.info.state)
    return Succeeded(done.retval)


def _facts_of(context: Context) -> dict[str, Any]:
    """What the task may read of its call, as `self.request.callqueue`."""
    return {
        "call_id": context.call_id,
        "attempt": context.attempt,
        "rule": context.rule,
        "key": context.key,
        "deadline": context.deadline.isoformat(),
    }


def _wrap_run(task: Any) -> None:
    """Have the first run of the task within a call's request tell what came of it."""
    run = task.run
    if hasattr(run, "tells_of_calls"):
        return

    @functools.wraps(run)
    def telling_run(*args: Any, **kwargs: Any) -> Any:
        # Not the topmost alone: a `__call__` of the task's own may have put a copy on top.
        runs = [getattr(request, "callqueue_run", None) for request in task.request_stack.stack]
        current = next((one for one in reversed(runs) if one and not one.is_begun), None)
        if current is None:
            return run(*args, **kwargs)
        current.is_begun = True
        return _result_or_raise(_run_body(task, current, lambda: run(*args, **kwargs)))

    telling_run.tells_of_calls = True  # type: ignore[attr-defined]
    task.run = telling_run


def _run_body(task: Any, current: CallsRun, run: Callable[[], Any]) -> Any:
    """What the task returns. Retry where it asked for one, TaskExited for what is no Exception."""
    request, is_queued = task.request_stack.top, hasattr(task, "is_queued")
    if is_queued:
        request.is_eager = False
    try:
        value = run()
        if current.retry is not None:  # retry(throw=False)
            raise current.retry
        return value
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, _LEAVING) or type(error).__name__ == "GreenletExit":
            raise
        raise TaskExited(texts.worded(error)) from error
    finally:
        if is_queued:
            request.is_eager = True


def _result_or_raise(value: Any) -> Any:
    if not isinstance(value, OUTCOMES):
        return value
    if isinstance(value, Succeeded):
        return value.result
    if isinstance(value, GiveUp):
        raise TaskGaveUp(value.why)
    raise TaskAskedForRetry(value)


class _CallsTraceInfo(TraceInfo):  # type: ignore[misc]
    """Celery's account of a failure. It tells the table, and the backend only of the last."""

    retval: Any

    def handle_retry(self, task: Any, req: Any, store_errors: bool = True, **kwargs: Any) -> Any:
        retry, run = self.retval, req.callqueue_run
        run.outcome = outcome = _outcome_of_retry(retry, req)
        if isinstance(outcome, GiveUp) or (run.is_last and isinstance(outcome, RetryLater)):
            self.state, self.retval = celery_states.FAILURE, retry.exc or retry
            return super().handle_failure(task, req, store_errors=store_errors, call_errbacks=True)
        return super().handle_retry(task, req, store_errors=store_errors, **kwargs)

    def handle_failure(
        self, task: Any, req: Any, store_errors: bool = True, call_errbacks: bool = True
    ) -> Any:
        error, run = self.retval, req.callqueue_run
        gave_up = isinstance(error, TaskGaveUp)
        traceback = str(ExceptionInfo((type(error), error, error.__traceback__)).traceback)
        why = str(error) if gave_up else _error_text("", error, traceback)
        is_final = gave_up or isinstance(error, MaxRetriesExceededError | EncodeError)
        is_final = is_final or run.is_exhausted
        run.outcome = GiveUp(why) if is_final else RetryLater(why)
        if is_final or run.is_last:
            return super().handle_failure(
                task, req, store_errors=store_errors, call_errbacks=call_errbacks
            )
        self.state, self.retval = celery_states.RETRY, Retry(texts.worded(error), exc=error)
        return super().handle_retry(task, req, store_errors=store_errors)


def _outcome_of_retry(retry: Any, request: Any) -> Outcome:
    """When the task says, or after the rule's backoff; GiveUp where its arguments changed."""
    if isinstance(retry, TaskAskedForRetry):
        return retry.outcome
    given = retry.sig or request
    changed = "kwargs" if dict(given.kwargs) != dict(request.kwargs) else ""
    changed = "args" if list(given.args) != list(request.args) else changed
    if changed:
        why = f"retry({changed}=...) is not offered: a call goes again as it was sent; send another"
        return GiveUp(why)
    why = _error_text("the task asked to be retried", retry.exc or retry)
    return RetryLater(why, after=_seconds_until(retry.when))


def _error_text(prefix: str, error: BaseException, traceback: str = "") -> str:
    """What went wrong, cleaned, then cut: the error's own words, the end of its traceback."""
    said = clean_of_call_in_hand(f"{type(error).__name__}: {error}".rstrip(": "))[:HEAD]
    head = f"{prefix}: {said}" if prefix else said
    return f"{head}\n{clean_of_call_in_hand(traceback)[-TAIL:]}" if traceback else head


def _seconds_until(when: Any) -> float | None:
    if isinstance(when, int | float):
        return max(0.0, float(when))
    if isinstance(when, datetime):
        aware = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max(0.0, (aware - datetime.now(UTC)) / timedelta(seconds=1))
    return None


DEEPEST = 64  # as anything that a call may hold
_TYPED = {"__type__", "__value__"}  # in Celery's JSON: a date, a Decimal and the like


def params_of(name: str, message: Any, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The params of the call that keeps this message; `stated` are the caller's own options. What
    JSON has no form for stays in the arguments: `send` says where it is. InvalidCall for a Secret
    anywhere else, which would leave with the tasks that follow.
    """
    args, kwargs, embed = message.body
    # A repr would show what is redacted in the arguments, and the old ones once they are edited.
    unstated = {name for name in ("argsrepr", "kwargsrepr") if stated.get(name) is None}
    headers = {name: value for name, value in message.headers.items() if name not in unstated}
    params = {
        "args": _as_celerys_json(args, "args"),
        "name": name,
        "embed": _as_celerys_json(_stated_options(embed), "embed"),
        "kwargs": _as_celerys_json(kwargs, "kwargs"),
        "headers": _as_celerys_json(_stated_options(headers), "headers"),
        "properties": _as_celerys_json(_stated_options(message.properties), "properties"),
    }
    for place in ("embed", "headers", "properties"):
        for option, value in params[place].items():
            if has_secret(value):
                why = "holds a Secret: it may be an argument of this task, not of those that follow"
                raise InvalidCall(option, why)
    return params


def request_of(task: Any, params: Mapping[str, Any], own_id: str, retries: int) -> dict[str, Any]:
    """The request of the task, arguments included, as Celery's worker makes it; `own_id` is the id
    where nobody gave one. A secret that is not disclosed is its name.

    `is_eager` keeps Celery from publishing a retry, and from closing this worker's connections; it
    is False while a QueuedTask itself runs.
    """
    decode = loads if "headers" in params else json.loads
    kept = decode(json.dumps(params, default=repr))
    args, kwargs = kept.get("args") or [], kept.get("kwargs") or {}
    message = task.app.amqp.as_task_v2(
        own_id, task.name, tuple(args), kwargs, ignore_result=task.ignore_result
    )
    headers = {**message.headers, **(kept.get("headers") or {})}
    properties = {**message.properties, **(kept.get("properties") or {})}
    return {
        **headers,
        **(kept.get("embed") or {}),
        "args": args,
        "kwargs": kwargs,
        "retries": retries,
        "is_eager": True,
        "hostname": _worker_name(),
        "headers": TaskRequest(headers).headers or {},
        "properties": properties,
        "correlation_id": properties["correlation_id"],
        "reply_to": properties["reply_to"],
        "delivery_info": {
            "exchange": "",
            "routing_key": "",
            "priority": properties.get("priority"),
            "redelivered": False,
        },
    }


def _stated_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None, in the order that every database keeps by itself."""
    names = sorted(options, key=lambda name: (len(name), name))
    return {name: options[name] for name in names if options[name] is not None}


def _as_celerys_json(value: Any, field: str, depth: int = 0) -> Any:
    """As Celery's JSON has it; Secrets, what has no form stay. InvalidCall: too deep, misread."""
    if value is None or isinstance(value, str | int | float | Secret):
        return value
    if depth > DEEPEST:
        raise InvalidCall(field, f"is nested deeper than {DEEPEST}")
    if isinstance(value, dict):
        if value.keys() == _TYPED:
            why = "has a dict of '__type__' and '__value__' alone, which Celery reads as no dict"
            raise InvalidCall(field, why)
        return {name: _as_celerys_json(item, field, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_celerys_json(item, field, depth + 1) for item in value]
    try:
        return json.loads(dumps(value))  # type: ignore[no-untyped-call]
    except (TypeError, ValueError):
        return value


def _worker_name() -> str:
    """The worker's name, as Celery's own tracer knows it; the host's where there is no worker."""
    known = getattr(trace, "_localized", None)
    return str(known[2]) if known and len(known) > 2 else gethostname()


def _check_params(params: dict[str, Any]) -> None:
    refuse_unknown(params, PARAMS)
    name = params.get("name")
    if not is_secret(name) and not (isinstance(name, str) and TASK_NAME.fullmatch(name)):
        raise InvalidCall(
            "params.name", "must be the name of a Celery task, such as 'shop.tasks.ship'"
        )
    if params.get("args") is not None:
        check_list("params.args", params["args"])
    for mapping in ("kwargs", *OF_MESSAGE):
        if params.get(mapping) is not None:
            check_dict(f"params.{mapping}", params[mapping])
    if params.get("headers") and not isinstance(params["headers"].get("id"), str):
        raise InvalidCall("params.headers.id", "must be the id of a task, a string")


BUILT_IN = BuiltIn(run_task, free=("args", "kwargs"), check=_check_params)
