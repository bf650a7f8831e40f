"""No object in hand shows a secret, a payload or a key by its repr, as error reporters would."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import django
import pytest
from celery import shared_task
from cryptography.fernet import Fernet

import callqueue
from callqueue import GiveUp, Rule
from callqueue.exceptions import CallQueueError
from callqueue.models import CallQueue
from callqueue.outcome import OUTCOMES
from callqueue.security.secrets import Secret
from tests.support import behaviour

SECRET, PAYLOAD = "sk-live-5e1f-secret", "zero.patient@clinic.example"
KEY = Fernet.generate_key().decode()
# fields of ours that hold what others may not see, whatever they are called elsewhere
TELLING = {
    "args", "call_data", "content", "encryption_keys", "kwargs", "of_send", "options", "params",
    "response", "secret_values",
}  # fmt: skip


def classes() -> Iterator[Any]:
    """Every dataclass and named tuple of the package, but the testing kit's."""
    for module in pkgutil.walk_packages(callqueue.__path__, "callqueue."):
        if module.name.startswith(("callqueue.testing", "callqueue.migrations")):
            continue
        if module.name == "callqueue.backends" and django.VERSION < (6, 0):  # it needs that Django
            continue
        for one in vars(importlib.import_module(module.name)).values():
            is_record = inspect.isclass(one) and (
                dataclasses.is_dataclass(one)
                or (issubclass(one, tuple) and hasattr(one, "_fields"))
            )
            if is_record and one.__module__ == module.name:
                yield one


class Shown:
    """Stands in a field, and remembers whether it was shown."""

    is_shown = False

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        self.is_shown = True
        return ""


def test_no_class_shows_a_field_that_may_hold_what_is_secret() -> None:
    found = list(classes())
    assert len(found) > 100
    for record in found:
        if issubclass(record, tuple):
            inside = {name: Shown() for name in record._fields}
            instance = tuple.__new__(record, inside.values())
        else:
            inside = {one.name: Shown() for one in dataclasses.fields(record)}
            instance = object.__new__(record)
            for name, value in inside.items():
                object.__setattr__(instance, name, value)
        repr(instance)
        assert not [name for name in TELLING & inside.keys() if inside[name].is_shown], record


def is_ours(kind: type) -> bool:
    """What has a repr of our making. An exception and a verdict are their words."""
    is_words = kind.__repr__ is object.__repr__ or issubclass(kind, (BaseException, *OUTCOMES))
    return kind.__module__.startswith("callqueue.") and not is_words


@contextmanager
def watched() -> Iterator[tuple[set[str], set[str]]]:
    """What is seen at the end of each function of ours, and whose repr tells something there."""
    seen, told = set[str](), set[str]()

    def look(frame: FrameType, event: str, _: Any) -> None:
        name, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event != "return" or not name.startswith("callqueue."):
            return
        for value in list(frame.f_locals.values()):
            kind = type(value)
            if function not in ("__init__", "__new__") and is_ours(kind):
                seen.add(kind.__name__)
                shown = repr(value)
                if any(text in shown for text in (SECRET, PAYLOAD, KEY)):
                    told.add(f"{kind.__module__}.{kind.__name__} in {function}")

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield seen, told
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@shared_task(name="tests.told_of_a_patient")
def told(name: str, token: str) -> str:
    raise ValueError(f"no {name}")


def test_nothing_in_hand_shows_what_is_secret(
    rules: Callable[..., None], remote: behaviour.Vendor
) -> None:
    """From `send` to the end, of calls that are answered in every way."""
    rules(
        default=Rule(),
        hook=Rule(classify=lambda answer: GiveUp(answer.text)),
        more={"SECRETS": {"TOKEN": SECRET}, "ENCRYPTION_KEYS": [KEY]},
    )
    params = {"json": {"to": PAYLOAD}, "headers": {"Authorization": Secret("TOKEN")}}
    echo = (422, {"X-Echo": SECRET}, f"{SECRET} {PAYLOAD}".encode())
    remote.answers = {"/": 200, "/no": echo, "/late": 429}
    with watched() as (seen, told_by):
        for path in remote.answers:
            for rule in ("default", "hook"):
                url = f"http://vendor.example{path}"
                call_data = {"method": "post", "params": {"url": url, **params}}
                CallQueue.objects.send(call_data, rule=rule)
        task = {"name": told.name, "args": [PAYLOAD], "kwargs": {"token": Secret("TOKEN")}}
        CallQueue.objects.send({"method": "celery_task", "params": task})
        with pytest.raises(CallQueueError):
            CallQueue.objects.send({"method": "post", "params": {"url": PAYLOAD, **params}})
        while behaviour.run():
            pass
    assert told_by == set()
    assert {"Job", "Result", "Config", "CallRequest"} <= seen
