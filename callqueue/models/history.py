"""The tables of history: what attempts came to, by stretches of time. `history.sums` writes it."""

from __future__ import annotations

from django.db import models

from callqueue.history.sums import new_buckets


class Sum(models.Model):
    """What a rule's attempts came to that ended in `width` seconds from `start` on (seconds since
    the epoch); width 0: since ever. `waits`, `answers`: by the buckets of `history.sums.BOUNDS`.
    """

    id = models.BigAutoField(primary_key=True)
    rule = models.CharField(max_length=100)
    width = models.PositiveIntegerField()
    start = models.BigIntegerField()  # in ledger time
    sent = models.BigIntegerField(default=0)
    done = models.BigIntegerField(default=0)
    failed = models.BigIntegerField(default=0)
    throttled = models.BigIntegerField(default=0)
    lost = models.BigIntegerField(default=0)
    waits = models.JSONField(default=new_buckets)
    answers = models.JSONField(default=new_buckets)

    class Meta:
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("rule", "width", "start"), name="callqueue_one_sum"),
        )
        indexes = (models.Index(fields=["width", "start"], name="callqueue_sums"),)

    def __str__(self) -> str:
        return f"{self.rule} {self.start}+{self.width}"


class Summed(models.Model):
    """How far sums are: one row, and whoever locks it goes on."""

    id = models.PositiveSmallIntegerField(primary_key=True)
    until = models.BigIntegerField(default=0)  # microseconds: what ended before is in them
    settled = models.BigIntegerField(default=0)  # seconds: quarters before were counted once more

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.until)
