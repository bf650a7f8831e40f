"""A call's life: sent, made, judged, retried, ended, requeued; what the rows say at each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core import mail
from django.utils import timezone

import callqueue
from callqueue import GiveUp, Retry, Rule, conf, handlers
from callqueue.execution import claim, executor, recorder, request
from callqueue.handlers import Context
from callqueue.models import CallQueue
from tests.support.behaviour import Vendor, release, run, send
from tests.support.locking import fresh, status_of

Rules = Callable[..., None]
Status = CallQueue.Status
QUICK = Retry(base=0.0, jitter=False)


def send_to(method: str, **params: Any) -> CallQueue:
    """A call of a handler."""
    call = CallQueue.objects.send({"method": method, "params": params}, rule="r", key="T1")
    assert call is not None
    return call


def test_calls_of_every_verb_are_done(
    rules: Rules, remote: Vendor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "callqueue")
    rules(r=Rule())
    remote.answers["/post"] = (201, {"Content-Type": "application/json"}, {"id": 7})
    verbs = ("post", "get", "options", "head", "put", "patch", "delete")
    call, *_ = [send("r", f"/{verb}", verb) for verb in verbs]
    assert (call.status, call.finished_at_dt) == (Status.NEW, None)
    assert run() == 7
    assert {(verb, path) for verb, path, _ in remote.requests} == {(v, f"/{v}") for v in verbs}
    assert CallQueue.objects.done().filter(finished_at_dt__isnull=False).count() == 7
    (attempt,) = fresh(call).attempts.all()
    assert (attempt.number, attempt.outcome, attempt.response_status) == (1, "succeeded", 201)
    assert attempt.response_body == '{"id": 7}' and attempt.worker
    assert attempt.released_at <= attempt.started_at <= attempt.sent_at <= attempt.finished_at
    assert "attempt_refused" not in caplog.text


def test_a_failed_attempt_is_retried_and_nothing_of_it_is_erased(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(retry=QUICK), slow=Rule(retry=Retry(base=60, jitter=False)))
    answers = iter([500, 503, 200])
    remote.answers |= {"/": lambda: next(answers), "/slow": 500}
    call, slow = send("r"), send("slow", "/slow")
    run()
    call = fresh(call)
    assert (call.status, call.failed_count) == (Status.ERROR, 1)
    assert "500" in call.error_message
    run(), run()
    call = fresh(call)
    assert (call.status, call.failed_count) == (Status.DONE, 2)
    said = [(a.number, a.response_status) for a in call.attempts.all()]
    assert said == [(1, 500), (2, 503), (3, 200)]
    slow = fresh(slow)
    assert slow.attempts.count() == 1, "it waits for its backoff"
    assert timedelta(seconds=50) < slow.due_at_dt - timezone.now() < timedelta(seconds=61)


def test_the_idempotency_key_is_one_for_the_whole_life_of_a_call(
    rules: Rules, remote: Vendor
) -> None:
    rules(
        r=Rule(retry=Retry(max_attempts=2, base=0.0, jitter=False)), g=Rule(idempotency_header=None)
    )
    remote.answers["/"] = 500
    call = send("r")
    run(), run()
    fresh(call).requeue()
    run()
    keys = {params["headers"]["Idempotency-Key"] for _, _, params in remote.requests}
    assert (len(remote.requests), len(keys)) == (3, 1)
    remote.requests.clear()
    send("r", "/read", "get"), send("g", "/none")
    run()
    without = [params for _, path, params in remote.requests if path in ("/read", "/none")]
    assert len(without) == 2
    assert not any("headers" in params for params in without)


def test_an_old_idempotency_key_stops_a_retry_and_neither_a_person_nor_a_call_that_was_refused(
    rules: Rules, remote: Vendor
) -> None:
    hour, slow = timedelta(hours=1), Retry(base=2 * 3600.0, cap=1e6, jitter=False)
    rules(
        slow=Rule(retry=slow, idempotency_ttl=hour), quick=Rule(retry=QUICK, idempotency_ttl=hour)
    )
    answers = iter([500, 429, 200])
    remote.answers |= {"/slow": 500, "/": lambda: next(answers)}
    post, put, call = send("slow", "/slow"), send("slow", "/slow", "put"), send("quick")
    run()
    assert status_of(post) == Status.FAILED, "its retry would come too late"
    assert "idempotency" not in post.attempts.get().error_message, "it is why no other is made"
    assert status_of(put) == Status.ERROR
    CallQueue.objects.filter(pk=call.pk).update(first_sent_dt=timezone.now() - 2 * hour)
    run()
    for failed in (post, call):
        assert status_of(failed) == Status.FAILED and "idempotency" in fresh(failed).error_message
    assert remote.paths().count("/") == 1, "the retry that waited too long was made"
    fresh(call).requeue()
    run()
    assert status_of(call) == Status.ERROR
    run()
    assert status_of(call) == Status.DONE
    assert remote.paths().count("/") == 3


def test_a_call_refused_nineteen_times_is_still_alive(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(retry=QUICK))
    remote.answers["/"] = 429
    call = send("r")
    for _ in range(19):
        assert run() == 1
    call = fresh(call)
    assert (call.status, call.failed_count, call.attempts.count()) == (Status.ERROR, 0, 19)
    remote.answers["/"] = 200
    run()
    assert status_of(call) == Status.DONE


@pytest.fixture
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone afterwards."""
    before = dict(handlers._registered)
    yield
    handlers._registered.clear()
    handlers._registered.update(before)


