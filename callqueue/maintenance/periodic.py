"""Callqueue's tasks in Celery's beat: the schedule that settings hold, and its rows in the tables
of django-celery-beat. Writing the same again changes nothing; which are enabled, operators say.
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


def beat_schedule(*, interval: float = 1.0, queue: str | None = None) -> dict[str, dict[str, Any]]:
    """The schedule to add to CELERY_BEAT_SCHEDULE: the dispenser every `interval` seconds,
    recovery, and cleanup by night. `queue` is the Celery queue the tasks go to (None: Celery's
    default). A task that no worker took in time is dropped.
    """
    options = {} if queue is None else {"queue": queue}
    return {
        "callqueue.dispenser": {
            "task": "callqueue.dispenser",
            "schedule": interval,
            "options": {"expires": max(1.0, interval), **options},
        },
        "callqueue.recover_lost_calls": {
            "task": "callqueue.recover_lost_calls",
            "schedule": 30.0,
            "options": {"expires": 30.0, **options},
        },
        "callqueue.cleanup_call_queue": {
            "task": "callqueue.cleanup_call_queue",
            "schedule": crontab(minute=17, hour=3),
            "options": {"expires": 3600.0, **options},
        },
    }


def write_rows(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Make or correct the row of each entry: its name -> "created", "changed" or "unchanged"."""
    with transaction.atomic():
        return {name: _write_row(name, entry) for name, entry in entries.items()}


def remove_rows(names: Iterable[str]) -> int:
    """Delete the rows of these names; the count of them."""
    if not apps.is_installed("django_celery_beat"):
        return 0
    from django_celery_beat.models import PeriodicTask

    deleted: dict[str, int] = PeriodicTask.objects.filter(name__in=list(names)).delete()[1]
    return deleted.get(PeriodicTask._meta.label, 0)


def names_of_written_rows() -> list[str]:
    """The names of the rows that `callqueue_schedule` wrote."""
    if not apps.is_installed("django_celery_beat"):
        return []
    from django_celery_beat.models import PeriodicTask

    rows = PeriodicTask.objects.filter(name__in=TASKS, task=F("name"))
    return list(rows.order_by("name").values_list("name", flat=True))


def names_of_enabled_rows(task: str) -> list[str]:
    """The names of the enabled rows for this task. The tables must be there."""
    from django_celery_beat.models import PeriodicTask

    return list(PeriodicTask.objects.filter(task=task, enabled=True).values_list("name", flat=True))


def scheduled_tasks(app: Any) -> list[tuple[str, str]]:
    """callqueue's tasks that are scheduled: each with its queue, "" where routes decide."""
    entries = (app.conf.beat_schedule or {}).values()
    found = [(one.get("task") or "", (one.get("options") or {}).get("queue")) for one in entries]
    if apps.is_installed("django_celery_beat"):
        from django_celery_beat.models import PeriodicTask

        found += PeriodicTask.objects.filter(enabled=True).values_list("task", "queue")
    return [(str(task), queue or "") for task, queue in found if task in TASKS]


def _write_row(name: str, entry: Mapping[str, Any]) -> str:
    from django_celery_beat.models import PeriodicTask

    options = entry["options"]
    columns = {
        "task": entry["task"],
        "queue": options.get("queue"),
        "expire_seconds": max(1, round(options["expires"])),
        **_columns_of_schedule(entry["schedule"]),
    }
    if PeriodicTask.objects.filter(name=name, **columns).exists():
        return "unchanged"
    _, is_new = PeriodicTask.objects.update_or_create(name=name, defaults=columns)
    return "created" if is_new else "changed"


def _columns_of_schedule(schedule: crontab | float) -> dict[str, Any]:
    """The columns that name its row, inserted where there is none. A float is in seconds."""
    from django_celery_beat.models import CrontabSchedule, IntervalSchedule

    if isinstance(schedule, crontab):
        row = CrontabSchedule.from_schedule(schedule)  # in a table of its own
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
