"""Whether a call that was begun can still be made here: too late, or without its rule, its data or
what makes it, it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.utils.module_loading import import_string

from callqueue import texts, transitions
from callqueue.database import from_us
from callqueue.execution.starvation import starved
from callqueue.handlers import methods
from callqueue.transitions import Job

EXPIRED = "expired"
NEWER = "only other processes' settings have its rule: their workers can make it"
STARVED = "nothing was sent: this worker's process may have no more descriptors"


def reason_against(job: Job, readable: bool, expires_at: datetime | None) -> str | None:
    """Why the call cannot be made any more, if so."""
    if expires_at is not None and expires_at <= from_us(job.clock.at):
        return EXPIRED
    if job.rule is None:
        return f"the rule {job.rule_name!r} is not in CALLQUEUE['RULES'] any more"
    if job.failed_count and transitions.is_key_stale(job, job.rule, from_us(job.clock.at)):
        return transitions.STALE  # it waited for longer than its backoff: in a hold, or a backlog
    if not readable:
        return (
            "its call_data cannot be read; "
            "is the key that encrypted it missing from ENCRYPTION_KEYS?"
        )
    if job.method not in methods():
        return f"there is no handler for the method {job.method!r} any more"
    for name in ("classify", "settle"):
        path = getattr(job.rule, name)
        try:
            if path is not None:
                imported(path)
        except BaseException as error:
            if starved(error):
                return STARVED
            # Whatever its module does when it is read, it does to calls of this rule only.
            return f"the rule's {name} cannot be imported: {texts.worded(error)}"
    return None


@lru_cache
def imported(path: str | Callable[..., Any]) -> Callable[..., Any]:
    """A callable, or what a dotted path names."""
    found: Callable[..., Any] = import_string(path) if isinstance(path, str) else path
    return found
