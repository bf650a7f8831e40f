"""Acting on calls for someone: requeue and cancel in batches, each call's change written to the log
of the admin.

In: the user's id, calls, what to do, and how far it has come. Out: how many changed and how many
were left. What is left was in a state from which it may not, or changed meanwhile. A batch is one
transaction with its entries in the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Self

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from callqueue import database, states, transitions
from callqueue.database.batches import in_batches
from callqueue.models import CallQueue
from callqueue.operations.spread import Spread
from callqueue.states import Move

# may have been made already: requeueing them is asked about first
ASKED = (states.UNKNOWN, states.DONE)
BATCH = 500
LOGGED = 1000  # calls that get a log entry each; of more there is one for each batch
STEP = 2.0  # seconds that one request works; then its page says how far it is, and goes on


@dataclass
class Job:
    """An action on many calls: which of them are looked at (numbers after `last`, up to `until`),
    and what came of it so far.

    What is requeued is due from `begin` (ISO 8601) on, one call each `interval_us`; None: at once.
    """

    until: int
    total: str = ""
    last: int = 0
    changed: int = 0
    left: int = 0
    begin: str | None = None
    interval_us: int = 0
    is_over: bool = False

    @classmethod
    def of(cls, kept: Any) -> Self | None:
        """The job that was kept as `as_json`; None where there is none."""
        return cls(**kept) if isinstance(kept, dict) else None

    def as_json(self) -> dict[str, Any]:
        """What JSON can keep."""
        return asdict(self)

    @classmethod
    def spread_by(cls, spread: Spread | None, until: int) -> Self:
        """A job on calls up to this number, which come due as `spread` says."""
        if spread is None:
            return cls(until)
        return cls(until, begin=spread.begin.isoformat(), interval_us=spread.interval_us)

    @property
    def spread(self) -> Spread | None:
        """How the requeued calls come due; None: all at once."""
        if self.begin is None:
            return None
        return Spread(datetime.fromisoformat(self.begin), self.interval_us)


Keep = Callable[[Job], None]


def requeue(
    user_id: int, calls: QuerySet[CallQueue], job: Job, keep: Keep, *, again: bool = False
) -> None:
    """Send these calls once more, those that may be; DONE ones only with `again`."""
    move = Move.REQUEUE_AGAIN if again else Move.REQUEUE

    def act(pks: list[int]) -> int:
        changed = transitions.requeue(calls.db, pks, move)
        if changed and (spread := job.spread):
            spread.put_off(calls.db, pks, job.changed)
        return changed

    _each_batch(user_id, calls, (job, keep), (move, act), _("Requeued"))


def requeue_all(user_id: int, calls: QuerySet[CallQueue]) -> int:
    """Send these calls once more, those that may be, in this request; the count of them."""
    job = Job(newest(calls.db))
    while not job.is_over:
        requeue(user_id, calls, job, lambda job: None)
    return job.changed


def newest(using: str) -> int:
    """The number of the newest call there is, 0 without one."""
    pk = CallQueue.objects.using(using).order_by("-pk").values_list("pk", flat=True).first()
    return pk or 0


def cancel(user_id: int, calls: QuerySet[CallQueue], job: Job, keep: Keep) -> None:
    """End these calls, those that no worker has begun."""

    def act(pks: list[int]) -> int:
        return transitions.cancel(calls.db, pks)

    _each_batch(user_id, calls, (job, keep), (Move.CANCEL, act), _("Cancelled"))


def _each_batch(
    user_id: int,
    calls: QuerySet[CallQueue],
    work: tuple[Job, Keep],
    how: tuple[Move, Callable[[list[int]], int]],
    word: str,
) -> None:
    """Act on the job's next batches, for STEP seconds; each is kept as soon as it is done."""
    (job, keep), (move, act) = work, how
    began = time.monotonic()
    rest = calls.filter(pk__gt=job.last, pk__lte=job.until)
    for pks in in_batches(rest, BATCH):
        with database.writing(calls.db):
            may_be = _every(calls).filter(pk__in=pks, status__in=move.sources).order_by("pk")
            before = dict(may_be.values_list("pk", "status"))
            changed = act(list(before)) if before else 0
            if changed:
                after = _every(calls).filter(pk__in=list(before), status__in=move.targets)
                same = [call for call in after.defer("call_data") if before[call.pk] != call.status]
                _log(user_id, same, before, word, job.changed >= LOGGED)
        job.changed += changed
        job.left += len(pks) - changed
        job.last = pks[-1]
        keep(job)
        if time.monotonic() - began > STEP:
            return
    job.is_over = True
    keep(job)


def _every(calls: QuerySet[CallQueue]) -> QuerySet[CallQueue]:
    return CallQueue.objects.using(calls.db)


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
            user_id,
            same,
            CHANGE,
            _("%(done)s. Status before: %(status)s.") % {"done": word, "status": was},
        )
