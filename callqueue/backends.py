"""Where TASKS finds the backend of Django's Tasks API, which is made when it is first asked for."""

from __future__ import annotations

from typing import Any

from callqueue.integrations import django_tasks


def __getattr__(name: str) -> Any:
    return getattr(django_tasks, name)
