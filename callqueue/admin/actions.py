"""Acting on calls for someone: requeue and cancel in batches, each call's change written to the log
of the admin.

In: the user's id, calls, what to do. Out: how many changed and how many were left. What is left was
in a state from which it may not, or changed meanwhile.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from callqueue import database, states
from callqueue.database.batches import in_batches
from callqueue.models import CallQueue
from callqueue.states import Move

# may have been made already: requeueing them is asked about first
ASKED = (states.UNKNOWN, states.DONE)
BATCH = 500
LOGGED = 1000  # calls that get a log entry each; of more there is one for each batch
# seconds after which the rest is left for another time: a web server would end the request
LONGEST = 20.0


@dataclass
class Acted:
    """What came of it. `is_unfinished`: there was more than could be done in one request."""

    changed: int = 0
    left: int = 0
    is_unfinished: bool = False


def requeue(user_id: int, calls: QuerySet[CallQueue], *, again: bool = False) -> Acted:
    """Send these calls once more, those that may be; DONE ones only with `again`."""
    legal = (Move.REQUEUE_AGAIN if again else Move.REQUEUE).sources
    return _each_batch(
        user_id, calls, legal, lambda rows: rows.requeue(again=again), _("Requeued"), states.NEW
    )


def cancel(user_id: int, calls: QuerySet[CallQueue]) -> Acted:
    """End these calls, those that no worker has begun."""
    legal = Move.CANCEL.sources
    return _each_batch(
        user_id, calls, legal, lambda rows: rows.cancel(), _("Cancelled"), states.CANCELLED
    )


def _each_batch(
    user_id: int,
    calls: QuerySet[CallQueue],
    legal: tuple[int, ...],
    act: Any,
    word: str,
    after: int,
) -> Acted:
    done, began = Acted(), time.monotonic()
    every = CallQueue.objects.using(calls.db)
    for pks in in_batches(calls, BATCH):
        if time.monotonic() - began > LONGEST:
            done.is_unfinished = True
            break
        with database.writing(calls.db):
            before = dict(every.filter(pk__in=pks, status__in=legal).values_list("pk", "status"))
            changed = act(every.filter(pk__in=list(before))) if before else 0
            if changed:
                now = every.filter(pk__in=list(before), status=after).defer("call_data")
                _log(
                    user_id,
                    [call for call in now if before[call.pk] != after],
                    before,
                    word,
                    done.changed >= LOGGED,
                )
        done.changed += changed
        done.left += len(pks) - changed
    return done


def _log(
    user_id: int, calls: list[CallQueue], before: dict[int, int], word: str, is_summary: bool
) -> None:
    if is_summary:
        LogEntry.objects.create(
            user_id=user_id,
            content_type=ContentType.objects.get_for_model(CallQueue),
            object_repr=_("%(count)d calls, %(first)d to %(last)d")
            % {
                "count": len(calls),
                "first": min(c.pk for c in calls),
                "last": max(c.pk for c in calls),
            },
            action_flag=CHANGE,
            change_message=f"{word}.",
        )
        return
    for status in sorted({before[call.pk] for call in calls}):
        was = CallQueue.Status(status).label
        same = [call for call in calls if before[call.pk] == status]
        LogEntry.objects.log_actions(
            user_id, same, CHANGE, _("%(done)s; it was %(status)s.") % {"done": word, "status": was}
        )
