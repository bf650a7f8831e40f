"""Judging: what an answer, or none, makes of a call and of its rule."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.utils import timezone
from django.utils.translation import gettext_lazy

from callqueue import (
    GiveUp,
    HoldUntil,
    Retry,
    RetryLater,
    Rule,
    SlidingWindow,
    Succeeded,
    handler,
)
from callqueue.execution import judging, recorder, wire
from callqueue.ledger import ledger_time
from callqueue.models import CallQueue, Hold
from tests.support.behaviour import WHEN_LOST, Vendor, response, run, send
from tests.support.locking import fresh

Rules = Callable[..., None]
Status = CallQueue.Status


def nobody(why: str, **how: bool) -> wire.Answer:
    return wire.Answer(response=None, sent_at=None, error=why, **how)


INSIDE = "10.0.0.1 is private"


def partly(**how: Any) -> wire.Answer:
    return wire.Answer(response=response(200, {}, b"x"), sent_at=None, sent=True, **how)


CUT, BROKEN = partly(truncated=True), partly(broken=True, error="the body broke off")


@pytest.mark.parametrize(
    ("answer", "method", "on_lost", "status", "why"),
    [
        *[(code, "post", "auto", Status.FAILED, str(code)) for code in (400, 404, 410, 422, 302)],
        *[(nobody("read timeout", sent=True), *case, "read timeout") for case in WHEN_LOST],
        (nobody("connection refused"), "post", "auto", Status.ERROR, "connection refused"),
        (nobody("no more", dropped=True), "post", "auto", Status.NEW, "no more"),
        (nobody("no more", dropped=True, sent=True), "post", "auto", Status.UNKNOWN, "no more"),
        (nobody(INSIDE, refused=True), "post", "auto", Status.FAILED, INSIDE),
        (CUT, "post", "auto", Status.DONE, "cut at"),
        (BROKEN, "post", "auto", Status.DONE, "broke off"),
        (BROKEN, "get", "auto", Status.ERROR, "broke off"),
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
    is_told = status not in (Status.DONE, Status.NEW)
    assert call.status == status and (why in call.error_message) is is_told
    assert why in call.attempts.get().error_message


@pytest.mark.parametrize(
    ("settled", "charged"),
    [
        ({"calls": 0, "tokens": 3}, {"calls": 1, "tokens": 90}),
        ({"calls": 2, "tokens": 3}, {"calls": 2, "tokens": 90}),
        (None, {"tokens": 90}),
    ],
)
def test_what_is_counted_in_a_body_that_was_cut_makes_no_room(
    rules: Rules, remote: Vendor, settled: Any, charged: dict[str, int]
) -> None:
    rules(r=Rule(settle=lambda _: settled))
    remote.answers["/"] = CUT
    call = send("r", cost={"tokens": 90})
    run()
    assert fresh(call).attempts.get().cost == charged


def test_a_settle_that_raises_is_told_with_its_call(
    rules: Rules, remote: Vendor, caplog: pytest.LogCaptureFixture
) -> None:
    rules(r=Rule(settle=lambda answer: answer.json()["usage"]))
    call = send("r")
    with caplog.at_level("INFO", logger="callqueue"):
        run()
    (told,) = (text for text in caplog.messages if text.startswith("attempt_failed"))
    assert told.startswith(f"attempt_failed call_id={call.pk} rule=r attempt=1 reason=")


NOT_TO_COME = [0, -5, timedelta(0), timedelta(days=-900), None, datetime(1, 1, 1), timezone.now()]
NEVER = [10**400, float("inf"), timedelta.max, datetime(9999, 12, 31), datetime.max]


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({}, 40),
        ({"Retry-After": "0"}, 40),
        ({"RateLimit-Remaining": "0", "RateLimit-Reset": "0"}, 40),
        *[(HoldUntil(until, "x"), 40) for until in NOT_TO_COME],
        *[(HoldUntil(until, "x"), 60) for until in NEVER],
    ],
)
def test_a_refusal_that_names_no_time_to_come_holds_as_long_as_the_backoff(
    rules: Rules, remote: Vendor, said: Any, seconds: int
) -> None:
    """So does a verdict; and one that names the end of time is clamped."""
    classify = (lambda _: said) if isinstance(said, HoldUntil) else None
    rules(r=Rule(retry=Retry(base=20.0, jitter=False, max_hold=60.0), classify=classify))
    remote.answers["/"] = (429, said if classify is None else {}, b"")
    send("r"), send("r", "/next", priority=-1)
    CallQueue.objects.update(throttled_count=1)
    run()
    left = (Hold.objects.get().until - ledger_time.now("default")).total_seconds()
    assert seconds - 5 < left < seconds + 1
    assert run() == 0


NO_TIME = "classify failed: TypeError: {}: must be seconds"
WHYS = (ValueError("card declined"), gettext_lazy("card declined"), 402, {"code": 7})


@pytest.mark.parametrize(
    ("say", "status", "said"),
    [
        (Succeeded, Status.DONE, ""),
        (lambda: None, Status.DONE, ""),
        (lambda: RetryLater("not ready", after=5), Status.ERROR, "not ready"),
        (lambda: HoldUntil(30, "quota", scope="rule"), Status.ERROR, "quota"),
        # a reason may be whatever was at hand, such as the error that was caught
        *[(partial(GiveUp, why), Status.FAILED, str(why)) for why in WHYS],
        *[(partial(HoldUntil, 30, why), Status.ERROR, str(why)) for why in WHYS],
        # a time that is none is told where it is made
        (lambda: RetryLater("w", after="5"), Status.DONE, NO_TIME.format("RetryLater.after")),
        (lambda: RetryLater("w", after=timezone.now()), Status.DONE, NO_TIME.format("RetryLater.after")),
        (lambda: HoldUntil("5", "w"), Status.DONE, NO_TIME.format("HoldUntil.until")),
    ],
)  # fmt: skip
def test_a_rule_may_judge_answers_itself(
    rules: Rules, remote: Vendor, say: Callable[[], Any], status: int, said: str
) -> None:
    """A verdict that is lost for its words is made again, or is taken for a success."""
    rules(r=Rule(classify=lambda _: say()))
    call = send("r")
    run()
    assert fresh(call).status == status and said in call.attempts.get().error_message
    assert status == Status.DONE or said in fresh(call).error_message
    is_held = (isinstance(say, partial) and say.func is HoldUntil) or said == "quota"
    assert [said in hold.reason for hold in Hold.objects.all()] == [True] * is_held


LIMITS = {per: SlidingWindow("9/s", per=per) for per in ("rule", "queue", "key", "team")}


@pytest.mark.parametrize(
    ("pers", "key", "scope", "held"),
    [
        (["rule"], "k", None, ("rule", "")),
        (["rule", "queue"], "k", None, ("queue", "q")),
        (["queue", "key"], "k", None, ("key", "k")),
        (["team"], {"team": "t", "user": "u"}, None, ("team", "t")),
        (["queue", "key"], "", None, ("queue", "q")),
        (["queue", "key"], "k", "rule", ("rule", "")),
        (["queue", "key"], "k", "queue", ("queue", "q")),
        (["rule"], {"team": "t"}, "team", ("team", "t")),
    ],
)
def test_a_hold_is_of_the_scope_named_or_the_narrowest_that_the_call_has(
    rules: Rules, remote: Vendor, pers: list[str], key: Any, scope: str | None, held: Any
) -> None:
    limits = [LIMITS[per] for per in pers]
    rules(r=Rule(queues="q", limits=limits, classify=lambda _: HoldUntil(30, "x", scope=scope)))
    call = send("r", key=key)
    run()
    assert Hold.objects.values_list("per", "value").get() == held
    assert (fresh(call).status, fresh(call).failed_count) == (Status.ERROR, 0), "none is used up"


def test_a_refusal_without_a_time_makes_no_hold_longer_and_holds_all_that_share_the_limit(
    rules: Rules, remote: Vendor
) -> None:
    shared = SlidingWindow("9/s", name="account")
    answers = {"/": HoldUntil(10, "named"), "/next": HoldUntil(None, "not named")}
    rules(
        r=Rule(limits=[shared], classify=lambda answer: answers[answer.text], retry=Retry(base=60)),
        other=Rule(limits=[shared]),
        apart=Rule(limits=[SlidingWindow("9/s")]),
    )
    for path in answers:
        remote.answers[path] = (200, {}, path.encode())
        send("r", path)
    assert run() == 2
    assert set(Hold.objects.values_list("rule", "reason")) == {("r", "named"), ("other", "named")}
    for hold in Hold.objects.all():
        assert hold.until - ledger_time.now("default") < timedelta(seconds=10)


def test_a_refusal_is_held_before_it_is_recorded(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a pass in between would release what the provider has just refused."""
    rules(r=Rule())
    remote.answers["/"] = (429, {"Retry-After": "30"}, b"")
    monkeypatch.setattr(recorder, "record_once", Mock(side_effect=SoftTimeLimitExceeded))
    send("r")
    with pytest.raises(SoftTimeLimitExceeded):
        run()
    assert Hold.objects.get().rule == "r"