@pytest.mark.usefixtures("own_handlers")
def test_a_handler_makes_calls_of_its_own_kind(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule(retry=QUICK))
    monkeypatch.setattr(request.SlotGate, "_sleep_until_slot", lambda gate: time.sleep(0.2))
    seen: list[Any] = []
    left: list[float] = []

    @callqueue.handler("sms")
    def sms(params: Any, context: Context) -> Any:
        seen.append(context)
        left.append((context.deadline - timezone.now()).total_seconds())
        if params["to"] == "bad":
            raise OSError("line down")
        return GiveUp(OSError("no such number")) if params["to"] == "never" else {"sent": "1"}

    good, bad, never = (send_to("sms", to=to) for to in ("good", "bad", "never"))
    run()
    assert fresh(good).attempts.get().response_body == '{"sent": "1"}'
    assert (status_of(good), status_of(bad), status_of(never)) == (3, Status.ERROR, Status.FAILED)
    assert "line down" in fresh(bad).error_message
    assert fresh(never).error_message == "OSError: no such number"
    context = seen[0]
    assert (context.call_id, context.rule, context.key, context.attempt) == (good.pk, "r", "T1", 1)
    assert 0 < max(left) < conf.current().begun_lease(Rule()) - 0.1, "it has waited for its slot"


@pytest.mark.usefixtures("own_handlers")
def test_a_handler_is_found_however_its_name_is_spelt_and_is_not_async(rules: Rules) -> None:
    """A coroutine is no result: nobody would have awaited it."""
    rules(r=Rule())
    callqueue.handler("sendFax")(lambda params, context: "faxed")

    @callqueue.handler("async")
    async def later(params: Any, context: Context) -> None: ...

    calls, wrong = [send_to(name) for name in ("sendFax", "SENDFAX", "sendfax")], send_to("async")
    run()
    assert [fresh(call).answer.json() for call in calls] == ["faxed"] * 3
    assert status_of(wrong) == Status.ERROR
    assert "the handler is async; write def" in fresh(wrong).error_message
    for name in (lambda params, context: None, None, "", 5, "x" * 101):
        with pytest.raises(TypeError, match=r'write @callqueue.handler\("name"\)'):
            callqueue.handler(name)


def test_mail_is_sent(rules: Rules) -> None:
    rules(r=Rule())
    to, cc = ["a@example.com"], ["c@example.com"]
    call = send_to(
        "send_email", to=to, cc=cc, subject="Hello", message="plain", html_message="<b>x</b>"
    )
    run()
    assert status_of(call) == Status.DONE
    (message,) = mail.outbox
    assert (message.to, message.cc, message.subject) == (to, cc, "Hello")


def test_a_call_expires_if_it_was_not_begun_in_time(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule())
    now, second = timezone.now(), timedelta(seconds=1)
    waiting, released = (send("r", expires_at=now + timedelta(hours=1), priority=n) for n in (0, 1))
    CallQueue.objects.filter(pk=waiting.pk).update(expires_at_dt=now - second)
    (call,) = release()
    CallQueue.objects.filter(pk=call.pk).update(expires_at_dt=now - second)
    executor.execute("default", list(call.attempts.values_list("pk", flat=True)))
    assert status_of(waiting) == status_of(released) == Status.EXPIRED
    assert remote.requests == []


noted: list[Any] = []


def note(params: Any, context: Context) -> None:
    noted.append(params)


def test_a_handler_whose_lease_is_over_is_not_called_and_counts_no_failure(rules: Rules) -> None:
    """The process had no turn between the fence and the call."""
    rules(r=Rule(), more={"HANDLERS": {"note": f"{__name__}.note"}})
    call = send_to("note")
    release()
    (job,) = claim.begin("default", [call.attempts.get().pk])
    job.lease_ends_at = 0.0
    recorder.record("default", [request.make(job)])
    assert not noted
    ended = (status_of(call), fresh(call).failed_count, call.attempts.get().outcome)
    assert ended == (Status.NEW, 0, "voided")
