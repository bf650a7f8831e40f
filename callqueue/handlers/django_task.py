"""django_task: runs a task of Django's Tasks API (Django 6 and up): see callqueue/backends.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from callqueue.handlers import BuiltIn
from callqueue.outcome import GiveUp, Outcome

if TYPE_CHECKING:
    from callqueue.handlers import Context


def run_django_task(params: Mapping[str, Any], context: Context) -> Outcome:
    from django.tasks import task_backends

    try:
        backend: Any = task_backends[params["backend"]]
        result = backend.get_result(str(context.call_id))
    except Exception as error:
        return GiveUp(f"its task is not there any more: {error.__cause__ or error}")
    outcome: Outcome = backend.run(result, context)
    return outcome


BUILT_IN = BuiltIn(run_django_task, free=("args", "kwargs"))