def test_what_fails_once_a_call_was_sent_is_as_if_nobody_had_answered(
    rules: Rules, remote: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule())
    monkeypatch.setattr(judging, "_unstamped_result", Mock(side_effect=ValueError("odd")))
    call = send("r")
    run()
    assert (fresh(call).status, len(remote.requests)) == (Status.UNKNOWN, 1)


told: list[Any] = []


@handler("out_of_descriptors")
def note_and_fail(params: Any, context: Any) -> None:
    told.append((context.attempt, context.is_last))
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("method", ["post", "out_of_descriptors"])
def test_what_was_begun_has_failed_for_whatever_reason_and_is_known_since_when(
    rules: Rules, remote: Vendor, method: str
) -> None:
    """A handler may have done something before it lacked what it needed."""
    told.clear()
    rules(r=Rule(retry=Retry(max_attempts=2, base=0)))
    remote.answers["/"] = 500
    call = send("r") if method == "post" else None
    call = call or CallQueue.objects.send({"method": method, "params": {}}, rule="r")
    run()
    first = fresh(call)
    assert (first.status, first.failed_count) == (Status.ERROR, 1)
    run()
    last = fresh(call)
    assert (last.status, last.first_sent_dt) == (Status.FAILED, first.first_sent_dt)
    assert first.first_sent_dt is not None
    assert told == [(1, False), (2, True)] * (method != "post")
