"""What may be done with calls, by name: send, requeue, cancel, and the querysets named for what
they mean.

Every change of state is fenced by the state it starts from. What is changed is locked before, in
the order that locks.py gives for all, so that no two of these can deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import IntegrityError, models, transaction
from django.db.models import Case, F, Value, When
from django.utils.translation import gettext as _

from callqueue import conf, database, events, states, tables, transitions
from callqueue.database.batches import in_batches
from callqueue.exceptions import IllegalTransition
from callqueue.ledger import tallies

if TYPE_CHECKING:
    from callqueue.models import CallAttempt, CallQueue

T = TypeVar("T")
BATCH = 1000


class CallQueueQuerySet(models.QuerySet["CallQueue"]):
    """Calls, picked by what they are."""

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
        """Released to a worker, and not ended."""
        return self.filter(status=states.DISPATCHED)

    def error(self) -> CallQueueQuerySet:
        """Failed, and will be retried."""
        return self.filter(status=states.ERROR)

    def failed(self) -> CallQueueQuerySet:
        """Given up."""
        return self.filter(status=states.FAILED)

    def unknown(self) -> CallQueueQuerySet:
        """Sent, and what came of it was never recorded."""
        return self.filter(status=states.UNKNOWN)

    def done(self) -> CallQueueQuerySet:
        """Succeeded."""
        return self.filter(status=states.DONE)

    def cancelled(self) -> CallQueueQuerySet:
        """Cancelled before any worker began them."""
        return self.filter(status=states.CANCELLED)

    def expired(self) -> CallQueueQuerySet:
        """Not released by their `expires_at`."""
        return self.filter(status=states.EXPIRED)

    def final(self) -> CallQueueQuerySet:
        """Ended, in whatever way."""
        return self.filter(status__in=states.FINAL)

    def requeue(self, *, again: bool = False) -> int:
        """Send these calls once more, those that may be; the count of them. DONE ones only with
        `again=True`.
        """
        legal = (*states.REQUEUABLE, states.DONE) if again else states.REQUEUABLE
        requeuable = self.filter(status__in=legal)
        return sum(_requeue(self.db, pks, legal) for pks in in_batches(requeuable, BATCH))

    def cancel(self) -> int:
        """End these calls, those that no worker has begun; the count of them."""
        cancellable = self.filter(status__in=(*states.CANCELLABLE, states.DISPATCHED))
        return sum(_cancel(self.db, pks) for pks in in_batches(cancellable, BATCH))

    requeue.alters_data = True  # type: ignore[attr-defined]
    cancel.alters_data = True  # type: ignore[attr-defined]


if TYPE_CHECKING:

    class _Calls(models.Manager[CallQueue]):
        """What `from_queryset` makes, written down: without django-stubs' plugin nobody can work it
        out.
        """

        def get_queryset(self) -> CallQueueQuerySet: ...
        def all(self) -> CallQueueQuerySet: ...
        def none(self) -> CallQueueQuerySet: ...
        def filter(self, *args: Any, **kwargs: Any) -> CallQueueQuerySet: ...
        def exclude(self, *args: Any, **kwargs: Any) -> CallQueueQuerySet: ...
        def order_by(self, *field_names: Any) -> CallQueueQuerySet: ...
        def using(self, alias: str | None) -> CallQueueQuerySet: ...
        def new(self) -> CallQueueQuerySet: ...
        def waiting(self) -> CallQueueQuerySet: ...
        def due(self) -> CallQueueQuerySet: ...
        def dispatched(self) -> CallQueueQuerySet: ...
        def error(self) -> CallQueueQuerySet: ...
        def failed(self) -> CallQueueQuerySet: ...
        def unknown(self) -> CallQueueQuerySet: ...
        def done(self) -> CallQueueQuerySet: ...
        def cancelled(self) -> CallQueueQuerySet: ...
        def expired(self) -> CallQueueQuerySet: ...
        def final(self) -> CallQueueQuerySet: ...
        def requeue(self, *, again: bool = False) -> int: ...
        def cancel(self) -> int: ...

else:
    _Calls = models.Manager.from_queryset(CallQueueQuerySet)


class CallQueueManager(_Calls):
    """`CallQueue.objects`."""

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
        callback: str | None = None,
    ) -> CallQueue | None:
        """Queue a call, in the caller's transaction. None where the ROUTER discards it.

        Raises InvalidCall (naming the field), UnknownRule or NotAllowed, and then has written
        nothing. With a `unique_key` that an unfinished call carries, returns that call. See
        docs/reference/sending.md for every argument.
        """
        from callqueue.sending import intake

        request = intake.CallRequest(
            call_data, rule, key, priority, cost, not_before, expires_at, unique_key, callback
        )
        return intake.accept(request, using=self.db_for_write)

    def send_many(
        self, iterable: Iterable[Any], *, batch_size: int = 1000, **same: Any
    ) -> list[CallQueue]:
        """Queue many calls with the same arguments, `batch_size` rows a statement; the calls,
        without discarded ones.

        An item is `call_data`, or a mapping with "call_data" and any of `send`'s arguments, which
        win over `same`. All are checked before the first is written; a bad one raises as in `send`,
        its place in the message. One transaction.
        """
        from callqueue.sending import intake

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
        """Whether a call of cost 1 under this rule and key would be released now: room in every
        limit, and no hold.
        """
        from callqueue.operations import forecast

        return forecast.has_room(self.db, rule, key)

    def requeue_one(self, call: CallQueue, *, again: bool = False) -> None:
        """Requeue `call` and bring the instance up to date, or raise IllegalTransition saying why
        not.
        """
        legal = (*states.REQUEUABLE, states.DONE) if again else states.REQUEUABLE
        rows = self.using(self.db_for_write)
        changed = (
            _requeue(rows.db, [call.pk], legal)
            if rows.filter(pk=call.pk, status__in=legal).exists()
            else 0
        )
        call.refresh_from_db(using=self.db_for_write)
        if changed:
            return
        if call.status == states.DONE:
            raise IllegalTransition(
                _("call %d is done; to make it once more on purpose, requeue(again=True)") % call.pk
            )
        if call.status in legal:
            raise IllegalTransition(
                _("another unfinished call carries the unique key %r") % call.unique_key
            )
        why = _("call %(number)d is %(status)s and cannot be requeued")
        raise IllegalTransition(why % {"number": call.pk, "status": call.get_status_display()})

    def cancel_one(self, call: CallQueue) -> None:
        """Cancel `call` and bring the instance up to date, or raise IllegalTransition saying why
        not.
        """
        changed = _cancel(self.db_for_write, [call.pk])
        call.refresh_from_db(using=self.db_for_write)
        if changed:
            return
        if call.status == states.DISPATCHED:
            raise IllegalTransition(
                _("a worker has begun call %d; it can no longer be cancelled") % call.pk
            )
        why = _("call %(number)d is %(status)s and cannot be cancelled")
        raise IllegalTransition(why % {"number": call.pk, "status": call.get_status_display()})

    @property
    def db_for_write(self) -> str:
        """The database that calls are written to: the one named by `using`, or the router's
        choice.
        """
        from django.db import router

        return self._db or router.db_for_write(self.model)


class CallAttemptQuerySet(models.QuerySet["CallAttempt"]):
    """Attempts: the ledger's rows."""

    def open(self) -> CallAttemptQuerySet:
        """Released and not answered: charged in full."""
        return self.filter(finished_at__isnull=True)

    def unbegun(self) -> CallAttemptQuerySet:
        """Released, and no worker has begun them."""
        return self.open().filter(started_at__isnull=True)

    def charged(self) -> CallAttemptQuerySet:
        """All but voided ones, which never reached the wire."""
        return self.exclude(outcome=states.VOIDED)

    def void(self, ids: Iterable[int]) -> int:
        """Take back attempts that are locked, and that no worker has begun; the count of them."""
        ended = self.filter(pk__in=list(ids))
        tallied = ended.filter(rule__in=tallies.tallied_rules(conf.current().book))
        tallied.update(charged=F("cost"), correction_pending=True)
        return ended.update(finished_at=database.ClockNow(), outcome=states.VOIDED)


