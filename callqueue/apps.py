"""The Django app: registers the system checks, and the tasks, which are sent by their names."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class CallQueueConfig(AppConfig):
    """callqueue, the app."""

    name = "callqueue"
    label = "callqueue"
    verbose_name = _("Call queue")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from callqueue import checks, tasks  # noqa: F401
