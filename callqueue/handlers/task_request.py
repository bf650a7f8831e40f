"""The request of a task that a call runs, with the fields that Celery's worker gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.app import trace
from celery.utils.nodenames import gethostname
from celery.utils.saferepr import saferepr


def request_of(
    task: Any, params: Mapping[str, Any], task_id: str, retries: int = 0
) -> dict[str, Any]:
    """The request, from what the call keeps of the task's options.

    `is_eager` keeps Celery from publishing a retry, and from closing this worker's connections; it
    is False while the task itself runs (task_run.py).
    """
    options = params.get("options") or {}
    task_id = options.get("task_id") or task_id
    headers = options.get("headers") or {}
    return {
        **headers,
        "lang": "py",
        "id": task_id,
        "task": task.name,
        "root_id": options.get("root_id") or task_id,
        "parent_id": options.get("parent_id"),
        "retries": retries,
        "is_eager": True,
        "hostname": _hostname(),
        "origin": options.get("origin"),
        "eta": options.get("eta"),
        "expires": options.get("expires"),
        "argsrepr": options.get("argsrepr") or saferepr(tuple(params.get("args") or ())),
        "kwargsrepr": options.get("kwargsrepr") or saferepr(dict(params.get("kwargs") or {})),
        "timelimit": [None, None],
        "callbacks": options.get("link"),
        "errbacks": options.get("link_error"),
        "chain": options.get("chain"),
        "chord": options.get("chord"),
        "group": options.get("group_id"),
        "group_index": options.get("group_index"),
        "headers": headers,
        "shadow": options.get("shadow"),
        "replaced_task_nesting": options.get("replaced_task_nesting", 0),
        "ignore_result": options.get("ignore_result", task.ignore_result),
        "stamped_headers": options.get("stamped_headers"),
        "stamps": options.get("stamps"),
        "correlation_id": task_id,
        "reply_to": "",
        "properties": {"correlation_id": task_id, **(options.get("properties") or {})},
        "delivery_info": {
            "exchange": "",
            "routing_key": "",
            "priority": options.get("priority"),
            "redelivered": False,
        },
    }


def _hostname() -> str:
    """The worker's name, as Celery's own tracer knows it; the host's where there is no worker."""
    known = getattr(trace, "_localized", None)
    return str(known[2]) if known and len(known) > 2 else gethostname()
