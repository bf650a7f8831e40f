"""Runs the function of a task within Celery's tracer, so that outcomes which it returns and exits
which it raises reach hooks and result backend in a form that these know.

Celery's tracer stores what a task returns before anybody else sees it, and lets pass what is no
Exception. So `task.run` is wrapped, once, as Celery does itself for `autoretry_for`; a run that no
call has asked for goes through unchanged.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from celery.exceptions import Retry, WorkerShutdown, WorkerTerminate

from callqueue import texts
from callqueue.exceptions import CallQueueError
from callqueue.outcome import OUTCOMES, GiveUp, HoldUntil, Outcome, RetryLater, Succeeded

_LEAVING = (KeyboardInterrupt, WorkerShutdown, WorkerTerminate)


class TaskGaveUp(CallQueueError):
    """The task returned GiveUp: this is what hooks and result backend are told."""


class TaskExited(CallQueueError):
    """The task raised what is no Exception, such as SystemExit."""


class Asked(Retry):  # type: ignore[misc]
    """The task returned RetryLater or HoldUntil: to Celery that is a retry."""

    def __init__(self, outcome: RetryLater | HoldUntil) -> None:
        super().__init__(outcome.why)
        self.outcome = outcome


@dataclass
class CallsRun:
    """One run of a task that a call asked for; in the task's request, as `callqueue_run`."""

    is_last: bool
    is_begun: bool = False
    retry: Retry | None = None  # which the task has asked for, and not raised
    is_exhausted: bool = False  # no retries were left
    outcome: Outcome | None = None  # None: it has succeeded


def wrap(task: Any) -> None:
    """Have the first run of the task within a call's request tell what came of it."""
    run = task.run
    if hasattr(run, "is_told_of_calls"):
        return

    @functools.wraps(run)
    def told(*args: Any, **kwargs: Any) -> Any:
        # Not the topmost alone: a `__call__` of the task's own may have put a copy on top.
        runs = [getattr(request, "callqueue_run", None) for request in task.request_stack.stack]
        current = next((one for one in reversed(runs) if one and not one.is_begun), None)
        if current is None:
            return run(*args, **kwargs)
        current.is_begun = True
        return _result(_run(task, current, lambda: run(*args, **kwargs)))

    told.is_told_of_calls = True  # type: ignore[attr-defined]
    task.run = told


def _run(task: Any, current: CallsRun, run: Any) -> Any:
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


def _result(value: Any) -> Any:
    """What the tracer is to see of what the task returned."""
    if not isinstance(value, OUTCOMES):
        return value
    if isinstance(value, Succeeded):
        return value.result
    if isinstance(value, GiveUp):
        raise TaskGaveUp(value.why)
    raise Asked(value)
