"""The tasks of Django's Tasks API that this process knows."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from django.utils.module_loading import autodiscover_modules


def registered(path: str, kind: type) -> Any:
    """The task of this name, among those that are there: nothing is imported because a row names
    it.
    """
    _discover()
    module, _, name = path.rpartition(".")
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(found, kind) or getattr(found, "module_path", None) != path:
        raise LookupError(
            f"this process has no task {path!r}; is its module imported, "
            "or named `tasks` in an installed app?"
        )
    return found


@cache
def _discover() -> None:
    """Import the `tasks` modules of the installed apps, as Celery's workers do."""
    autodiscover_modules("tasks")