if TYPE_CHECKING:

    class _Attempts(models.Manager[CallAttempt]):
        """As above."""

        def get_queryset(self) -> CallAttemptQuerySet: ...
        def all(self) -> CallAttemptQuerySet: ...
        def filter(self, *args: Any, **kwargs: Any) -> CallAttemptQuerySet: ...
        def exclude(self, *args: Any, **kwargs: Any) -> CallAttemptQuerySet: ...
        def order_by(self, *field_names: Any) -> CallAttemptQuerySet: ...
        def using(self, alias: str | None) -> CallAttemptQuerySet: ...
        def open(self) -> CallAttemptQuerySet: ...
        def unbegun(self) -> CallAttemptQuerySet: ...
        def charged(self) -> CallAttemptQuerySet: ...
        def void(self, ids: Iterable[int]) -> int: ...

else:
    _Attempts = models.Manager.from_queryset(CallAttemptQuerySet)


class CallAttemptManager(_Attempts):
    """`CallAttempt.objects`."""


def _requeue(using: str, pks: list[int], legal: tuple[int, ...]) -> int:
    count = database.again_after_deadlock(using, lambda: _made_new(using, pks, legal))
    if count:
        events.tell("call_requeued", calls=count, first=pks[0])
    return count


def _made_new(using: str, pks: list[int], legal: tuple[int, ...]) -> int:
    from callqueue.ledger import row_locks

    calls = tables.calls(using)
    with database.writing(using):
        found = [
            one
            for one in row_locks.calls_to_change(using, pks, "unique_key", "status")
            if one[2] in legal
        ]
        count = calls.filter(
            pk__in=[pk for pk, unique_key, _ in found if unique_key is None]
        ).update(**_as_new())
        # Keys are waited for as rows are: in an order that is the same for all.
        for unique_key, pk in sorted(
            (unique_key, pk) for pk, unique_key, _ in found if unique_key is not None
        ):
            try:
                with transaction.atomic(using=using):
                    count += calls.filter(pk=pk).update(active_key=unique_key, **_as_new())
            except IntegrityError:
                continue  # another unfinished call carries the key
    return count


