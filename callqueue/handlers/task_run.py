"""Runs the function of a task within Celery's tracer, so that outcomes which it returns and exits
which it raises reach hooks and result backend in a form that these know.

Celery's tracer stores what a task returns before anybody else sees it, and lets pass what is no
Exception. So `task.run` is wrapped, once, as Celery does itself for `autoretry_for`; a run that no
call has asked for goes through unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from celery.exceptions import Retry, WorkerShutdown, WorkerTerminate

from callqueue import texts
from callqueue.exceptions import CallQueueError
from callqueue.outcome import OUTCOMES, GiveUp, HoldUntil, RetryLater, Succeeded

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
class _CallsRun:
    task: Any
    is_begun: bool = False


_at_work: ContextVar[_CallsRun | None] = ContextVar("callqueue_task", default=None)


@contextmanager
def running(task: Any) -> Iterator[None]:
    """For as long as this is open, the next run of the task is a call's."""
    if not hasattr(task.run, "is_told_of_calls"):
        task.run = _wrapped(task, task.run)
    token = _at_work.set(_CallsRun(task))
    try:
        yield
    finally:
        _at_work.reset(token)


def _wrapped(task: Any, run: Any) -> Any:
    @functools.wraps(run)
    def told(*args: Any, **kwargs: Any) -> Any:
        current = _at_work.get()
        if current is None or current.task is not task or current.is_begun:
            return run(*args, **kwargs)
        current.is_begun = True
        return _result(_run(task, run, args, kwargs))

    told.is_told_of_calls = True  # type: ignore[attr-defined]
    return told


def _run(task: Any, run: Any, args: Any, kwargs: Any) -> Any:
    request = task.request_stack.top
    retries_by_table = hasattr(task, "is_queued") and hasattr(request, "callqueue")
    if retries_by_table:
        request.is_eager = False
    try:
        value = run(*args, **kwargs)
        if (asked := getattr(request, "callqueue_retry", None)) is not None:
            raise asked  # retry(throw=False)
        return value
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, _LEAVING) or type(error).__name__ == "GreenletExit":
            raise
        raise TaskExited(texts.worded(error)) from error
    finally:
        if retries_by_table:
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
