"""Lines that nobody logged, escapes that a terminal obeys, secrets that others log."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from celery import shared_task

from callqueue import QueuedTask, Retry, Rule, Secret, SlidingWindow, events
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.testing import run_callqueue
from tests.db.commands import run
from tests.support import behaviour
from tests.support.peer import Listener

Rules = Callable[..., None]
VALUE = "sk_live_4eC39HqLyjWDarjtT1zdp7dc"
FORGED = "shop-7\nCRITICAL:callqueue:limit_exceeded\tlimit=bank\x1b[2J\u202e"
CALL = {"method": "get", "params": {"url": "http://vendor.example/"}}


@pytest.fixture(autouse=True)
def _rules(rules: Rules) -> None:
    more = {"SECRETS": {"KEY": VALUE}, "ALLOWED_NETWORKS": ["127.0.0.0/8"]}
    rules(
        default=Rule(
            limits=[SlidingWindow("1000/s"), SlidingWindow("5/s", per="key")],
            retry=Retry(max_attempts=1),
        ),
        more=more,
    )


@pytest.mark.parametrize(
    "event", ["rule_held", "attempt_failed", "call_failed", "calls_released", "publish_failed"]
)
def test_no_value_begins_a_line_in_the_log(event: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    facts = dict.fromkeys(("rule", "value", "reason"), FORGED)
    events.emit(event, call_id=1, status="failed", per="key", until=None, **facts)
    assert caplog.messages
    for message in caplog.messages:
        assert message.isprintable()


def test_no_command_writes_an_escape_to_the_terminal() -> None:
    """Keys that other code has written: `send` refuses them."""
    call = CallQueue.objects.send(CALL, key="shop")
    behaviour.release()
    CallAttempt.objects.update(key=FORGED)
    CallQueue.objects.update(key=FORGED)
    Hold.objects.create(rule="default", per="key", value=FORGED, reason=FORGED)
    for command in (["audit"], ["status"], ["doctor"], ["pause", "default", "--key", FORGED], ["resume", "default"],
                    ["status", "--call", str(call.pk)], ["simulate", "--rule", FORGED, "--calls", "1"]):  # fmt: skip
        ran = run(*command)
        for line in f"{ran.out}{ran.error}".splitlines():
            assert line.isprintable(), (command, line)
            assert not line.startswith("CRITICAL")


@shared_task(base=QueuedTask)
def careless(token: str, fails: bool) -> dict[str, str]:
    if fails:
        raise ConnectionError(f"no route with k={token}")
    return {"used": token}


def told(caplog: pytest.LogCaptureFixture, logger: str) -> int:
    """How many lines of this logger there were, none of which has the secret, nor any other has."""
    said = [record for record in caplog.records if not record.name.startswith("django.db")]
    for record in said:
        assert VALUE not in f"{logging.Formatter().format(record)} {record.__dict__}"
    return sum(record.name.startswith(logger) for record in said)


@pytest.mark.parametrize("fails", [False, True])
def test_celery_logs_no_secret_of_a_task(caplog: pytest.LogCaptureFixture, fails: bool) -> None:
    """Both of its lines show what the task was given."""
    caplog.set_level(logging.DEBUG)
    careless.delay(Secret("KEY"), fails)
    run_callqueue()
    assert told(caplog, "celery.app.trace") == 0
    careless.delay("no secret", fails)
    run_callqueue()
    assert told(caplog, "celery.app.trace") > 0


def test_urllib3_logs_no_secret_that_a_server_repeats(
    listen: Callable[..., Listener], caplog: pytest.LogCaptureFixture
) -> None:
    """Without the secret in hand, it is as any other text."""
    caplog.set_level(logging.DEBUG)
    head = f"HTTP/1.1 200 OK\r\nyou sent Bearer {VALUE}\r\nContent-Length: 2\r\n\r\nok"
    listener = listen(answer=head.encode())
    params = {"url": f"http://127.0.0.1:{listener.port}/"}
    own = {"headers": {"Authorization": Secret("KEY")}}
    CallQueue.objects.send({"method": "get", "params": {**params, **own}})
    behaviour.run()
    assert VALUE.encode() in listener.heard[0]
    told(caplog, "urllib3")
    CallQueue.objects.send({"method": "get", "params": params})
    behaviour.run()
    assert any(record.name.startswith("urllib3") for record in caplog.records)
