"""The Django app: registers system checks, tasks, and what Celery's workers do besides."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.management.base import CommandError
from django.db.models.signals import pre_migrate
from django.utils.translation import gettext_lazy as _


class CallQueueConfig(AppConfig):
    name = "callqueue"
    label = "callqueue"
    verbose_name = _("Call queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from callqueue import checks, tasks, worker  # noqa: F401

        pre_migrate.connect(refuse_to_take_others_along, sender=self)


def refuse_to_take_others_along(plan: Any = (), **_: Any) -> None:
    """CommandError where `migrate callqueue zero` would drop another app's tables, unasked."""
    undone = [migration for migration, is_backwards in plan if is_backwards]
    others = [str(one) for one in undone if one.app_label != "callqueue"]
    if others and undone[-1].app_label == "callqueue":
        raise CommandError(
            f"{', '.join(others)} would be undone first, with all rows in their tables. Nothing "
            "was changed. To remove callqueue alone: manage.py callqueue_uninstall"
        )
