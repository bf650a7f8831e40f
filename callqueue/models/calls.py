"""The table of calls."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import models, router
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from callqueue import forecast, states
from callqueue.answers import Answer, answer_of
from callqueue.database import ClockNow
from callqueue.fields import (
    UNREADABLE,
    SealedJSONField,
    ToldTextField,
    new_idempotency_key,
    one_call,
)
from callqueue.managers import CallQueueManager, columns_written_besides, leave_to_promotion
from callqueue.models.table import Table

if TYPE_CHECKING:
    from django.db.models.fields.related_descriptors import RelatedManager

    from callqueue.models.attempts import CallAttempt


class CallQueue(Table):
    """A call that the application owes to an API, from `send` to its end."""

    class Status(models.IntegerChoices):
        NEW = states.NEW, _("new")
        DISPATCHED = states.DISPATCHED, _("dispatched")
        ERROR = states.ERROR, _("will be retried")
        DONE = states.DONE, _("done")
        FAILED = states.FAILED, _("failed")
        CANCELLED = states.CANCELLED, _("cancelled")
        EXPIRED = states.EXPIRED, _("expired")
        UNKNOWN = states.UNKNOWN, _("unknown")

    id = models.BigAutoField(primary_key=True)
    status = models.PositiveSmallIntegerField(
        _("status"), choices=Status.choices, default=Status.NEW
    )
    rule = models.CharField(_("rule"), max_length=100, default="default")
    queue = models.CharField(_("queue"), max_length=100, blank=True, default="")
    key = models.CharField(_("key"), max_length=255, blank=True, default="")
    priority = models.SmallIntegerField(_("priority"), default=0)
    cost = models.JSONField(_("cost"), default=one_call)
    # Instants are in wall time, but `reconcile_at` is in ledger time.
    created_dt = models.DateTimeField(_("created"), db_default=ClockNow(), editable=False)
    due_at_dt = models.DateTimeField(_("due"), db_default=ClockNow())
    # It is not to be begun after this; of a permit renewed while its process waits.
    expires_at_dt = models.DateTimeField(_("expires"), null=True, blank=True)
    dispatched_at_dt = models.DateTimeField(_("dispatched"), null=True, blank=True, editable=False)
    finished_at_dt = models.DateTimeField(_("finished"), null=True, blank=True, editable=False)
    call_data = SealedJSONField(_("call data"), bound_to="idempotency_key")
    method = models.CharField(_("method"), max_length=100, blank=True, default="", editable=False)
    host = models.CharField(_("host"), max_length=255, blank=True, default="", editable=False)
    # Of a URL no more than this, redacted, or a permit's label; empty where call_data is encrypted.
    path = models.CharField(
        _("path"), max_length=255, blank=True, default="", db_default="", editable=False
    )
    failed_count = models.PositiveIntegerField(_("failed attempts"), default=0, editable=False)
    throttled_count = models.PositiveIntegerField(
        _("throttled attempts"), default=0, editable=False
    )
    last_attempt = models.PositiveIntegerField(_("attempts"), default=0, editable=False)
    error_message = ToldTextField(_("last error"), blank=True, default="", editable=False)
    unique_key = models.CharField(_("unique key"), max_length=255, null=True, blank=True)
    callback = models.CharField(_("callback"), max_length=255, null=True, blank=True)
    # True once the call waits for nothing but its turn. Promotion sets it where one is due later,
    # was made by other code, or had its due time or status written by such.
    ready = models.BooleanField(default=False, editable=False)
    idempotency_key = models.UUIDField(default=new_idempotency_key, editable=False)
    first_sent_dt = models.DateTimeField(null=True, editable=False)
    callback_pending = models.BooleanField(default=False, editable=False)
    # Until when the callback that is owed is one process's to send, or nobody's as it was refused
    # (NULL: anybody's).
    callback_at = models.DateTimeField(null=True, editable=False)
    # Whether the signals of this end have gone.
    callback_heard = models.BooleanField(default=False, db_default=False, editable=False)
    # When a worker may be asked again to send the callback (NULL: at once).
    callback_ask_at = models.DateTimeField(null=True, editable=False)
    # When the rule's reconcile hook may be asked next of a call that is UNKNOWN (NULL: at once),
    # and how often it was.
    reconcile_at = models.DateTimeField(null=True, editable=False)
    reconcile_count = models.PositiveSmallIntegerField(default=0, db_default=0, editable=False)
    # The span that was recording when the call was sent, as a W3C traceparent.
    trace_context = models.CharField(max_length=64, null=True, editable=False)

    objects = CallQueueManager()

    # When it was due as it was read: see `save`.
    _read_due: datetime | None = None

    if TYPE_CHECKING:
        pk: int
        attempts: RelatedManager[CallAttempt]

    class Meta:
        verbose_name = _("call")
        verbose_name_plural = _("calls")
        ordering = ("-id",)
        permissions = (
            ("requeue_call", _("Can requeue calls")),
            ("edit_call", _("Can edit the requests of calls and requeue them")),
            ("cancel_call", _("Can cancel calls")),
            ("control_rule", _("Can pause and resume rules and change their limits")),
        )
        # Of a unique key there is one unfinished call, whoever made the row.
        constraints = (
            models.UniqueConstraint(
                fields=("unique_key",),
                name="callqueue_active_key",
                condition=models.Q(unique_key__isnull=False, status__in=states.UNFINISHED),
            ),
        )
        indexes = (
            models.Index(
                "rule",
                models.F("priority").desc(),
                "due_at_dt",
                "id",
                name="callqueue_ready",
                condition=models.Q(status__in=states.WAITING, ready=True),
            ),
            models.Index(
                "rule",
                "key",
                "priority",
                "due_at_dt",
                "id",
                name="callqueue_ready_by_key",
                condition=models.Q(status__in=states.WAITING, ready=True),
            ),
            # Few of many: those that processes wait for to make them themselves.
            models.Index(
                "rule",
                "key",
                name="callqueue_permits",
                condition=models.Q(method=states.PERMIT, status__in=states.WAITING, ready=True),
            ),
            models.Index(
                "due_at_dt",
                name="callqueue_later",
                condition=models.Q(status__in=states.WAITING, ready=False),
            ),
            models.Index(
                "expires_at_dt",
                name="callqueue_expiring",
                condition=models.Q(status__in=states.WAITING, expires_at_dt__isnull=False),
            ),
            # The lists of calls by rule and by status. What is new has indexes above, and what is
            # done is nearly all.
            models.Index(fields=("rule", "id"), name="callqueue_of_rule"),
            models.Index(
                fields=("status", "rule", "id"),
                name="callqueue_of_status",
                condition=models.Q(status__in=states.NEITHER_NEW_NOR_DONE),
            ),
            models.Index(
                "status",
                "finished_at_dt",
                name="callqueue_finished",
                condition=models.Q(finished_at_dt__isnull=False),
            ),
            models.Index(
                "id", name="callqueue_callbacks", condition=models.Q(callback_pending=True)
            ),
            models.Index(
                "unique_key",
                name="callqueue_unique_key",
                condition=models.Q(unique_key__isnull=False),
            ),
            # finds a key by how it begins
            models.Index(
                fields=("key", "id"),
                opclasses=("varchar_pattern_ops", "int8_ops"),
                name="callqueue_keyed",
                condition=~models.Q(key=""),
            ),
            models.Index(fields=("idempotency_key",), name="callqueue_idempotency_key"),
        )

    @classmethod
    def from_db(cls, *row: Any, **how: Any) -> CallQueue:
        call = super().from_db(*row, **how)
        call._read_due = call.__dict__.get("due_at_dt")
        return call

    def refresh_from_db(self, *args: Any, **how: Any) -> None:
        super().refresh_from_db(*args, **how)
        self._read_due = None  # some or all was read anew: it is not known what of it

    def save(self, *args: Any, update_fields: Iterable[str] | None = None, **how: Any) -> None:
        """As Django's; but of a row that is there, `status` and what else callqueue writes itself
        are saved only where `update_fields` names them: this instance may be from before the call
        was released. So is a `due_at_dt` that is as it was read: a retry may have set another. With
        a changed one the call is promoted anew, as by `update`.
        """
        using = how.get("using") or router.db_for_write(type(self), instance=self)
        fields = None if update_fields is None else {*update_fields}
        is_there = self.pk is not None and not self._state.adding and self._state.db == using
        if fields is None and is_there and not how.get("force_insert"):
            every = {one.attname for one in self._meta.concrete_fields if one.editable}
            fields = every - {"id", "status"} - self.get_deferred_fields()
            if self.__dict__.get("due_at_dt") == self._read_due:
                fields.discard("due_at_dt")
        if fields is None or "due_at_dt" in fields:
            self._read_due = None
        if fields is None:
            leave_to_promotion(self)
        elif written := columns_written_besides(fields):
            self.ready = False
            fields.update(written)
        super().save(*args, update_fields=fields, **how)

    def __str__(self) -> str:
        values = {"number": self.pk, "rule": self.rule, "status": self.get_status_display()}
        return gettext("call %(number)s (%(rule)s, %(status)s)") % values

    def requeue(self, *, again: bool = False) -> None:
        """Send it once more, now: from DONE only with `again=True`. Else IllegalTransition."""
        type(self).objects.db_manager(self._state.db).requeue_one(self, again=again)

    def cancel(self) -> None:
        """End a call that no worker has begun. Else IllegalTransition."""
        type(self).objects.db_manager(self._state.db).cancel_one(self)

    @property
    def answer(self) -> Answer | None:
        """What the last attempt that has ended was answered, read now; None if it was not."""
        ended = self.attempts.exclude(outcome__in=(states.OPEN, states.VOIDED))
        attempt = ended.order_by("-number", "-pk").first()
        return None if attempt is None else answer_of(attempt, UNREADABLE)

    def forecast(self) -> forecast.Forecast:
        """What the call waits for, its place in line (from 1), and when it should go (or None)."""
        return forecast.forecast(self)
