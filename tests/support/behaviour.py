"""What the behaviour suite works with: calls by a word, a vendor in memory, a run here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import requests
from django.db import OperationalError, connection
from requests.utils import get_encoding_from_headers

from callqueue import database
from callqueue.dispatch import release_pass
from callqueue.dispatch.dispenser import Dispenser
from callqueue.execution import claim, executor, judging, recorder, request, wire
from callqueue.ledger import ledger_time
from callqueue.limits.kinds import SECOND
from callqueue.models import CallAttempt, CallQueue, LedgerState

# What a call becomes that was sent and had no answer: method, the rule's `on_lost`, state.
WHEN_LOST = [
    ("get", "auto", CallQueue.Status.ERROR),
    ("put", "auto", CallQueue.Status.ERROR),
    ("delete", "auto", CallQueue.Status.ERROR),
    ("post", "auto", CallQueue.Status.UNKNOWN),
    ("patch", "auto", CallQueue.Status.UNKNOWN),
    ("post", "retry", CallQueue.Status.ERROR),
    ("get", "unknown", CallQueue.Status.UNKNOWN),
]


class Vendor:
    """`answers`: by path a status, (status, headers, body), an Answer or a function."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.requests: list[tuple[str, str, dict[str, Any]]] = []

    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]

    def request(
        self, method: str, params: Any, *, policy: Any, timeouts: Any, gate: Any = None
    ) -> wire.Answer:
        path = "/" + params["url"].split("/", 3)[3]
        if gate is not None:
            gate.wait()
            gate.sent_at = time.monotonic()
        self.requests.append((method, path, dict(params)))
        answer = self.answers.get(path, 200)
        if callable(answer):
            answer = answer()
        if isinstance(answer, wire.Answer):
            return answer
        status, headers, body = answer if isinstance(answer, tuple) else (answer, {}, b"{}")
        return wire.Answer(
            response=response(status, headers, body), sent_at=time.monotonic(), sent=True
        )


def response(status: int, headers: dict[str, str], body: bytes | object) -> requests.Response:
    answer = requests.Response()
    answer.status_code = status
    answer.headers.update(headers)
    answer.encoding = get_encoding_from_headers(answer.headers)
    answer._content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return answer


def send(rule: str = "default", path: str = "/", method: str = "post", **options: Any) -> CallQueue:
    """One call to the vendor."""
    call = CallQueue.objects.send(
        {"method": method, "params": {"url": f"http://vendor.example{path}"}}, rule=rule, **options
    )
    assert call is not None
    return call


def move_ledger(seconds: float) -> None:
    """As if the clock was set by so much, in all, since the ledger began, and all knew of it."""
    moved = {"moved": round(seconds * SECOND)}
    LedgerState.objects.update_or_create(pk=ledger_time.ROW, defaults=moved)
    ledger_time.forget_readings(is_new=False)


def run() -> int:
    """Release what may go now and make those calls, in this process; the count of attempts."""
    made: list[int] = []
    now = database.clock("default")
    # What is due this very moment is due: a worker's reading of the clock errs late, by a
    # millisecond or so.
    soon = (now, now + timedelta(milliseconds=50))
    due_soon = CallQueue.objects.waiting().filter(due_at_dt__range=soon)
    due_soon.update(due_at_dt=now - timedelta(seconds=1))

    def here(using: str, messages: Any) -> bool:
        for _, ids in messages:
            made.extend(ids)
            executor.execute(using, ids)
        return True

    Dispenser(publish=here).run_once()
    return len(made)


def make_together(ids: Sequence[int]) -> int:
    """Make these and record all ends at once, as a worker's flight does; the count of them."""
    jobs = claim.begin("default", ids)
    ends = [
        request.make(job) if job.unfit is None else judging.result_of_unfit(job) for job in jobs
    ]
    recorder.record("default", ends)
    return len(jobs)


def release() -> list[CallQueue]:
    """Release what may go now, to workers that never come; the calls, in their attempts' order."""
    ids: list[int] = []

    def take(using: str, messages: Any) -> bool:
        for _, some in messages:
            ids.extend(some)
        return True

    Dispenser(publish=take).run_once()
    attempts = CallAttempt.objects.filter(pk__in=ids).order_by("pk").select_related("call")
    return [attempt.call for attempt in attempts]


def lose_what_became_of_its_commit(monkeypatch: pytest.MonkeyPatch, releases: Dispenser) -> None:
    """A turn of a dispenser that makes calls, whose pass is committed, and it is not told so."""

    def lose(*_: Any) -> None:
        raise OperationalError("the answer to the commit was lost")

    with monkeypatch.context() as patch:
        patch.setattr("callqueue.maker.take_off", lambda *_: lose)
        with pytest.raises(OperationalError):
            releases.tick()


def pass_that_commits_late(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]
) -> list[Callable[[], object]]:
    """Make a pass that is committed only when what is in the list is called."""
    late, lock = list[Any](), release_pass._lock
    with monkeypatch.context() as patch:

        def and_then(*given: Any) -> Any:
            found = lock(*given)
            late.append(_commits_late(patch))
            return found

        patch.setattr(release_pass, "_lock", and_then)
        with pytest.raises(OperationalError):
            make()
    connection.close()
    return list(late[0])


def _commits_late(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """This thread's connection is lost at its next commit, which the server has yet to make."""
    late: list[Any] = []

    def lose() -> None:
        monkeypatch.undo()
        raw = connection.connection
        late.append(lambda: (raw.commit(), raw.close()))
        connection.connection = None
        connection.closed_in_transaction = False
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(connection, "_commit", lose)
    return late
