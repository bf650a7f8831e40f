"""What the doctor examines first: the settings, and where the periodic tasks are scheduled."""

from __future__ import annotations

from collections.abc import Iterable

from django.apps import apps

from callqueue import conf
from callqueue.operations import periodic
from callqueue.operations.doctor.broker_checks import celery_app
from callqueue.operations.doctor.check import Check, well, wrong


def check_settings() -> Check:
    """CALLQUEUE is sound."""
    if problems := conf.problems():
        return wrong(
            "settings",
            "; ".join(problems),
            "correct CALLQUEUE in the settings; `manage.py check` says the same",
        )
    return well("settings", f"{len(conf.current().rules)} rules")


def check_schedule(using: str) -> Check:
    """The periodic tasks are scheduled in one place at most."""
    in_settings = {
        entry.get("task"): name for name, entry in (celery_app().conf.beat_schedule or {}).items()
    }
    in_rows = _scheduled_rows()
    task = "callqueue.dispenser"
    is_copied = "DatabaseScheduler" in str(celery_app().conf.beat_scheduler) and in_rows == [
        in_settings.get(task)
    ]
    if (task in in_settings and in_rows and not is_copied) or len(in_rows) > 1:
        return wrong(
            "schedule",
            f"{task} is scheduled more than once: {_places(in_settings.get(task), in_rows)}",
            "keep one: take it out of CELERY_BEAT_SCHEDULE, "
            "or run `manage.py callqueue_schedule --remove`",
        )
    if task in in_settings or in_rows:
        return well(
            "schedule",
            "in CELERY_BEAT_SCHEDULE" if task in in_settings else "in django-celery-beat",
        )
    return well(
        "schedule",
        "none: dispensers of their own release calls; run `manage.py callqueue_cleanup` daily",
    )


def _scheduled_rows() -> list[str]:
    if not apps.is_installed("django_celery_beat"):
        return []
    return periodic.enabled("callqueue.dispenser")


def _places(in_settings: str | None, in_rows: Iterable[str]) -> str:
    places = [f"CELERY_BEAT_SCHEDULE: {in_settings}"] if in_settings else []
    return ", ".join([*places, *(f"django-celery-beat: {name}" for name in in_rows)])
