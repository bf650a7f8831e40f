"""What the doctor examines first: the settings, and where the periodic tasks are scheduled."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from django.apps import apps

from callqueue import conf
from callqueue.broker import is_set_up
from callqueue.maintenance import cleanup
from callqueue.operations import dispensers, periodic
from callqueue.operations.doctor.broker_checks import celery_app, is_eager
from callqueue.operations.doctor.check import Check, well, wrong

OVERDUE = timedelta(days=2)  # that calls may be past their retention, where cleanup runs daily


def check_application() -> Check:
    """The project's Celery application is the one in use."""
    if is_set_up():
        return well("celery", f"the application is {celery_app().main or celery_app().loader}")
    return wrong(
        "celery",
        "the project's Celery application is not loaded, so CELERY_... settings are not read",
        "import it in the project's __init__.py: `from .celery import app as celery_app`",
    )


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
    place = "CELERY_BEAT_SCHEDULE" if task in in_settings else "django-celery-beat"
    if not (task in in_settings or in_rows):
        return _without_beat(using)
    if not is_eager() and not dispensers.has_beat(using):
        return wrong(
            "schedule",
            f"in {place}, but no task of beat has run lately: nothing deletes old calls",
            "run `celery -A <project> beat`, and a worker on the queue of its tasks",
        )
    return well("schedule", f"in {place}, and beat runs")


def _without_beat(using: str) -> Check:
    """Nothing is scheduled: cleanup is somebody else's, a cron job's; whether it runs can be seen
    by what it leaves.
    """
    late = cleanup.overdue_for(using)
    if late > OVERDUE:
        return wrong(
            "schedule",
            f"nothing is scheduled, and calls have been past their retention for {late.days} days",
            "run `manage.py callqueue_cleanup` daily (cron, a systemd timer), or "
            "beat with callqueue.beat_schedule()",
        )
    return well("schedule", "none: dispensers release calls; cleanup is not late")


def _scheduled_rows() -> list[str]:
    if not apps.is_installed("django_celery_beat"):
        return []
    return periodic.enabled("callqueue.dispenser")


def _places(in_settings: str | None, in_rows: Iterable[str]) -> str:
    places = [f"CELERY_BEAT_SCHEDULE: {in_settings}"] if in_settings else []
    return ", ".join([*places, *(f"django-celery-beat: {name}" for name in in_rows)])
