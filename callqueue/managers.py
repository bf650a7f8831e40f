"""The managers: querysets named for what their rows are, and what may be done with calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import models, router
from django.utils.translation import gettext as _

from callqueue import database, forecast, states, transitions
from callqueue.database.bulk import pks_in_batches
from callqueue.exceptions import IllegalTransition
from callqueue.sending import intake
from callqueue.states import Move

if TYPE_CHECKING:
    from celery import Task

    from callqueue.models import CallAttempt as CallAttempt
    from callqueue.models import CallQueue

BATCH = 1000


class CallQueueQuerySet(models.QuerySet["CallQueue"]):
    def new(self) -> CallQueueQuerySet:
        """Not attempted yet, or requeued."""
        return self.filter(status=states.NEW)

    def waiting(self) -> CallQueueQuerySet:
        """To be released, now or later: NEW and ERROR."""
        return self.filter(status__in=states.WAITING)

    def due(self) -> CallQueueQuerySet:
        """Waiting, and due by the database's clock."""
        return self.waiting().filter(due_at_dt__lte=database.ClockNow())

    def dispatched(self) -> CallQueueQuerySet:
        """In flight: released, and not recorded yet."""
        return self.filter(status=states.DISPATCHED)

    def error(self) -> CallQueueQuerySet:
        return self.filter(status=states.ERROR)

    def failed(self) -> CallQueueQuerySet:
        return self.filter(status=states.FAILED)

    def unknown(self) -> CallQueueQuerySet:
        """Begun, perhaps sent, and what came of it was never recorded."""
        return self.filter(status=states.UNKNOWN)

    def done(self) -> CallQueueQuerySet:
        return self.filter(status=states.DONE)

    def cancelled(self) -> CallQueueQuerySet:
        """Cancelled while no worker was making them."""
        return self.filter(status=states.CANCELLED)

    def expired(self) -> CallQueueQuerySet:
        """Ended because they waited, or were not begun, past their `expires_at`."""
        return self.filter(status=states.EXPIRED)

    def final(self) -> CallQueueQuerySet:
        return self.filter(status__in=states.FINAL)

    def requeue(self, *, again: bool = False) -> int:
        """Send these calls once more, those that may be; the count. DONE only with `again=True`."""
        move = Move.REQUEUE_AGAIN if again else Move.REQUEUE
        batches = pks_in_batches(self.filter(status__in=move.sources), BATCH)
        return sum(transitions.requeue(self.db, pks, move) for pks in batches)

    def cancel(self) -> int:
        """End these calls, those that no worker has begun; the count."""
        batches = pks_in_batches(self.filter(status__in=Move.CANCEL.sources), BATCH)
        return sum(transitions.cancel(self.db, pks) for pks in batches)

    def update(self, **changed: Any) -> int:
        """As Django's. What is given another `due_at_dt` or `status` waits for a promotion."""
        return super().update(**{**columns_written_besides(changed), **changed})

    def bulk_create(
        self,
        objs: Iterable[CallQueue],
        batch_size: int | None = None,
        ignore_conflicts: bool = False,
        update_conflicts: bool = False,
        update_fields: Collection[str] | None = None,
        unique_fields: Collection[str] | None = None,
    ) -> list[CallQueue]:
        """As Django's. What is given a `due_at_dt`, or another status, waits for a promotion."""
        objs = list(objs)
        for one in objs:
            leave_to_promotion(one)
        if update_fields:
            update_fields = {*update_fields}
            update_fields |= columns_written_besides(update_fields).keys()
        conflicts = (ignore_conflicts, update_conflicts, update_fields, unique_fields)
        return super().bulk_create(objs, batch_size, *conflicts)

    requeue.alters_data = True  # type: ignore[attr-defined]
    update.alters_data = True  # type: ignore[attr-defined]
    bulk_create.alters_data = True  # type: ignore[attr-defined]
    cancel.alters_data = True  # type: ignore[attr-defined]


def columns_written_besides(names: Collection[str]) -> dict[str, bool]:
    """`ready`, where other code writes when a call is due or its status: a promotion looks anew."""
    is_looked_at = "ready" not in names and not {"due_at_dt", "status"}.isdisjoint(names)
    return {"ready": False} if is_looked_at else {}


def leave_to_promotion(call: CallQueue) -> None:
    """Mark it as not ready, unless due by default, now: a copy of a ready call may be due later."""
    if not hasattr(call.__dict__.get("due_at_dt"), "resolve_expression"):
        call.ready = False


_Calls = models.Manager.from_queryset(CallQueueQuerySet)


