"""Runs Django's tests of tasks on callqueue's backend.

`Immediate` and `Dummy` take the places of the two backends that the tests name: one runs what it
has queued and gives the result, the other lists what waits. Django's two need no database; here every
case has one, in which what is written is committed: async tests read it in threads of their own.
"""

from __future__ import annotations

from typing import Any

import django.tasks.backends.dummy
import django.tasks.backends.immediate
import django.test
from django.test.runner import DiscoverRunner as Runner  # noqa: F401  what the settings name

from callqueue.backends import CallQueueBackend


class Immediate(CallQueueBackend):
    """What is enqueued is run at once, by the dispenser and the executor of the testing kit."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        from callqueue.testing import run_callqueue

        queued = super().enqueue(task, args, kwargs)
        run_callqueue()
        return self.get_result(queued.id)


class Dummy(CallQueueBackend):
    """What is enqueued waits."""

    @property
    def results(self) -> list[Any]:
        from callqueue.models import CallQueue

        calls = CallQueue.objects.order_by("pk")
        return [self.get_result(str(pk)) for pk in calls.values_list("pk", flat=True)]

    def clear(self) -> None:
        from callqueue.models import CallQueue

        CallQueue.objects.all().delete()


class Case(django.test.TransactionTestCase):
    """One of theirs, for which the app is there."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.available_apps = None
        super().__init_subclass__(**kwargs)


django.tasks.backends.immediate.ImmediateBackend = Immediate
django.tasks.backends.dummy.DummyBackend = Dummy
django.test.SimpleTestCase = Case
django.test.TransactionTestCase = Case
