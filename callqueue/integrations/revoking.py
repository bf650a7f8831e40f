"""Revoking by the id of a task: workers that are told to revoke it cancel its call.

`AsyncResult(id).revoke()`, `GroupResult.revoke()` and `app.control.revoke(id)` tell all workers.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.utils.functional import maybe_list
from django.db import close_old_connections, connections

from callqueue import states, tables
from callqueue.integrations.queued_task import QueuedTask

logger = logging.getLogger("callqueue")


def install(**_: Any) -> None:
    """Have this worker cancel calls, beside what Celery's own command does."""
    from celery.worker.control import Panel

    own = Panel.data["revoke"]
    if hasattr(own, "cancels_calls"):
        return

    def revoke(state: Any, task_id: Any, *args: Any, **kwargs: Any) -> Any:
        answer = own(state, task_id, *args, **kwargs)
        try:
            cancel(state.app, {str(one) for one in maybe_list(task_id) or ()})
        except Exception:
            logger.exception("callqueue: tasks that were revoked could not be cancelled")
        return answer

    revoke.cancels_calls = True  # type: ignore[attr-defined]
    Panel.data["revoke"] = revoke


def cancel(app: Any, task_ids: set[str]) -> int:
    """Cancel the calls of these tasks that no worker has begun; the count of them."""
    found = {task.using for task in app.tasks.values() if isinstance(task, QueuedTask)}
    aliases = {one or tables.CallQueue.objects.db for one in found}
    count = 0
    for using in aliases:
        is_own = connections[using].connection is None
        close_old_connections()
        calls = tables.calls(using).filter(task_id__in=task_ids, status__in=states.UNFINISHED)
        try:
            count += calls.cancel()
        finally:
            if is_own:  # children that are forked later must not inherit it
                connections[using].close()
    return count