def _as_new() -> dict[str, Any]:
    """The columns of a call that is sent once more."""
    return {
        "status": states.NEW,
        "ready": True,
        "due_at_dt": database.ClockNow(),
        "expires_at_dt": Case(
            When(expires_at_dt__lte=database.ClockNow(), then=Value(None)),
            default=F("expires_at_dt"),
            output_field=models.DateTimeField(),
        ),
        "finished_at_dt": None,
        "failed_count": 0,
        "throttled_count": 0,
        "callback_pending": False,
        "reconcile_at": None,
        "reconcile_count": 0,
    }


def _cancel(using: str, pks: list[int]) -> int:
    gone = database.again_after_deadlock(using, lambda: _made_cancelled(using, pks))
    if gone:
        from callqueue import callbacks

        events.tell("call_cancelled", calls=len(gone), first=gone[0])
        transaction.on_commit(
            lambda: callbacks.announce(using, gone, states.CANCELLED), using=using
        )
    return len(gone)


def _made_cancelled(using: str, pks: list[int]) -> list[int]:
    from callqueue.ledger import row_locks

    with database.writing(using):
        found = row_locks.calls_to_change(using, pks, "status", "last_attempt")
        last = {pk: number for pk, status, number in found if status == states.DISPATCHED}
        unbegun = row_locks.unbegun_of(using, last) if last else []
        tables.attempts(using).void([pk for pk, _, _ in unbegun])
        gone = [pk for pk, status, _ in found if status in states.CANCELLABLE]
        gone += [call for _, call, number in unbegun if last[call] == number]
        tables.calls(using).filter(pk__in=gone).update(**transitions.ended(states.CANCELLED))
    return sorted(gone)
