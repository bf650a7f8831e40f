"""The tables of history: what was sent, answered and refused, by stretches of time. Counted once by
a dispenser as attempts end; pages and commands read nothing else.
"""

from __future__ import annotations

from django.db import models


class Stretch(models.Model):
    """`width` seconds from `start` on (seconds since the epoch)."""

    id = models.BigAutoField(primary_key=True)
    width = models.PositiveIntegerField()
    start = models.BigIntegerField()

    class Meta:
        abstract = True
        default_permissions = ()


class Total(Stretch):
    """What ended in `width` seconds from `start` on (seconds since the epoch): of a rule, where
    `key` is empty, or of one of its keys.

    Attempts that reached the wire: `sent` of them, which came to `done`, `failed` or `throttled`;
    of those that failed, `lost` had no answer that anybody knows of.
    `waits` and `answers` are histograms: see operations.histograms. Those of keys have none.
    """

    rule = models.CharField(max_length=100)
    key = models.CharField(max_length=255, blank=True, default="")
    sent = models.PositiveIntegerField(default=0)
    done = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    throttled = models.PositiveIntegerField(default=0)
    lost = models.PositiveIntegerField(default=0, db_default=0)
    waits = models.JSONField(default=dict)
    answers = models.JSONField(default=dict)

    class Meta(Stretch.Meta):
        constraints = (
            models.UniqueConstraint(
                fields=("rule", "key", "width", "start"), name="callqueue_one_total"
            ),
        )
        indexes = (models.Index("width", "start", name="callqueue_totals"),)

    def __str__(self) -> str:
        return f"{self.rule} {self.key} {self.start}+{self.width}"


class Peak(Stretch):
    """The highest use of any window of a budget that a call ended in `width` seconds from `start`
    on, by the arithmetic of an audit; `value` had it. `used` and `room` give the share.
    """

    budget = models.CharField(max_length=150)
    value = models.CharField(max_length=255, blank=True, default="")
    highest = models.BigIntegerField(default=0)
    allowed = models.BigIntegerField(default=0)
    used = models.FloatField(default=0)
    room = models.FloatField(default=0)

    class Meta(Stretch.Meta):
        constraints = (
            models.UniqueConstraint(fields=("budget", "width", "start"), name="callqueue_one_peak"),
        )
        indexes = (models.Index("width", "start", name="callqueue_peaks"),)

    def __str__(self) -> str:
        return f"{self.budget} {self.start}+{self.width}"


class Counted(models.Model):
    """How far history is counted: one row, and whoever locks it goes on. Instants in microseconds.

    Every attempt that ended before `until` is in the totals, but those in `pending`, which were
    still open when it was passed. `peaks_until`: every call counted before it is in the peaks.
    `frame` changes when the clock jumps.
    """

    id = models.PositiveSmallIntegerField(primary_key=True)
    until = models.BigIntegerField(default=0)
    peaks_until = models.BigIntegerField(default=0)
    frame = models.PositiveIntegerField(default=0)
    pending = models.JSONField(default=list)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.until)
