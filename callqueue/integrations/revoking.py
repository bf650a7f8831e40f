"""Revoking by the id of a task: workers that are told to revoke it cancel its call.

`AsyncResult(id).revoke()`, `GroupResult.revoke()` and `app.control.revoke(id)` tell all workers.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.utils.functional import maybe_list
from django.db import DatabaseError, InterfaceError, connections, router

from callqueue import database, tables
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
    """Cancel the calls of these tasks that no worker has begun, in whichever database they are; the
    count of them.
    """
    named = {task.using for task in app.tasks.values() if isinstance(task, QueuedTask)}
    named = {one or tables.CallQueue.objects.db_for_write for one in named}
    count = 0
    for using in connections:
        if using not in named and not router.allow_migrate_model(using, tables.CallQueue):
            continue
        connection = connections[using]
        is_own = connection.connection is None
        if not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
        try:
            if using in named or _has_calls(using):
                calls = tables.calls(using).filter(task_id__in=task_ids)
                count += calls.cancel()
        except (DatabaseError, InterfaceError):
            logger.exception("callqueue: revoked tasks in the database %r go on", using)
        finally:
            if is_own:  # children that are forked later must not inherit it
                connection.close()
    return count


def _has_calls(using: str) -> bool:
    """Whether calls can be cancelled there: it has the table, and follows no other server."""
    names = connections[using].introspection.table_names()
    return tables.CallQueue._meta.db_table in names and not database.is_standby(using)
