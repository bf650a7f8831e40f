"""callqueue_schedule: writes the periodic tasks into django-celery-beat."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core.management.base import CommandParser

from callqueue import conf
from callqueue.maintenance import periodic
from callqueue.management.base import CallQueueCommand, problem


class Command(CallQueueCommand):
    help = (
        "Write callqueue's periodic tasks into django-celery-beat; "
        "running it again changes nothing that is right already."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--queue",
            metavar="Q",
            help="the Celery queue of these tasks (default: Celery's default queue)",
        )
        parser.add_argument("--remove", action="store_true", help="delete the tasks instead")

    def run(self, using: str, options: dict[str, Any]) -> None:
        if not apps.is_installed("django_celery_beat"):
            raise problem(
                "django-celery-beat is not installed: "
                'pip install "django-callqueue[beat]" and add "django_celery_beat" to '
                "INSTALLED_APPS; or use CELERY_BEAT_SCHEDULE = callqueue.beat_schedule()"
            )
        interval = conf.current().interval
        entries = periodic.beat_schedule(interval=interval, queue=options["queue"])
        if options["remove"]:
            self.say(f"removed {periodic.remove_rows(entries)} periodic tasks")
            return
        for name, what in periodic.write_rows(entries).items():
            self.say(f"{name}: {what}")
