"""Writes a beat schedule into django-celery-beat's tables, which must be installed.

In: entries as `beat_schedule` makes them. Writing the same ones again changes nothing, and whether
a task is enabled is left as operators set it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from celery.schedules import crontab
from django.apps import apps
from django.db import transaction
from django.db.models import F

DISPENSER = "callqueue.dispenser"
TASKS = (DISPENSER, "callqueue.recover_lost_calls", "callqueue.cleanup_call_queue")


def write(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Make or correct the row of each entry: its name -> "created", "changed" or "unchanged"."""
    with transaction.atomic():
        return {name: _write(name, entry) for name, entry in entries.items()}


def remove(names: Iterable[str]) -> int:
    """Delete the rows of these names; the count of them."""
    if not apps.is_installed("django_celery_beat"):
        return 0
    from django_celery_beat.models import PeriodicTask

    deleted: dict[str, int] = PeriodicTask.objects.filter(name__in=list(names)).delete()[1]
    return deleted.get(PeriodicTask._meta.label, 0)


def written() -> list[str]:
    """The names of the rows that `callqueue_schedule` wrote."""
    if not apps.is_installed("django_celery_beat"):
        return []
    from django_celery_beat.models import PeriodicTask

    rows = PeriodicTask.objects.filter(name__in=TASKS, task=F("name"))
    return list(rows.order_by("name").values_list("name", flat=True))


def enabled(task: str) -> list[str]:
    """The names of the enabled rows for this task; none where the tables do not exist."""
    from django_celery_beat.models import PeriodicTask

    return list(PeriodicTask.objects.filter(task=task, enabled=True).values_list("name", flat=True))


def scheduled(app: Any) -> list[tuple[str, str]]:
    """callqueue's tasks that are scheduled, in CELERY_BEAT_SCHEDULE or in rows: each with its
    queue, "" where Celery's routes decide.
    """
    entries = (app.conf.beat_schedule or {}).values()
    found = [(one.get("task") or "", (one.get("options") or {}).get("queue")) for one in entries]
    if apps.is_installed("django_celery_beat"):
        from django_celery_beat.models import PeriodicTask

        found += PeriodicTask.objects.filter(enabled=True).values_list("task", "queue")
    return [(str(task), queue or "") for task, queue in found if task in TASKS]


def _write(name: str, entry: Mapping[str, Any]) -> str:
    from django_celery_beat.models import PeriodicTask

    options = entry["options"]
    columns = {
        "task": entry["task"],
        "queue": options.get("queue"),
        "expire_seconds": max(1, round(options["expires"])),
        **_when(entry["schedule"]),
    }
    if PeriodicTask.objects.filter(name=name, **columns).exists():
        return "unchanged"
    _, is_new = PeriodicTask.objects.update_or_create(name=name, defaults=columns)
    return "created" if is_new else "changed"


def _when(schedule: crontab | float) -> dict[str, Any]:
    """The columns that say when; the row of another table that they need is made."""
    from django_celery_beat.models import CrontabSchedule, IntervalSchedule

    if isinstance(schedule, crontab):
        row = CrontabSchedule.from_schedule(schedule)
        if row.pk is None:
            row.save()
        return {"crontab": row, "interval": None}
    every, period = round(schedule), IntervalSchedule.SECONDS
    if every != schedule:
        every, period = round(schedule * 1_000_000), IntervalSchedule.MICROSECONDS
    # the table may have the same interval twice
    row = IntervalSchedule.objects.filter(every=every, period=period).first()
    row = row or IntervalSchedule.objects.create(every=every, period=period)
    return {"crontab": None, "interval": row}
