"""The tables of attempts: the ledger, and what calls become that were locked at an attempt's end.
An attempt outlives its call as long as a limit's window still counts it, so deleting a call never
makes room that the provider does not have.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from callqueue import states
from callqueue.fields import SealedTextField, ToldJSONField, ToldTextField, one_call
from callqueue.managers import CallAttemptManager
from callqueue.models.calls import CallQueue
from callqueue.models.table import Table

# what failed, or was answered with anything but success
UNUSUAL = models.Q(outcome__in=states.FAULTY) | models.Q(response_status__gte=states.BEYOND_SUCCESS)


class CallAttempt(Table):
    """One try at a call: a row of the ledger. Charged from its release until it has aged."""

    class Outcome(models.TextChoices):
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
    # Instants are in ledger time.
    released_at = models.DateTimeField(_("released"))
    # Not before this; NULL: at once.
    send_at = models.DateTimeField(_("to be sent at"), null=True, blank=True)
    # Until when it is to be begun; and once it is, until when its end is to be recorded.
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
    # How `response_body` holds what came (see callqueue.answers), and how many bytes that was.
    response_form = models.CharField(
        _("form of the body"), max_length=20, blank=True, default="", db_default="", editable=False
    )
    response_size = models.PositiveIntegerField(_("response size"), null=True, blank=True)
    error_message = ToldTextField(_("error"), blank=True, default="")
    # The process that began it: a worker's, or one that `states.OF_PERMITS` marks.
    worker = models.CharField(_("worker"), max_length=100, blank=True, default="")
    # What it was charged at its release, where it costs something else after all; else NULL.
    charged = models.JSONField(null=True, editable=False)
    # Whether the tallies are still to be told so.
    correction_pending = models.BooleanField(default=False, db_default=False, editable=False)
    # What it cost was told after its end, when the tallies may have let it go.
    settled = models.BooleanField(default=False, db_default=False, editable=False)

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
            # Few of many attempts: what an operator looks for.
            models.Index(
                fields=("rule", "outcome", "response_status", "finished_at", "id"),
                name="callqueue_unusual",
                condition=UNUSUAL,
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
    """What becomes of a call whose row was locked at its record: a dispenser writes it later."""

    attempt_id = models.BigIntegerField(primary_key=True)
    call_id = models.BigIntegerField()
    number = models.PositiveIntegerField()
    columns = models.JSONField()  # of the call: their values, by name

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return gettext("attempt %(number)s of call %(call)s") % {
            "number": self.number,
            "call": self.call_id,
        }
