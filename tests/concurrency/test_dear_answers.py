"""Two hundred answers that are as dear to clean as can be, beside a call of another rule in the same
process.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

import pytest

from callqueue import Rule, Secret, clocks
from callqueue.database.connections import kept
from callqueue.execution.flight import Flight
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import Vendor, release, send
from tests.support.verdicts import on_a_quiet_machine

Rules = Callable[..., None]
Status = CallQueue.Status
JWT = ".".join(secrets.token_urlsafe(size) for size in (60, 600, 240))
HOOKS = 200
LISTS = {f"X-{number}": "[" + "[1]," * 1670 + "[1]]" for number in range(97)}
# by what the server repeats: its secret, its headers, its body; others are in db/execution/test_kept_answers
DEAREST: dict[str, tuple[str, dict[str, str], bytes]] = {
    "lists in headers": ("unused", LISTS, b"{}"),
    "a token": (JWT, {f"X-{n}": JWT * 5 for n in range(97)}, json.dumps(JWT).encode() * 400),
    "one letter": ("A" * 5000, {f"X-{n}": "%41" * 2000 for n in range(97)}, b"%41" * 100_000),
}  # fmt: skip


class Flown(Flight):
    """A flight in a thread of the test's own, which ends, and its connection with it."""

    def __init__(self) -> None:
        self.is_over, self.ended = False, threading.Event()
        super().__init__("default", lambda: 2 * HOOKS)

    def _fly(self) -> None:
        while not self.is_over:
            self._turn()
        for connection in kept.pop((os.getpid(), "default"), []):
            connection.close()
        self.ended.set()

    def end(self) -> None:
        self.is_over = True
        self.inbox.put(None)
        assert self.ended.wait(30)


@pytest.mark.parametrize("what", DEAREST)
def test_no_other_rules_call_waits_for_answers_that_are_dear_to_clean(
    rules: Rules, remote: Vendor, what: str
) -> None:
    secret, headers, body = DEAREST[what]
    more = {"SECRETS": {"KEY": secret}, "LEASE": {"RELEASE": 300, "GRACE": 1}}
    rules(more, hooks=Rule(total_timeout=4), bank=Rule(total_timeout=4))
    answered = threading.Barrier(HOOKS + 1)

    def hook() -> Any:
        answered.wait(20)
        return 200, headers, body

    remote.answers["/hook"] = hook
    params = {"url": "http://vendor.example/hook", "json": {"key": Secret("KEY")}}
    CallQueue.objects.send_many([{"method": "post", "params": params}] * HOOKS, rule="hooks")
    release()
    flight = Flown()
    try:
        flight.board(list(CallAttempt.objects.values_list("pk", flat=True)), 20)
        send("bank")
        release()
        bank = CallAttempt.objects.get(rule="bank")
        answered.wait(20)
        began = clocks.monotonic()
        flight.board([bank.pk], 20)
        while CallAttempt.objects.filter(pk=bank.pk, finished_at=None).exists():
            threading.Event().wait(0.01)
            assert clocks.monotonic() - began < 8, "it waited for a lease"
        known = clocks.monotonic() - began
        print(f"known after {known:.2f} s")
        while CallAttempt.objects.filter(finished_at=None).exists():
            threading.Event().wait(0.05)
            assert clocks.monotonic() - began < 30
    finally:
        flight.end()
    ends = dict(CallQueue.objects.values_list("pk", "status"))
    assert set(ends.values()) == {Status.DONE}, ends
    assert not CallAttempt.objects.exclude(response_status=200).exists()
    stored = "".join(CallAttempt.objects.values_list("response_body", flat=True))
    assert (secret[100:120] or secret) not in stored
    with on_a_quiet_machine():
        assert known < 1.0
