"""Calls as a shop has them on a busy afternoon: for the browser's tests, and for the pictures in
the docs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from callqueue import Concurrency, FixedWindow, Rule, SlidingWindow
from callqueue.history import sums
from callqueue.models import CallAttempt, CallQueue, DispenserState, Hold
from callqueue.security.secrets import Secret

Status = CallQueue.Status
account = SlidingWindow("100/m", name="stripe-account")
RULES = {
    "stripe-pay": Rule(
        queues="stripe", priority=10, limits=[account, SlidingWindow("9/m", per="key")]
    ),
    "stripe-read": Rule(queues="stripe", limits=[account, Concurrency(8)]),
    "chat": Rule(limits=[SlidingWindow("40/m", per="key"), SlidingWindow("90/m")]),
    "maps": Rule(limits=[FixedWindow("25000/d", timezone="America/Los_Angeles")]),
    "default": Rule(limits=[SlidingWindow("100/h")]),
}
# calls a minute
SHARES = {"stripe-pay": 40, "stripe-read": 25, "chat": 60, "maps": 12, "default": 1.4}
WAITING = {"stripe-pay": 18, "stripe-read": 240, "chat": 1300, "maps": 420}
URLS = {
    "default": ("put", "https://warehouse.example/stock/7"),
    "stripe-pay": ("post", "https://api.stripe.example/v1/charges"),
    "stripe-read": ("get", "https://api.stripe.example/v1/balance"),
    "chat": ("post", "https://chat.example/api/postMessage"),
    "maps": ("get", "https://maps.example/geocode?address=5th+Avenue"),
}


def play() -> None:
    """Fill the tables. The same every time, but for the clock."""
    chance, now = random.Random(7), timezone.now()
    made = [call for rule in RULES for call in _ended(rule, now, chance)]
    made.sort(key=lambda call: call.created_dt)
    newest = made[-25:]
    CallQueue.objects.bulk_create(made[:-25], batch_size=1000)
    CallAttempt.objects.bulk_create(
        [_attempt(call, chance) for call in made if call.pk], batch_size=1000
    )
    waiting = [
        _waiting(rule, number, now, chance)
        for rule, count in WAITING.items()
        for number in range(count)
    ]
    waiting.sort(key=lambda call: call.created_dt)
    last = waiting[-25:] + newest
    chance.shuffle(last)
    CallQueue.objects.bulk_create([*waiting[:-25], *last], batch_size=1000)
    CallQueue.objects.waiting().update(ready=True)
    _in_flight(now)
    for _ in range(14):  # what the provider of the maps refused before it was held
        at = now - timedelta(minutes=4, seconds=chance.uniform(0, 30))
        CallAttempt.objects.create(
            call_id=1, number=1, rule="maps", released_at=at, started_at=at, sent_at=at, finished_at=at,
            outcome="throttled", response_status=429, worker="egress-2/14",
        )  # fmt: skip
    why, until = "429 from maps.example: Retry-After 900", now + timedelta(minutes=11)
    Hold.objects.create(rule="maps", source="provider", reason=why, until=until)
    sums.bring_up_to_date("default")
    # dispensers, seen ahead, so that all is as it should be for as long as a test looks
    seen = {"started_at": now - timedelta(hours=9), "seen_at": now + timedelta(minutes=5)}
    for name in ("egress-1:71", "egress-2:64"):
        DispenserState.objects.create(name=name, digest="settings", **seen)


def _key(rule: str, chance: random.Random) -> str:
    if rule == "chat":
        return f"T{int(chance.expovariate(0.3)) + 1:03d}"
    return f"acct_{chance.randrange(40) + 1000}" if rule == "stripe-pay" else ""


def _ended(rule: str, now: datetime, chance: random.Random) -> Iterator[CallQueue]:
    for minute in range(4 if rule == "maps" else 0, 60):
        wave = 0.65 + 0.35 * math.sin(minute / 7 + len(rule))
        for _ in range(round(SHARES[rule] * wave * chance.uniform(0.85, 1.1))):
            request, error = _request(rule, chance.randrange(9000)), ""
            status, dice = Status.DONE, chance.random()
            if dice < 0.03:
                status, error = (
                    Status.FAILED,
                    f"HTTP {chance.choice((402, 500, 500))} from {request['host']}",
                )
            elif dice < 0.034 and rule == "stripe-pay":
                status, error = Status.UNKNOWN, "no answer within 27 s"
            end = now - timedelta(minutes=minute, seconds=chance.uniform(0, 60))
            yield CallQueue(
                **request, status=status, key=_key(rule, chance), finished_at_dt=end, last_attempt=1,
                created_dt=end - timedelta(seconds=chance.uniform(1, 240)), error_message=error,
                due_at_dt=end - timedelta(seconds=2),
            )  # fmt: skip


def _attempt(call: CallQueue, chance: random.Random) -> CallAttempt:
    begin = call.finished_at_dt - timedelta(seconds=chance.uniform(0.1, 0.6))
    outcome = {Status.DONE: "succeeded", Status.FAILED: "gave up"}.get(Status(call.status), "lost")
    status = {"succeeded": 200, "gave up": 500}.get(outcome)
    return CallAttempt(
        call_id=call.pk, number=1, rule=call.rule, key=call.key, released_at=begin, started_at=begin, sent_at=begin,
        finished_at=call.finished_at_dt, outcome=outcome, response_status=status, error_message=call.error_message,
        worker=chance.choice(("egress-1/3", "egress-2/14")), response_headers={"Content-Type": "application/json"},
        response_body='{"ok": true}',
    )  # fmt: skip


def _waiting(rule: str, number: int, now: datetime, chance: random.Random) -> CallQueue:
    due = now - timedelta(seconds=chance.uniform(0, WAITING[rule] / 4))
    times = {"due_at_dt": due, "created_dt": due}
    fields = {"key": _key(rule, chance), "priority": RULES[rule].priority}
    return CallQueue(**_request(rule, number), **fields, **times)


def failed_payment() -> CallQueue:
    """A call with three attempts, the last one refused for good."""
    now = timezone.now()
    call = CallQueue.objects.create(
        **_request("stripe-pay", 4711), status=Status.FAILED, key="acct_1032", unique_key="order-4711", failed_count=3,
        last_attempt=3, error_message="HTTP 402 from api.stripe.example: card_declined", priority=10,
        finished_at_dt=now - timedelta(seconds=39.588),
    )  # fmt: skip
    answers = [
        (503, "failed", "HTTP 503 from api.stripe.example", {"Retry-After": "2"}, "upstream connect error"),
        (None, "failed", "no answer within 27 s", None, ""),
        (402, "gave up", "HTTP 402 from api.stripe.example: card_declined", {"Content-Type": "application/json"},
         '{"error": {"code": "card_declined", "decline_code": "insufficient_funds"}}'),
    ]  # fmt: skip
    for number, (status, outcome, error, headers, body) in enumerate(answers, 1):
        begin = now - timedelta(seconds=160 - 40 * number)
        CallAttempt.objects.create(
            call=call, number=number, rule=call.rule, key=call.key, queue="stripe", released_at=begin,
            started_at=begin + timedelta(milliseconds=31), sent_at=begin + timedelta(milliseconds=83),
            finished_at=begin + timedelta(milliseconds=412), outcome=outcome, response_status=status,
            response_headers=headers, response_body=body, error_message=error, worker="egress-2/14",
        )  # fmt: skip
    CallQueue.objects.filter(pk=call.pk).update(created_dt=now - timedelta(seconds=125))
    return CallQueue.objects.get(pk=call.pk)


def _request(rule: str, number: int) -> dict[str, Any]:
    method, url = URLS[rule]
    params: dict[str, Any] = {
        "url": url,
        "headers": {"Authorization": Secret("STRIPE"), "X-Trace": f"t-{number}"},
    }
    if method == "post":
        params["json"] = {
            "amount": 1999 + number,
            "currency": "eur",
            "customer": f"cus_{number}",
            "token": "tok_visa",
        }
    return {
        "rule": rule,
        "method": method,
        "host": url.split("/")[2],
        "path": "/" + url.split("?")[0].split("/", 3)[3],
        "call_data": {"method": method, "params": params},
    }


def _in_flight(now: datetime) -> None:
    for rule, count in {"stripe-pay": 6, "stripe-read": 7, "chat": 11}.items():
        waiting = CallQueue.objects.filter(rule=rule, status=Status.NEW).order_by("due_at_dt")
        by_key = {call.key or call.pk: call for call in waiting}
        for call in list(by_key.values())[:count]:
            CallQueue.objects.filter(pk=call.pk).update(
                status=Status.DISPATCHED, ready=False, dispatched_at_dt=now, last_attempt=1
            )
            CallAttempt.objects.create(
                call=call, number=1, rule=rule, key=call.key, released_at=now, started_at=now, worker="egress-1/3",
                lease_until=now + timedelta(minutes=5),
            )  # fmt: skip
