"""Writes a beat schedule into django-celery-beat's tables, which must be installed.

In: entries as CELERY_BEAT_SCHEDULE has them. Writing the same ones again changes nothing, and
whether a task is enabled is left as operators set it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from celery.schedules import crontab, maybe_schedule
from django.apps import apps
from django.db import transaction

DISPENSER = "callqueue.dispenser"
TASKS = (DISPENSER, "callqueue.recover_lost_calls", "callqueue.cleanup_call_queue")


def write(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Make or correct the row of each entry: its name -> "created", "changed" or "unchanged"."""
    with transaction.atomic():
        return {name: _write(name, entry) for name, entry in entries.items()}


def remove(names: Iterable[str]) -> int:
    """Delete the rows of these names; the count of them."""
    from django_celery_beat.models import PeriodicTask

    gone = 0
    for row in PeriodicTask.objects.filter(name__in=list(names)):
        row.delete()
        gone += 1
    return gone


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

    columns = _columns(entry)
    row = PeriodicTask.objects.select_for_update().filter(name=name).first()
    if row is None:
        PeriodicTask.objects.create(name=name, **columns)
        return "created"
    if all(getattr(row, column) == value for column, value in columns.items()):
        return "unchanged"
    for column, value in columns.items():
        setattr(row, column, value)
    row.save()
    return "changed"


def _columns(entry: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(entry.get("options", {}))
    expires = options.get("expires")
    return {
        "task": entry["task"],
        "args": json.dumps(list(entry.get("args", ()))),
        "kwargs": json.dumps(dict(entry.get("kwargs", {}))),
        "queue": options.get("queue"),
        "expire_seconds": None if expires is None else max(1, round(expires)),
        **_when(maybe_schedule(entry["schedule"])),
    }


def _when(schedule: Any) -> dict[str, Any]:
    from django_celery_beat.models import CrontabSchedule, IntervalSchedule

    if isinstance(schedule, crontab):
        return {"crontab": _saved(CrontabSchedule.from_schedule(schedule)), "interval": None}
    microseconds = round(schedule.run_every.total_seconds() * 1_000_000)
    every, period = microseconds, IntervalSchedule.MICROSECONDS
    if microseconds % 1_000_000 == 0:
        every, period = microseconds // 1_000_000, IntervalSchedule.SECONDS
    row = IntervalSchedule.objects.filter(every=every, period=period).first()
    return {
        "interval": row or IntervalSchedule.objects.create(every=every, period=period),
        "crontab": None,
    }


def _saved(row: Any) -> Any:
    if row.pk is None:
        row.save()
    return row
