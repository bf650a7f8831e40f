"""Runs Django's tests of tasks on callqueue's backend.

`Immediate` and `Dummy` take the places of the two backends that the tests name: one runs what it
has queued and gives the result, the other lists what waits. Django's two need no database; here every
case has one, in which what is written is committed: async tests read it in threads of their own.
"""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import django.tasks.backends.dummy
import django.tasks.backends.immediate
import django.test
from django.test.runner import DiscoverRunner

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


class Recorded(unittest.TextTestResult):
    """Keeps each test's name, and why it failed; a failed subtest is its test's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wrong: dict[str, str] = {}
        self.names: list[str] = []

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self.names.append(_name(test))

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._note(test, err)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._note(test, err)

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note(test, err)

    def _note(self, test: Any, err: Any) -> None:
        self.wrong[_name(test)] = f"{err[0].__name__}: {err[1]}"


class Runner(DiscoverRunner):
    """Django's, which writes at the end what came of each test, in JUnit's form."""

    def get_resultclass(self) -> Any:
        return Recorded

    def run_suite(self, suite: Any, **kwargs: Any) -> Any:
        result = super().run_suite(suite, **kwargs)
        root = ElementTree.Element("testsuite")
        for name in result.names:
            place, _, method = name.partition("::")
            case = ElementTree.SubElement(root, "testcase", classname=place, name=method)
            if name in result.wrong:
                ElementTree.SubElement(case, "failure", message=result.wrong[name])
        ElementTree.ElementTree(root).write(Path(os.environ["CALLQUEUE_SUITE_REPORT"]))
        return result


def _name(test: Any) -> str:
    test = getattr(test, "test_case", test)
    return f"{type(test).__name__}::{getattr(test, '_testMethodName', test)}"
