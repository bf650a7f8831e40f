"""A plugin of pytest that collects once, makes the database once, and then runs what it is told, each
time in a process of its own that has a mutant in it.

In: CALLQUEUE_MUTANTS_SOCKET, the number of an open socket. Out: there, a line of JSON for each line.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
from collections import defaultdict
from contextlib import closing, suppress
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.mutants import tracing

functions: defaultdict[str, list[FunctionType]] = defaultdict(list)
tracing.profile()  # what is called before any test is in it too early for a mutant


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    tracing.profiles[0].disable()
    early = tracing.called()
    by_name = defaultdict(list)
    for item in session.items:
        by_name[name_of(item)].append(item)
    for first in [item for item in session.items if has_database(item)][:1]:
        first.config.hook.pytest_runtest_protocol(item=first, nextitem=far_from(first))
    with closing(socket.socket(fileno=int(os.environ["CALLQUEUE_MUTANTS_SOCKET"]))) as asked:
        note_functions()
        with Database() as database:
            answer(asked, {"early": sorted(early | tracing.called())})
            for line in asked.makefile("r", encoding="utf-8"):
                order = json.loads(line)
                items = [one for name in order["tests"] for one in by_name.get(name, ())]
                reply = apart(items, order)
                if reply["status"] != "passed":
                    database.restore()
                answer(asked, reply)
    return True


def far_from(item: pytest.Item) -> pytest.Item:
    """A test of which pytest believes that it comes next: so it keeps what is of the session, and of
    no folder that other tests are not in.
    """
    own = set(item.listchain())
    return min(item.session.items, key=lambda other: len(own.intersection(other.listchain())))


def has_database(item: pytest.Item) -> bool:
    return "db" in item.fixturenames or item.get_closest_marker("django_db") is not None


def answer(asked: socket.socket, document: dict[str, Any]) -> None:
    asked.sendall(json.dumps(document).encode() + b"\n")


class Database:
    """The tests' database as it was before any, to be had again after a test that was killed."""

    def __init__(self) -> None:
        from django.db import connections

        connections.close_all()
        self.name = connections["default"].settings_dict["NAME"]
        self.clean = f"{self.name}_clean"
        self.is_there = self.name.startswith("test_")  # as it is once a test had it

    def __enter__(self) -> Database:
        if self.is_there:
            self._do(f'CREATE DATABASE "{self.clean}" TEMPLATE "{self.name}"')
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_there:
            self._do(f'DROP DATABASE "{self.clean}"')

    def restore(self) -> None:
        if self.is_there:
            self._do(
                f'DROP DATABASE IF EXISTS "{self.name}" WITH (FORCE)',
                f'CREATE DATABASE "{self.name}" TEMPLATE "{self.clean}"',
            )

    @staticmethod
    def _do(*statements: str) -> None:
        import psycopg2

        from tests.support.servers import postgresql_url

        url = postgresql_url()
        options = {"user": url.user, "password": url.password, "dbname": "postgres"}
        with closing(psycopg2.connect(host=url.host, port=url.port, **options)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)


def apart(items: list[pytest.Item], order: dict[str, Any]) -> dict[str, Any]:
    """The first of them that fails or hangs, in a process that ends with all that it started."""
    if not items:
        return {"status": "none"}
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        os.close(reading)
        os._exit(run(items, order, writing))
    os.close(writing)
    try:
        return watched(reading, items, order["patience"])
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


def run(items: list[pytest.Item], order: dict[str, Any], writing: int) -> int:
    """In the child: say what is run, and what comes of it."""
    try:
        if order["path"] and not put_wrong(order["path"], order["before"], order["after"]):
            os.write(writing, b"cold\n")
            return 0
        session = items[0].session
        last = far_from(items[-1])
        for place, item in enumerate(items):
            os.write(writing, b"%d\n" % place)
            following = items[place + 1] if place + 1 < len(items) else last
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                os.write(writing, b"failed\n")
                return 1
        os.write(writing, b"passed\n")
        return 0
    except BaseException:
        os.write(writing, b"failed\n")
        return 1


def watched(reading: int, items: list[pytest.Item], patience: dict[str, float]) -> dict[str, Any]:
    """What the child says in the end, or that a test took too long."""
    place, rest, status = 0, b"", "hangs"
    while select.select([reading], [], [], patience[name_of(items[place])])[0]:
        if not (piece := os.read(reading, 4096)):
            status = "failed"  # it ended in the middle of a test
            break
        *words, rest = (rest + piece).split(b"\n")
        numbers = [int(word) for word in words if word.isdigit()]
        place = numbers[-1] if numbers else place
        if words and not words[-1].isdigit():
            status = words[-1].decode()
            break
    return {"status": status, "by": items[place].nodeid, "ran": place + 1}


def name_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def put_wrong(path: str, before: str, after: str) -> bool:
    """The functions of the module have the code of the other source; false where they cannot."""
    old, new = (compile(text, path, "exec", dont_inherit=True) for text in (before, after))
    other = codes(new)
    changed = {
        one: another
        for name, ones in codes(old).items()
        for one, another in zip(ones, other[name], strict=False)
        if one != another
    }
    wrong = [one for one in functions[path] if one.__code__ in changed]
    for one in wrong:
        try:
            one.__code__ = changed[one.__code__]
        except ValueError:  # it has other variables of the function around it
            return False
    return bool(wrong)


def note_functions() -> None:
    """All that there are, by the file of their code; they stay where they are in memory."""
    gc.collect()
    for one in gc.get_objects():
        if type(one) is FunctionType:
            functions[one.__code__.co_filename].append(one)
    gc.freeze()


def codes(module: CodeType) -> defaultdict[str, list[CodeType]]:
    """All functions in it, by name."""
    found: defaultdict[str, list[CodeType]] = defaultdict(list)
    waiting = [module]
    while waiting:
        for one in waiting.pop().co_consts:
            if isinstance(one, CodeType):
                found[one.co_qualname].append(one)
                waiting.append(one)
    return found
