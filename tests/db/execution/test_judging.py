"""Judging: what an answer, or none, makes of a call and of its rule."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.translation import gettext_lazy

from callqueue import GiveUp, HoldUntil, Retry, RetryLater, Rule, SlidingWindow, Succeeded
from callqueue.execution import wire
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.testing import travel
from tests.support.behaviour import WHEN_LOST, Vendor, response, run, send
from tests.support.locking import fresh

Rules = Callable[..., None]
Status = CallQueue.Status


def nobody(why: str, **how: bool) -> wire.Answer:
    return wire.Answer(response=None, sent_at=None, error=why, **how)


INSIDE = "10.0.0.1 is private"


@pytest.mark.parametrize(
    ("answer", "method", "on_lost", "status", "why"),
    [
        *[(code, "post", "auto", Status.FAILED, str(code)) for code in (400, 404, 410, 422, 302)],
        *[(nobody("read timeout", sent=True), *case, "read timeout") for case in WHEN_LOST],
        (nobody("connection refused"), "post", "auto", Status.ERROR, "connection refused"),
        (nobody(INSIDE, refused=True), "post", "auto", Status.FAILED, INSIDE),
    ],
)
def test_what_an_answer_or_none_makes_of_its_call(
    rules: Rules, remote: Vendor, answer: Any, method: str, on_lost: str, status: int, why: str
) -> None:
    """What was sent and not answered is retried only where that is safe; what was not sent, is."""
    rules(r=Rule(on_lost=on_lost))
    remote.answers["/"] = answer
    call = send("r", method=method)
    run()
    call = fresh(call)
    assert call.status == status and why in call.error_message
    assert call.attempts.count() == 1


def test_a_throttled_call_waits_for_its_scope_and_spends_no_attempt(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/s", per="key")]), other=Rule())
    remote.answers["/"] = (429, {"Retry-After": "30"}, b"")
    call, same = send("r", key="T1"), send("r", "/same", key="T1", priority=-1)
    run()
    free, elsewhere = send("r", "/free", key="T2"), send("other", "/elsewhere")
    assert run() == 2
    call = fresh(call)
    assert (call.status, call.failed_count) == (Status.ERROR, 0)
    assert fresh(free).status == fresh(elsewhere).status == Status.DONE
    hold = Hold.objects.get()
    assert (hold.rule, hold.per, hold.value) == ("r", "key", "T1")
    assert timedelta(seconds=25) < hold.until - ledger_time.now("default") < timedelta(seconds=31)
    assert fresh(same).status in (Status.NEW, Status.DONE, Status.ERROR)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({"Retry-After": "0"}, 40),
        ({"Retry-After": "Fri, 20 Nov 2020 12:00:00 GMT"}, 40),
        ({"RateLimit-Remaining": "0", "RateLimit-Reset": "0"}, 40),
        ({}, 40),
        *[
            (HoldUntil(until, "x"), 40)
            for until in (0, -5, timedelta(0), timedelta(days=-900), None)
        ],
        (HoldUntil(timezone.now() - timedelta(seconds=1), "x"), 40),
        (HoldUntil(datetime(1, 1, 1), "x"), 40),
        *[(HoldUntil(until, "x"), 60) for until in (10**400, float("inf"), timedelta.max)],
        *[(HoldUntil(until, "x"), 60) for until in (datetime(9999, 12, 31), datetime.max)],
    ],
)
def test_a_refusal_that_names_no_time_to_come_holds_as_long_as_the_backoff(
    rules: Rules, remote: Vendor, said: Any, seconds: int
) -> None:
    """So does a verdict; and one that names the end of time is clamped."""
    classify = (lambda _: said) if isinstance(said, HoldUntil) else None
    rules(r=Rule(retry=Retry(base=40.0, jitter=False, max_hold=60.0), classify=classify))
    remote.answers["/"] = (429, said if classify is None else {}, b"")
    send("r"), send("r", "/next", priority=-1)
    run()
    left = (Hold.objects.get().until - ledger_time.now("default")).total_seconds()
    assert seconds - 5 < left < seconds + 1
    assert run() == 0


LAST = {"RateLimit-Remaining": "0", "RateLimit-Reset": "1", "X-RateLimit-Remaining": "0",
        "X-RateLimit-Reset": "1", "RateLimit": '"default";r=0;t=1'}  # fmt: skip


def test_a_success_with_which_nothing_remains_costs_nothing_of_the_limit(
    rules: Rules, remote: Vendor
) -> None:
    """As a provider of fixed seconds says with the last of each: nothing is held, and the record is
    the very statements of any other success, which lock no rule.
    """
    rules(r=Rule(limits=[SlidingWindow("20/s")]))

    def made(last: dict[str, str], later: int) -> list[str]:
        answers = itertools.chain([(200, {}, b"{}")] * 19, [(200, last, b"{}")])
        remote.answers["/"] = lambda: next(answers)
        for _ in range(20):
            send("r")
        with CaptureQueriesContext(connection) as queries, travel(seconds=later):
            assert run() == 20
        texts = (re.sub(r"'[^']*'|\d+", "?", query["sql"]) for query in queries)
        return [text for text in texts if "SAVEPOINT" not in text]

    made({}, 0)
    usual, last = made({}, 2), made(LAST, 4)
    assert last == usual
    assert not Hold.objects.exists()
    assert CallAttempt.objects.filter(outcome="succeeded").count() == 60


def classify(answer: Any) -> Any:
    return {
        "done": Succeeded(),
        "later": RetryLater("not ready", after=5),
        "held": HoldUntil(30, "quota", scope="rule"),
        "over": GiveUp("no such number"),
        "raise": None,
    }[answer.json()["say"]]


@pytest.mark.parametrize(
    ("say", "status"),
    [
        ("done", Status.DONE),
        ("later", Status.ERROR),
        ("held", Status.ERROR),
        ("over", Status.FAILED),
        ("raise", Status.DONE),
    ],
)
def test_a_rule_may_judge_answers_itself(
    rules: Rules, remote: Vendor, say: str, status: int
) -> None:
    rules(r=Rule(classify=classify))
    remote.answers["/"] = (200, {}, {"say": say})
    call = send("r")
    run()
    assert fresh(call).status == status
    assert Hold.objects.count() == (say == "held")


@pytest.mark.parametrize(
    "why", [ValueError("card declined"), gettext_lazy("card declined"), 402, {"code": 7}], ids=str
)
def test_a_reason_may_be_whatever_was_at_hand(rules: Rules, remote: Vendor, why: Any) -> None:
    """Such as the error that was caught. A verdict that is lost for its words is made again, or is
    taken for a success.
    """
    rules(r=Rule(classify=lambda _: GiveUp(why)), hold=Rule(classify=lambda _: HoldUntil(30, why)))
    call, held = send("r"), send("hold")
    run()
    call = fresh(call)
    assert call.status == Status.FAILED and str(why) in call.error_message
    assert fresh(held).status == Status.ERROR and str(why) in Hold.objects.get().reason


@pytest.mark.parametrize(
    ("say", "field"),
    [
        (lambda: RetryLater("w", after="5"), "RetryLater.after"),  # type: ignore[arg-type]
        (lambda: RetryLater("w", after=timezone.now()), "RetryLater.after"),  # type: ignore[arg-type]
        (lambda: HoldUntil("5", "w"), "HoldUntil.until"),  # type: ignore[arg-type]
    ],
)
def test_a_verdict_whose_time_is_none_says_so_where_it_is_made(
    rules: Rules, remote: Vendor, say: Callable[[], object], field: str
) -> None:
    rules(r=Rule(classify=lambda _: say()))
    call = send("r")
    run()
    told = fresh(call).attempts.get().error_message
    assert told.startswith(f"classify failed: TypeError: {field}: must be seconds")


def test_truncated_and_broken_bodies_are_told_with_the_attempt(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule())
    remote.answers["/cut"] = wire.Answer(
        response=response(200, {}, b"x"), sent_at=None, sent=True, truncated=True
    )
    remote.answers["/broken"] = wire.Answer(
        response=response(200, {}, b"x"),
        sent_at=None,
        sent=True,
        broken=True,
        error="the body broke off",
    )
    cut, broken, reads = send("r", "/cut"), send("r", "/broken"), send("r", "/broken", "get")
    run()
    assert fresh(cut).status == fresh(broken).status == Status.DONE
    assert fresh(reads).status == Status.ERROR
    assert "cut at" in fresh(cut).attempts.get().error_message
    assert "broke off" in fresh(broken).attempts.get().error_message
