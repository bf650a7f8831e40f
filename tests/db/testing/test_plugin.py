"""The fixtures in a project of somebody else's, the examples of the how-to, and what was sent."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from callqueue import Rule, apermit, database
from callqueue.models import CallQueue
from callqueue.testing import FakeTransport, Sent, arun_callqueue, assert_call_sent
from tests.db.testing.calls import URL, send

Rules = Callable[..., None]

PAGES = Path(__file__).resolve().parents[3] / "docs" / "how-to"
COMMITTING = pytest.mark.django_db(transaction=True)
PROJECT = {
    "settings_of_theirs.py": """
        SECRET_KEY = "x"
        INSTALLED_APPS = ["django.contrib.contenttypes", "callqueue"]
        DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "real.sqlite3"}}
    """,
    "test_theirs.py": """
        def test_it(callqueue_sent, callqueue_transport, callqueue_clock):
            from callqueue.models import CallQueue
            from callqueue.testing import run_callqueue

            callqueue_transport.default = 200
            CallQueue.objects.send({"method": "get", "params": {"url": "https://api.example.com/"}})
            assert run_callqueue() == 1
            assert callqueue_sent.last.status == CallQueue.Status.DONE
    """,
}


def test_the_fixtures_alone_bring_a_test_database(tmp_path: Path) -> None:
    for name, source in PROJECT.items():
        (tmp_path / name).write_text(textwrap.dedent(source), encoding="utf-8")
    ours = ("DJANGO_", "CALLQUEUE_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = [str(tmp_path), str(PAGES.parent.parent), kept.get("PYTHONPATH")]
    options = ["-q", "-p", "callqueue.testing", "-p", "no:cacheprovider", "--ds=settings_of_theirs"]
    done = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", *options, f"--rootdir={tmp_path}", "test_theirs.py"],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "real.sqlite3").exists()


async def in_a_loop(made: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await made
    finally:
        await sync_to_async(database.close_all)()  # the connection of the ORM's own thread


def read_the_pages() -> list[Any]:
    text = "".join(
        (PAGES / page).read_text(encoding="utf-8")
        for page in ("test-your-code.md", "use-the-answer.md")
    )
    found: list[Any] = []
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        of_block = re.findall(r"^(async )?def (test_\w+)", block, re.MULTILINE)
        found += [
            pytest.param(block, name, id=name, marks=COMMITTING if is_async else ())
            for is_async, name in of_block
        ]
    return found


@pytest.mark.parametrize(("block", "name"), read_the_pages())
def test_the_pages_tests_pass(block: str, name: str, request: pytest.FixtureRequest) -> None:
    namespace: dict[str, Any] = {"__name__": f"of_the_page.{name}"}
    exec(compile(block, name, "exec"), namespace)
    wanted = inspect.signature(namespace[name]).parameters
    made = namespace[name](**{fixture: request.getfixturevalue(fixture) for fixture in wanted})
    if made is not None:
        asyncio.run(in_a_loop(made))


def test_the_fixture_lists_what_the_test_sent(rules: Rules, callqueue_sent: Sent) -> None:
    rules(default=Rule())
    callqueue_sent.assert_nothing_sent()
    first, last = send("/a"), send("/b", json={"n": 1}, key="k")
    assert list(callqueue_sent) == [first, last]
    assert callqueue_sent.last == callqueue_sent[-1] == last
    assert callqueue_sent.assert_call_sent(url=f"{URL}/b", json={"n": 1}, key="k", count=1) == last
    assert callqueue_sent.assert_call_sent(method="POST", status="new", count=2) == last
    assert callqueue_sent.assert_call_sent(url=lambda url: url.endswith("/a")) == first
    assert callqueue_sent[0] == first
    assert len(callqueue_sent) == 2


def test_assertions_say_what_was_sent_instead(rules: Rules) -> None:
    rules(default=Rule(), other=Rule())
    send("/a")
    assert assert_call_sent(url=f"{URL}/*", method="POST", rule="default") is not None
    assert_call_sent(url="*", rule="other", count=0)
    with pytest.raises(
        AssertionError,
        match=r"not sent: rule='other'; sent:\n  post https://api.example.com/a .*rule='default'",
    ):
        assert_call_sent(rule="other")
    with pytest.raises(AssertionError, match="not sent 2 times, but 1 times"):
        assert_call_sent(count=2)


LOOPS = {
    "asyncio.run": lambda coroutine: asyncio.run(in_a_loop(coroutine)),
    "Django's": lambda coroutine: async_to_sync(in_a_loop)(coroutine),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.usefixtures("transactional_db")
def test_an_async_test_sends_runs_and_looks(
    rules: Rules,
    callqueue_sent: Sent,
    callqueue_transport: FakeTransport,
    loop: str,
) -> None:
    rules(default=Rule())
    callqueue_transport.default = 200

    async def test() -> None:
        assert_sent = sync_to_async(callqueue_sent.assert_call_sent)
        await assert_sent(count=0)
        await CallQueue.objects.asend({"method": "get", "params": {"url": URL}}, key="a")
        await assert_sent(method="get", key="a", count=1)
        with pytest.raises(AssertionError, match="not sent: key='b'"):
            await assert_sent(key="b")
        assert await arun_callqueue(until_idle=True) == 1
        call = await assert_sent(status="done")
        assert call.status == CallQueue.Status.DONE
        async with apermit("default", label="x"):
            pass
        await assert_sent(method="permit", label="x", status="done")

    LOOPS[loop](test())
