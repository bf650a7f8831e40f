"""The tables of rules: state, tallies, turns and holds; and of the dispensers that go by them."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from callqueue.database import ClockNow
from callqueue.fields import ToldTextField
from callqueue.models.table import Table


class RuleState(models.Model):
    """What dispensers remember of a rule. Its row is a lock: who has it plans its releases."""

    rule = models.CharField(max_length=100, primary_key=True)
    passes = models.BigIntegerField(default=0, editable=False)
    # The number of its last release among those of its group, which go up: a turn, no instant.
    served = models.BigIntegerField(default=0, editable=False)
    # Which group had the last pass, and how many holds were laid; of a group's first rule, by name,
    # also what the next pass of the group goes by (`ledger.memo`).
    memo = models.JSONField(default=dict, editable=False)
    # Until when the rule's UNKNOWN calls are one worker's to ask its hook of, in ledger time.
    reconciling_until = models.DateTimeField(null=True, editable=False)

    class Meta:
        verbose_name = _("rule")
        verbose_name_plural = _("dashboard")  # what the admin's menu calls the page of all rules
        default_permissions = ()

    def __str__(self) -> str:
        return self.rule


class LedgerState(models.Model):
    """How far ledger time is behind the clock, and in a row of its own when somebody last said by
    what to go: see `ledger.ledger_time.ROW`. Microseconds.
    """

    id = models.PositiveSmallIntegerField(primary_key=True)
    moved = models.BigIntegerField(default=0)
    agreements = models.BigIntegerField(default=0)  # a count
    agreed_at = models.BigIntegerField(default=0)  # of ledger time, since the epoch

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.moved)


class SettingsState(models.Model):
    """What is in force for all, in one row: a change raises its version; a pass goes by one."""

    id = models.PositiveSmallIntegerField(primary_key=True)
    version = models.BigIntegerField(default=0)
    rates = models.JSONField(default=dict)  # that operators changed, by the limit's id

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.version)


class OpinionState(models.Model):
    """What some processes' settings say of the limits, as JSON; of a lapsed one, what they said."""

    digest = models.CharField(max_length=16, primary_key=True)
    limits = models.JSONField()
    seen_at = models.DateTimeField()  # the last sign of life of a process that holds it
    lapsed_at = models.DateTimeField(null=True)  # NULL: it is in force

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.digest


class Tally(models.Model):
    """What a budget with a long window is charged with, for one value of its `per`; kept as it
    changes, by those who hold the budget's rules. It can be counted anew from attempts at any time.
    """

    id = models.BigAutoField(primary_key=True)
    budget = models.CharField(max_length=150)
    value = models.CharField(max_length=255)
    used = models.BigIntegerField(default=0)  # of a token bucket: what has not gone into full_at
    # of a token bucket: when it would be full again, in microseconds of ledger time
    full_at = models.BigIntegerField(default=0)

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("budget", "value"), name="callqueue_one_tally"),
        )

    def __str__(self) -> str:
        return f"{self.budget} {self.value}"


class KeyTurn(Table):
    """A key that has calls ready at some priority of a rule, and its turn: lowest `served` first.
    No pass looks at it until what it is `blocked_on` ("": nothing) is free, or `blocked_until`.
    """

    id = models.BigAutoField(primary_key=True)
    rule = models.CharField(max_length=100)
    priority = models.SmallIntegerField()
    key = models.CharField(max_length=255, blank=True)
    served = models.BigIntegerField(default=0)  # microseconds of ledger time, or just after
    blocked_on = models.CharField(max_length=32, blank=True, default="")
    blocked_until = models.BigIntegerField(default=0)  # microseconds of ledger time

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("rule", "key", "priority"), name="callqueue_one_turn"),
        )
        indexes = (
            models.Index(
                fields=("rule", "blocked_on", "-priority", "served", "id"), name="callqueue_turns"
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


class KeyNews(models.Model):
    """News that a key has a call ready. Who gives news only inserts, and waits for nobody."""

    id = models.BigAutoField(primary_key=True)
    rule = models.CharField(max_length=100)
    priority = models.SmallIntegerField()
    key = models.CharField(max_length=255, blank=True)

    class Meta:
        default_permissions = ()
        indexes = (models.Index(fields=("rule", "-priority", "key"), name="callqueue_news"),)

    def __str__(self) -> str:
        return f"{self.rule} {self.key}"


class Hold(models.Model):
    """Nothing in a scope of a rule is released until the hold ends, whoever laid it."""

    class Source(models.TextChoices):
        PROVIDER = "provider", _("the provider")
        OPERATOR = "operator", _("an operator")
        BREAKER = "breaker", _("the circuit breaker")
        RESTORED = "restored", _("a dispenser, after a restored backup")

    id = models.BigAutoField(primary_key=True)
    rule = models.CharField(_("rule"), max_length=100)
    per = models.CharField(_("per"), max_length=100, default="rule")
    value = models.CharField(_("value"), max_length=255, blank=True, default="")
    source = models.CharField(
        _("laid by"), max_length=16, choices=Source.choices, default=Source.OPERATOR
    )
    reason = ToldTextField(_("reason"), blank=True, default="")
    # Both by ledger time.
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
    """A dispenser: its sign of life, by which others and operators know that it runs."""

    name = models.CharField(max_length=150, primary_key=True)
    started_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    # "steady": a process that dispenses all rules until it is told to stop. "worker", "busy": a
    # process of a worker, while it has time for that, and while it computes. "beat": beat's task,
    # in a worker. "run": it makes all its calls itself. Empty: any other.
    kind = models.CharField(max_length=16, default="", db_default="", editable=False)
    # Where it publishes to, without user and password; empty where it makes calls itself.
    broker = models.CharField(max_length=255, default="", db_default="", editable=False)
    # Of its opinion on the limits; empty once it has ended.
    digest = models.CharField(max_length=16, default="", db_default="", editable=False)

    class Meta:
        verbose_name = _("dispenser")
        verbose_name_plural = _("dispensers")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
