"""The tables: calls, their attempts (the ledger), the state of each rule, and holds.

Rows only: what may be done with them is in managers.py and the rooms. An attempt outlives its call
as long as a limit's window still counts it, so deleting a call never makes room that the provider
does not have.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from django.db import models
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from callqueue import states
from callqueue.database import ClockNow
from callqueue.fields import (
    SealedJSONField,
    SealedTextField,
    ToldJSONField,
    ToldTextField,
    one_call,
)
from callqueue.managers import CallAttemptManager, CallQueueManager

if TYPE_CHECKING:
    from django.db.models.fields.related_descriptors import RelatedManager

    from callqueue.operations.forecast import Forecast


class CallQueue(models.Model):
    """A call that the application owes to an API, from `send` to its end."""

    class Status(models.IntegerChoices):
        """Where a call stands."""

        NEW = states.NEW, _("new")
        DISPATCHED = states.DISPATCHED, _("dispatched")
        ERROR = states.ERROR, _("error, will be retried")
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
    created_dt = models.DateTimeField(_("created"), db_default=ClockNow(), editable=False)
    due_at_dt = models.DateTimeField(_("due"), db_default=ClockNow())
    expires_at_dt = models.DateTimeField(_("expires"), null=True, blank=True)
    dispatched_at_dt = models.DateTimeField(_("dispatched"), null=True, blank=True, editable=False)
    finished_at_dt = models.DateTimeField(_("finished"), null=True, blank=True, editable=False)
    call_data = SealedJSONField(_("call data"), bound_to="idempotency_key")
    method = models.CharField(_("method"), max_length=100, blank=True, default="", editable=False)
    host = models.CharField(_("host"), max_length=255, blank=True, default="", editable=False)
    failed_count = models.PositiveIntegerField(_("failed attempts"), default=0, editable=False)
    throttled_count = models.PositiveIntegerField(
        _("throttled attempts"), default=0, editable=False
    )
    last_attempt = models.PositiveIntegerField(_("attempts"), default=0, editable=False)
    error_message = ToldTextField(_("last error"), blank=True, default="", editable=False)
    unique_key = models.CharField(_("unique key"), max_length=255, null=True, blank=True)
    callback = models.CharField(_("callback"), max_length=255, null=True, blank=True)
    # True once the call waits for nothing but its turn; a call that is due later, or that other
    # code made, is promoted.
    ready = models.BooleanField(default=False, editable=False)
    # unique_key while the call is unfinished, else NULL: a unique column does the rest on every
    # database.
    active_key = models.CharField(max_length=255, null=True, editable=False)
    idempotency_key = models.UUIDField(default=uuid.uuid4, editable=False)
    first_sent_dt = models.DateTimeField(null=True, editable=False)
    callback_pending = models.BooleanField(default=False, editable=False)
    # When the rule's reconcile hook may be asked next of a call that is UNKNOWN (NULL: at once),
    # and how often it was.
    reconcile_at = models.DateTimeField(null=True, editable=False)
    reconcile_count = models.PositiveSmallIntegerField(default=0, db_default=0, editable=False)
    # The span that was recording when the call was sent, as a W3C traceparent.
    trace_context = models.CharField(max_length=64, null=True, editable=False)

    objects = CallQueueManager()

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
        # Not unique=True: that would make a second index, for LIKE, which nothing uses.
        constraints = (
            models.UniqueConstraint(fields=("active_key",), name="callqueue_active_key"),
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
                models.F("priority").desc(),
                "key",
                "due_at_dt",
                "id",
                name="callqueue_ready_by_key",
                condition=models.Q(status__in=states.WAITING, ready=True),
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
            models.Index(
                "status",
                "id",
                name="callqueue_unusual",
                condition=models.Q(
                    status__in=(
                        states.DISPATCHED,
                        states.ERROR,
                        states.FAILED,
                        states.CANCELLED,
                        states.EXPIRED,
                        states.UNKNOWN,
                    )
                ),
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
            models.Index("created_dt", name="callqueue_created"),
            models.Index(
                "unique_key",
                name="callqueue_unique_key",
                condition=models.Q(unique_key__isnull=False),
            ),
            models.Index("key", "id", name="callqueue_key", condition=~models.Q(key="")),
        )

    def __str__(self) -> str:
        values = {"number": self.pk, "rule": self.rule, "status": self.get_status_display()}
        return gettext("call %(number)s (%(rule)s, %(status)s)") % values

    def requeue(self, *, again: bool = False) -> None:
        """Send the call once more, now. From DONE only with `again=True`. IllegalTransition from
        any other state.
        """
        type(self).objects.db_manager(self._state.db).requeue_one(self, again=again)

    def cancel(self) -> None:
        """End a call that no worker has begun. IllegalTransition once one has, or when it has
        already ended.
        """
        type(self).objects.db_manager(self._state.db).cancel_one(self)

    def forecast(self) -> Forecast:
        """What the call waits for, its place in the queue (from 1), and when it should go (None
        where none can say).
        """
        from callqueue.operations.forecast import forecast

        return forecast(self)


class CallAttempt(models.Model):
    """One try at a call: a row of the ledger. Charged from `released_at` until `finished_at`, then
    it ages.
    """

    class Outcome(models.TextChoices):
        """How an attempt ended; empty while it is open."""

        OPEN = states.OPEN, _("open")
        SUCCEEDED = states.SUCCEEDED, _("succeeded")
        ERRORED = states.ERRORED, _("failed")
        GAVE_UP = states.GAVE_UP, _("gave up")
        THROTTLED = states.THROTTLED, _("throttled")
        LOST = states.LOST, _("lost")
        VOIDED = states.VOIDED, _("voided, never sent")

    id = models.BigAutoField(primary_key=True)
    call = models.ForeignKey(
        CallQueue,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="attempts",
        verbose_name=_("call"),
    )
    number = models.PositiveIntegerField(_("number"))
    rule = models.CharField(_("rule"), max_length=100)
    key = models.CharField(_("key"), max_length=255, blank=True, default="")
    queue = models.CharField(_("queue"), max_length=100, blank=True, default="")
    cost = models.JSONField(_("cost"), default=one_call)
    calls = models.PositiveIntegerField(_("cost in calls"), default=1, editable=False)
    released_at = models.DateTimeField(_("released"))
    send_at = models.DateTimeField(_("to be sent at"), null=True, blank=True)
    lease_until = models.DateTimeField(_("lease until"), null=True, blank=True)
    started_at = models.DateTimeField(_("begun"), null=True, blank=True)
    sent_at = models.DateTimeField(_("sent"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished"), null=True, blank=True)
    outcome = models.CharField(
        _("outcome"), max_length=16, choices=Outcome.choices, blank=True, default=""
    )
    response_status = models.PositiveSmallIntegerField(_("response status"), null=True, blank=True)
    response_headers = ToldJSONField(_("response headers"), null=True, blank=True)
    response_body = SealedTextField(_("response body"), blank=True, default="")
    error_message = ToldTextField(_("error"), blank=True, default="")
    worker = models.CharField(_("worker"), max_length=100, blank=True, default="")
    # What it was charged at its release, where it costs something else after all; pending until the
    # tallies know.
    charged = models.JSONField(null=True, editable=False)
    correction_pending = models.BooleanField(default=False, db_default=False, editable=False)

    objects = CallAttemptManager()

    class Meta:
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        ordering = ("id",)
        default_permissions = ("view",)
        indexes = (
            # Neither of these two has a column that `begin` writes, so that beginning an attempt
            # touches no index.
            models.Index(
                "rule", name="callqueue_open", condition=models.Q(finished_at__isnull=True)
            ),
            models.Index(
                "rule",
                "finished_at",
                name="callqueue_aging",
                condition=models.Q(finished_at__isnull=False),
            ),
            models.Index(
                "rule",
                "key",
                "finished_at",
                name="callqueue_aging_by_key",
                condition=~models.Q(key=""),
            ),
            models.Index(
                "rule", name="callqueue_corrections", condition=models.Q(correction_pending=True)
            ),
        )

    def __str__(self) -> str:
        return gettext("attempt %(number)s of call %(call)s") % {
            "number": self.number,
            "call": self.call_id,
        }


class BelatedEnding(models.Model):
    """What a call becomes whose row was locked when its answer was recorded: written by a dispenser
    once the row is free.
    """

    attempt_id = models.BigIntegerField(primary_key=True)
    call_id = models.BigIntegerField()
    number = models.PositiveIntegerField()
    columns = models.JSONField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return gettext("attempt %(number)s of call %(call)s") % {
            "number": self.number,
            "call": self.call_id,
        }


class RuleState(models.Model):
    """What the dispensers remember of a rule. Its row is the lock: whoever holds it plans the
    rule's releases.
    """

    rule = models.CharField(max_length=100, primary_key=True)
    passes = models.BigIntegerField(default=0, editable=False)
    served = models.BigIntegerField(default=0, editable=False)
    rates = models.JSONField(_("changed limits"), default=dict, blank=True)
    memo = models.JSONField(default=dict, editable=False)
    # The token of the agreement by which passes over the rule go: see agreement.py. The row "" is
    # about all rules.
    agreement = models.CharField(max_length=16, default="", db_default="", editable=False)

    class Meta:
        verbose_name = _("rule")
        verbose_name_plural = _("rules")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.rule


class Tally(models.Model):
    """What a budget with a long window is charged with, for one value of its `per`; kept as it
    changes, by those who hold the budget's rules. Attempts are the truth: it can be counted anew
    from them at any time.
    """

    id = models.BigAutoField(primary_key=True)
    budget = models.CharField(max_length=150)
    value = models.CharField(max_length=255)
    used = models.BigIntegerField(default=0)
    full_at = models.BigIntegerField(
        default=0
    )  # of a token bucket: when it would be full again; microseconds

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("budget", "value"), name="callqueue_one_tally"),
        )

    def __str__(self) -> str:
        return f"{self.budget} {self.value}"


class KeyTurn(models.Model):
    """A key that has calls waiting at some priority of a rule, and its turn among the others:
    lowest `served` first.

    While `blocked_on` says what the key waits for, no pass looks at it: until that is free, or
    `blocked_until`.
    """

    id = models.BigAutoField(primary_key=True)
    rule = models.CharField(max_length=100)
    priority = models.SmallIntegerField()
    key = models.CharField(max_length=255, blank=True)
    served = models.BigIntegerField(default=0)
    blocked_on = models.CharField(max_length=32, blank=True, default="")
    blocked_until = models.BigIntegerField(default=0)  # microseconds on the database's clock

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("rule", "key", "priority"), name="callqueue_one_turn"),
        )
        indexes = (
            models.Index(
                "rule",
                "blocked_on",
                models.F("priority").desc(),
                "served",
                "id",
                name="callqueue_turns",
            ),
            models.Index(
                "rule",
                "blocked_until",
                name="callqueue_turns_blocked",
                condition=~models.Q(blocked_on=""),
            ),
        )

    def __str__(self) -> str:
        return f"{self.rule} {self.key}"


class Hold(models.Model):
    """Nothing in a scope of a rule is released until the hold ends: laid by the provider's answer
    or by an operator.
    """

    class Source(models.TextChoices):
        """Who laid it."""

        PROVIDER = "provider", _("the provider")
        OPERATOR = "operator", _("an operator")
        BREAKER = "breaker", _("the circuit breaker")

    id = models.BigAutoField(primary_key=True)
    rule = models.CharField(_("rule"), max_length=100)
    per = models.CharField(_("per"), max_length=100, default="rule")
    value = models.CharField(_("value"), max_length=255, blank=True, default="")
    source = models.CharField(
        _("laid by"), max_length=16, choices=Source.choices, default=Source.OPERATOR
    )
    reason = ToldTextField(_("reason"), blank=True, default="")
    began_at = models.DateTimeField(_("since"), db_default=ClockNow())
    until = models.DateTimeField(
        _("until"), null=True, blank=True, help_text=_("empty: until it is resumed")
    )

    class Meta:
        verbose_name = _("hold")
        verbose_name_plural = _("holds")
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(
                fields=("rule", "per", "value", "source"), name="callqueue_one_hold"
            ),
        )

    def __str__(self) -> str:
        scope = self.rule if self.per == "rule" else f"{self.rule}, {self.per} {self.value!r}"
        return gettext("hold on %s") % scope


class DispenserState(models.Model):
    """A dispenser: its sign of life, by which others and operators know that it runs, and the
    limits that its settings name.
    """

    name = models.CharField(max_length=150, primary_key=True)
    started_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    # What its settings say of the limits, and a digest of that; empty once it has ended.
    opinion = models.JSONField(null=True, editable=False)
    digest = models.CharField(max_length=16, default="", db_default="", editable=False)

    class Meta:
        verbose_name = _("dispenser")
        verbose_name_plural = _("dispensers")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
