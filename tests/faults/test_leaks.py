"""What stays in memory, and what whoever reads the broker sees."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callqueue import Rule
from callqueue.exceptions import InvalidCall
from callqueue.execution import wire
from callqueue.models import CallAttempt, CallQueue
from callqueue.texts import decoded
from tests.faults.stage import Stage
from tests.support.peer import Peer, Seen, answer_bytes, answering, call
from tests.support.verdicts import wait_until

FLAT = (
    24 << 20
)  # bytes by which a process may grow over thousands of what it refuses or cannot read
PAYLOAD = "patient-zero-payload"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.django_db
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="only Linux tells a process's memory"
)
def test_no_refused_send_and_no_answers_charset_stays_in_memory(
    length: Callable[[Any, Any], Any], settings: Any
) -> None:
    """Every one is another: its host, and the charset that it claims, as long as they like."""
    settings.CALLQUEUE = {"RULES": {"r": Rule()}}
    count, long = length((2000, 20_000), (100_000, 2000))
    padding = "😀" * (long // 4)

    def refuse(number: int) -> None:
        with pytest.raises(InvalidCall):
            CallQueue.objects.send(
                {"method": "get", "params": {"url": f"https://{number}{padding}/"}}, rule="r"
            )

    def claiming(seen: Seen) -> bytes:
        kind = f"text/plain; charset=x{seen.target[1:]}{'x' * long}"
        server.seen.clear()
        return answer_bytes(Content_Type=kind)

    def answer(number: int) -> None:
        response = call(server.url(f"/{number}"), "get").response
        assert response is not None
        assert response.text == decoded(response.content, response.encoding) == "ok"
        assert decoded(b"ok", response.headers["Content-Type"].partition("=")[2]) == "ok"

    with Peer(answering(claiming)) as server:
        for number in range(200):
            refuse(number), answer(number)
        before = resident()
        for number in range(200, count):
            refuse(number), answer(number)
        wire.close_idle_connections()
    assert resident() - before < FLAT


def test_messages_carry_ids_and_nothing_else(stage: Stage) -> None:
    """What anyone sees who can read the broker: the task's name, attempts' ids."""
    dispenser = stage.dispenser()
    stage.send(3, path=f"/ok?patient={PAYLOAD}", key=PAYLOAD, unique_key=None)
    wait_until(lambda: CallAttempt.objects.count() == 3, 20)
    queue = stage.processes.broker.queue("one")
    seen = 0
    with stage.processes.broker.connection() as connection:
        simple = connection.SimpleQueue(queue)
        while seen < 3:
            message = simple.get(timeout=5)
            body = message.body if isinstance(message.body, str) else bytes(message.body).decode()
            everything = json.dumps([body, message.headers, message.properties], default=str)
            assert PAYLOAD not in everything
            assert message.content_type == "application/json"
            (ids,), kwargs, _ = message.payload
            assert all(isinstance(pk, int) for pk in ids)
            assert not kwargs
            seen += len(ids)
            message.ack()
        simple.close()
    dispenser.stop()