class CallQueueManager(_Calls["CallQueue"]):  # `CallQueue.objects`
    def send(
        self,
        call_data: Mapping[str, Any],
        *,
        rule: str | None = None,
        key: str | Mapping[str, str] = "",
        priority: int | None = None,
        cost: int | Mapping[str, int] | None = None,
        not_before: datetime | None = None,
        expires_at: datetime | None = None,
        unique_key: str | None = None,
        callback: str | Task | None = None,
    ) -> CallQueue | None:
        """Queue a call, in the caller's transaction. None where the ROUTER discards it.

        Raises InvalidCall (naming the field), UnknownRule or NotAllowed, and then has written
        nothing. With a `unique_key` that an unfinished call carries, returns that call. See
        docs/reference/sending.md for every argument.
        """
        request = intake.CallRequest(
            call_data, rule, key, priority, cost, not_before, expires_at, unique_key, callback
        )
        return intake.accept(request, using=self.db_for_write)

    def send_many(
        self, iterable: Iterable[Any], *, batch_size: int = 1000, **same: Any
    ) -> list[CallQueue]:
        """Queue many calls, `batch_size` rows a statement; returns them, without discarded ones.

        An item is `call_data`, or a mapping with "call_data" and any of `send`'s arguments, which
        win over `same`. All are checked before the first is written; a bad one raises as in `send`,
        its place in the message. One transaction.
        """
        return intake.accept_many(
            iterable, batch_size=batch_size, same=same, using=self.db_for_write
        )

    async def asend(self, call_data: Mapping[str, Any], **arguments: Any) -> CallQueue | None:
        """`send`, from async code."""
        return await sync_to_async(self.send)(call_data, **arguments)

    async def asend_many(self, iterable: Iterable[Any], **arguments: Any) -> list[CallQueue]:
        """`send_many`, from async code."""
        return await sync_to_async(self.send_many)(iterable, **arguments)

    def under_threshold(self, rule: str = "default", key: str | Mapping[str, str] = "") -> bool:
        """Whether a call of cost 1 under this rule and key would be released now. Only looks: to
        make a call yourself under its limits, take a `callqueue.permit`, which charges it.
        """
        return forecast.has_room(self.db, rule, key)

    def requeue_one(self, call: CallQueue, *, again: bool = False) -> None:
        """Requeue `call` (DONE: with `again`), refresh it; or IllegalTransition with the reason."""
        using, move = self.db_for_write, Move.REQUEUE_AGAIN if again else Move.REQUEUE
        may_be = self.using(using).filter(pk=call.pk, status__in=move.sources).exists()
        changed = may_be and transitions.requeue(using, [call.pk], move)
        call.refresh_from_db(using=using)
        if not changed:
            raise IllegalTransition(_why_not_requeued(call, move))

    def cancel_one(self, call: CallQueue) -> None:
        """Cancel `call` and refresh the instance, or raise IllegalTransition with the reason."""
        changed = transitions.cancel(self.db_for_write, [call.pk])
        call.refresh_from_db(using=self.db_for_write)
        if not changed:
            raise IllegalTransition(_why_not_cancelled(call))

    @property
    def db_for_write(self) -> str:
        """The database that calls are written to: named by `using`, or the router's choice."""
        return self._db or router.db_for_write(self.model)


class CallAttemptQuerySet(models.QuerySet["CallAttempt"]):
    def open(self) -> CallAttemptQuerySet:
        """In flight: charged in full until told to be sent, or, by some limits, until recorded."""
        return self.filter(finished_at__isnull=True)

    def unbegun(self) -> CallAttemptQuerySet:
        return self.open().filter(started_at__isnull=True)

    def charged(self) -> CallAttemptQuerySet:
        """All but voided ones, which never reached the wire."""
        return self.exclude(outcome=states.VOIDED)


_Attempts = models.Manager.from_queryset(CallAttemptQuerySet)


class CallAttemptManager(_Attempts["CallAttempt"]):
    """`CallAttempt.objects`."""


def _why_not_requeued(call: CallQueue, move: Move) -> str:
    if call.status == states.DONE and call.method != states.PERMIT:
        return _("call %d is done; to make it once more on purpose, requeue(again=True)") % call.pk
    if call.status in move.sources and call.method != states.PERMIT:
        return _("another unfinished call carries the unique key %r") % call.unique_key
    if call.method == states.PERMIT:
        return _("call %d is a permit: the code that would make it has gone on") % call.pk
    why = _("call %(number)d is %(status)s and cannot be requeued")
    return why % {"number": call.pk, "status": call.get_status_display()}


def _why_not_cancelled(call: CallQueue) -> str:
    if call.status == states.DISPATCHED:
        return _("a worker has begun call %d; it can no longer be cancelled") % call.pk
    why = _("call %(number)d is %(status)s and cannot be cancelled")
    return why % {"number": call.pk, "status": call.get_status_display()}
