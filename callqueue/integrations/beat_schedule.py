"""The periodic tasks, for Celery beat: as a CELERY_BEAT_SCHEDULE, and as rows of
django-celery-beat.
"""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab


def beat_schedule(*, interval: float = 1.0, queue: str | None = None) -> dict[str, dict[str, Any]]:
    """The schedule to add to CELERY_BEAT_SCHEDULE: the dispenser every `interval` seconds,
    recovery, and cleanup by night.

    `queue` is the Celery queue the tasks go to (None: Celery's default). A tick that no worker took
    in time is dropped.
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
