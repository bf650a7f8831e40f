"""The testing kit: what runs, what answers, what time it is, and what it says of what was sent."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
from django.db import transaction
from django.test import TestCase, override_settings
from django.utils import timezone

from callqueue import Retry, Rule, SlidingWindow, TokenBucket, database, handlers
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import (
    Clock,
    FakeTransport,
    Sent,
    UnexpectedRequest,
    answer,
    assert_call_sent,
    calls_sent,
    fake_transport,
    in_turn,
    run_callqueue,
    travel,
)

Rules = Callable[..., None]
Status = CallQueue.Status
URL = "https://api.example.com"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "test-your-code.md"
NO_WAIT = Retry(base=0.0, jitter=False)


def send(
    path: str = "/pay",
    method: str = "post",
    rule: str = "default",
    json: Any = None,
    **options: Any,
) -> CallQueue:
    params = {"url": URL + path} | ({} if json is None else {"json": json})
    call = CallQueue.objects.send({"method": method, "params": params}, rule=rule, **options)
    assert call is not None
    return call


def status_of(call: CallQueue) -> int:
    return CallQueue.objects.get(pk=call.pk).status


# --- Running


def test_what_was_sent_is_made_in_this_process(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule())
    callqueue_transport.add(f"{URL}/pay", answer(201, json={"id": 7}))
    call = send(json={"amount": 5})
    assert run_callqueue() == 1
    assert status_of(call) == Status.DONE
    (made,) = callqueue_transport.requests
    assert (made.method, made.url, made.json) == ("POST", f"{URL}/pay", {"amount": 5})
    assert made.idempotency_key == str(call.idempotency_key)
    (attempt,) = call.attempts.all()
    assert (attempt.response_status, attempt.response_body) == (201, '{"id": 7}')


def test_it_goes_on_until_nothing_is_due_any_more(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule(retry=NO_WAIT))
    callqueue_transport.add(f"{URL}/pay", in_turn(500, 500, 200))
    call = send()
    assert run_callqueue() == 3
    assert status_of(call) == Status.DONE


def test_without_until_idle_it_makes_one_pass(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule(retry=NO_WAIT))
    callqueue_transport.add(f"{URL}/pay", in_turn(500, 200))
    call = send()
    assert run_callqueue(until_idle=False) == 1
    assert status_of(call) == Status.ERROR


def test_what_a_limit_keeps_back_is_not_waited_for(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule(limits=[SlidingWindow("2/h")]))
    callqueue_transport.default = 200
    for _ in range(5):
        send()
    assert run_callqueue() == 2
    assert CallQueue.objects.new().count() == 3


def test_calls_that_send_calls_without_end_are_noticed(
    rules: Rules, callqueue_transport: FakeTransport
) -> None:
    rules(default=Rule())

    def once_more(request: Any) -> int:
        send()
        return 200

    callqueue_transport.default = once_more
    send()
    with pytest.raises(AssertionError, match="not idle after 5 passes"):
        run_callqueue(max_passes=5)


def test_a_callback_runs_at_once(rules: Rules, callqueue_transport: FakeTransport) -> None:
    from celery import shared_task

    told: list[Any] = []

    @shared_task(name="tests.told", ignore_result=True)
    def tell(call_id: int, status: str) -> None:
        told.append((call_id, status))

    rules(default=Rule())
    callqueue_transport.default = 200
    call = send(callback="tests.told")
    run_callqueue()
    assert told == [(call.pk, "done")]


def test_a_handler_that_breaks_the_tests_transaction_fails_it_at_once(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(params: Any, context: Any) -> None:
        transaction.set_rollback(True)

    monkeypatch.setitem(handlers._registered, "breaks", breaks)
    rules(default=Rule())
    with transaction.atomic():
        CallQueue.objects.send({"method": "breaks", "params": {}})
        with pytest.raises(transaction.TransactionManagementError):
            run_callqueue()


def test_a_handlers_result_that_is_no_json_is_kept_as_text(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        handlers._registered, "odd", lambda params, context: {(1, 2): "a tuple for a key"}
    )
    rules(default=Rule())
    call = CallQueue.objects.send({"method": "odd", "params": {}})
    assert call is not None
    run_callqueue()
    (attempt,) = CallAttempt.objects.filter(call=call)
    assert (status_of(call), "a tuple for a key" in attempt.response_body) == (Status.DONE, True)


# --- The clock


def test_later_a_limit_has_room_again(rules: Rules, callqueue_transport: FakeTransport) -> None:
    rules(default=Rule(limits=[SlidingWindow("2/h")]))
    callqueue_transport.default = 200
    for _ in range(5):
        send()
    assert run_callqueue() == 2
    with travel(minutes=30):
        assert run_callqueue() == 0
    with travel(hours=1, seconds=1) as clock:
        assert run_callqueue() == 2
        clock.forward(hours=1, seconds=1)
        assert run_callqueue() == 1


def test_a_call_that_is_due_later_goes_later(
    rules: Rules, callqueue_transport: FakeTransport, callqueue_clock: Clock
) -> None:
    rules(default=Rule())
    callqueue_transport.default = 200
    call = send(not_before=timezone.now() + timedelta(days=2))
    assert run_callqueue() == 0
    callqueue_clock.forward(days=1)
    assert run_callqueue() == 0
    callqueue_clock.forward(days=1)
    assert run_callqueue() == 1
    assert status_of(call) == Status.DONE


def test_a_call_that_nobody_made_in_time_expires(rules: Rules, callqueue_clock: Clock) -> None:
    rules(default=Rule(limits=[TokenBucket("1/d", burst=1)]))
    call = send(expires_at=timezone.now() + timedelta(hours=1))
    callqueue_clock.forward(hours=2)
    run_callqueue()
    assert status_of(call) == Status.EXPIRED


def test_rows_and_timezone_now_are_of_the_clocks_time(rules: Rules) -> None:
    rules(default=Rule())
    real = timezone.now()
    with travel(days=10):
        assert timezone.now() - real > timedelta(days=9)
        call = CallQueue.objects.get(pk=send().pk)
        assert abs(call.created_dt - database.clock("default")) < timedelta(minutes=1)
        (row,) = CallQueue.objects.due()
        assert row == call
    assert timezone.now() - real < timedelta(days=1)
    assert not CallQueue.objects.due()
    assert database.clock("default") - real < timedelta(days=1)


def test_travelling_to_an_instant_and_back(db: None) -> None:
    noon = timezone.now().replace(hour=12) + timedelta(days=3)
    with travel(to=noon) as clock:
        assert abs(clock.now() - noon) < timedelta(minutes=1)
        with travel(hours=-1):
            assert abs(clock.now() - noon) > timedelta(minutes=59)
        assert abs(clock.now() - noon) < timedelta(minutes=1)


def test_waits_can_be_skipped(rules: Rules, callqueue_transport: FakeTransport) -> None:
    rules(default=Rule(limits=[SlidingWindow("2/h")], retry=Retry(base=60.0, jitter=False)))
    callqueue_transport.add(f"{URL}/pay", in_turn(500, 200))
    calls = [send(), *(send("/other") for _ in range(4))]
    callqueue_transport.add(f"{URL}/other", (429, {"Retry-After": "120"}, "slow down"))
    callqueue_transport.add(f"{URL}/other", in_turn((429, {"Retry-After": "120"}, ""), 200))
    with travel():
        assert run_callqueue(skip_waits=True) == 7
    assert {status_of(call) for call in calls} == {Status.DONE}


def test_waits_are_skipped_inside_travel_only(db: None) -> None:
    with pytest.raises(RuntimeError, match="inside"):
        run_callqueue(skip_waits=True)


# --- The network


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        (f"{URL}/pay", "/pay"),
        (f"{URL}/pay", "/pay?a=1"),
        (f"{URL}/*", "/pay/7?a=1"),
        (f"POST {URL}/pay", "/pay"),
        (re.compile(r"/pay/\d+"), "/pay/12"),
        (lambda request: request.method == "POST", "/anything"),
        (URL, ""),
    ],
)
def test_patterns(rules: Rules, pattern: Any, path: str) -> None:
    rules(default=Rule())
    call = send(path)
    with fake_transport({pattern: 204}):
        run_callqueue()
    assert status_of(call) == Status.DONE


@pytest.mark.parametrize(
    "pattern", [f"{URL}/pay?a=1", f"GET {URL}/pay", "https://other.example/*", f"{URL}/pa"]
)
def test_a_request_without_an_answer_fails_the_test_and_names_what_there_is(
    rules: Rules, pattern: str
) -> None:
    rules(default=Rule())
    send()
    with (
        fake_transport({pattern: 200}),
        pytest.raises(UnexpectedRequest, match="no answer for POST https://api.example.com/pay"),
    ):
        run_callqueue()


@pytest.mark.parametrize(
    ("given", "status", "body"),
    [
        (204, 204, ""),
        ({"ok": True}, 200, '{"ok": true}'),
        ([1, 2], 200, "[1, 2]"),
        ("text", 200, "text"),
        ((201, {"X-Id": "9"}, {"id": 9}), 201, '{"id": 9}'),
        (answer(202, body="later"), 202, "later"),
        (lambda request: {"saw": request.json["amount"]}, 200, '{"saw": 3}'),
    ],
)
def test_answers(rules: Rules, given: Any, status: int, body: str) -> None:
    rules(default=Rule())
    call = send(json={"amount": 3})
    with fake_transport(default=given):
        run_callqueue()
    (attempt,) = CallAttempt.objects.filter(call=call)
    assert (attempt.response_status, attempt.response_body) == (status, body)


@pytest.mark.parametrize(
    ("error", "method", "expected"),
    [
        (requests.ConnectTimeout, "post", Status.ERROR),
        (requests.ConnectionError("refused"), "post", Status.ERROR),
        (requests.ReadTimeout("no answer"), "post", Status.UNKNOWN),
        (requests.ReadTimeout("no answer"), "get", Status.ERROR),
    ],
)
def test_networks_fail(rules: Rules, error: Any, method: str, expected: int) -> None:
    rules(default=Rule())
    call = send(method=method)
    with fake_transport(default=error):
        run_callqueue(until_idle=False)
    assert status_of(call) == expected
    (attempt,) = CallAttempt.objects.filter(call=call)
    assert (attempt.sent_at is None) == (expected == Status.ERROR and method == "post")


# --- What was sent


def test_the_fixture_lists_what_the_test_sent(rules: Rules, callqueue_sent: Sent) -> None:
    rules(default=Rule())
    callqueue_sent.assert_nothing_sent()
    first, last = send("/a"), send("/b", json={"n": 1}, key="k")
    assert list(callqueue_sent) == [first, last]
    assert callqueue_sent.last == callqueue_sent[-1] == last
    assert callqueue_sent.assert_call_sent(url=f"{URL}/b", json={"n": 1}, key="k", count=1) == last
    assert len(callqueue_sent.matching(method="POST", status="new")) == 2


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


@override_settings(CALLQUEUE={"RULES": {"default": Rule(limits=[SlidingWindow("1/h")])}})
class DjangosOwnTestCase(TestCase):
    def test_everything_works_inside_its_transaction(self) -> None:
        with calls_sent() as sent, fake_transport({f"{URL}/*": 200}), travel() as clock:
            send("/a")
            send("/b")
            assert run_callqueue() == 1
            clock.forward(hours=1, seconds=1)
            assert run_callqueue() == 1
        assert [call.status for call in sent] == [Status.DONE, Status.DONE]


# --- In somebody else's project

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
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DJANGO_", "CALLQUEUE_", "PYTEST_"))
    }
    root = str(PAGE.parent.parent.parent)
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), root, kept.get("PYTHONPATH")])),
    }
    options = [
        "-q",
        "-p",
        "callqueue.testing",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "--ds=settings_of_theirs",
    ]
    command = [sys.executable, "-B", "-m", "pytest", *options, "test_theirs.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "real.sqlite3").exists()


# --- The how-to


def read_the_page() -> list[Any]:
    blocks = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    found: list[Any] = []
    for block in blocks:
        names = re.findall(r"^def (test_\w+)", block, re.MULTILINE)
        found += [pytest.param(block, name, id=name) for name in names]
    return found


@pytest.mark.parametrize(("block", "name"), read_the_page())
def test_the_pages_tests_pass(block: str, name: str, request: pytest.FixtureRequest) -> None:
    namespace: dict[str, Any] = {"__name__": "of_the_page"}
    exec(compile(block, PAGE.name, "exec"), namespace)
    wanted = inspect.signature(namespace[name]).parameters
    namespace[name](**{fixture: request.getfixturevalue(fixture) for fixture in wanted})
