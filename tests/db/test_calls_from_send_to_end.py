"""A call's life: sent, made, judged, retried, ended, requeued; what the rows say at each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core import mail
from django.utils import timezone

import callqueue
from callqueue import GiveUp, Retry, Rule, handlers
from callqueue.execution import claim, executor, recorder, request
from callqueue.handlers import Context
from callqueue.models import CallQueue
from tests.support.behaviour import Vendor, release, run, send
from tests.support.locking import fresh

Rules = Callable[..., None]
Status = CallQueue.Status
QUICK = Retry(base=0.0, jitter=False)


def test_a_call_that_succeeds_is_done(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule())
    remote.answers["/pay"] = (201, {"Content-Type": "application/json"}, {"id": 7})
    call = send("r", "/pay")
    assert call.status == Status.NEW
    assert call.finished_at_dt is None
    assert run() == 1
    call = fresh(call)
    assert call.status == Status.DONE
    assert call.finished_at_dt is not None
    (attempt,) = call.attempts.all()
    assert (attempt.number, attempt.outcome, attempt.response_status) == (1, "succeeded", 201)
    assert attempt.response_body == '{"id": 7}'
    assert attempt.released_at <= attempt.started_at <= attempt.sent_at <= attempt.finished_at
    assert attempt.worker


def test_every_verb_of_requests_is_a_method(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule())
    for method in ("get", "options", "head", "post", "put", "patch", "delete"):
        send("r", f"/{method}", method)
    assert run() == 7
    assert {(m, p) for m, p, _ in remote.requests} == {(p[1:], p) for p in remote.paths()}
    assert set(CallQueue.objects.values_list("status", flat=True)) == {Status.DONE}


def test_a_failed_attempt_is_retried_and_nothing_of_it_is_erased(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(retry=QUICK))
    answers = iter([500, 503, 200])
    remote.answers["/"] = lambda: next(answers)
    call = send("r")
    run()
    call = fresh(call)
    assert (call.status, call.failed_count) == (Status.ERROR, 1)
    assert "500" in call.error_message
    run(), run()
    call = fresh(call)
    assert (call.status, call.failed_count) == (Status.DONE, 2)
    said = [(a.number, a.response_status) for a in call.attempts.all()]
    assert said == [(1, 500), (2, 503), (3, 200)]


def test_a_retry_waits_for_its_backoff(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(retry=Retry(base=60, jitter=False)))
    remote.answers["/"] = 500
    call = send("r")
    run()
    assert run() == 0
    call = fresh(call)
    assert timedelta(seconds=55) < call.due_at_dt - timezone.now() < timedelta(seconds=61)


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
    assert len(remote.requests) == 3
    assert len(keys) == 1
    remote.requests.clear()
    send("r", "/read", "get"), send("g", "/none")
    run()
    without = [params for _, path, params in remote.requests if path in ("/read", "/none")]
    assert len(without) == 2
    assert not any("headers" in params for params in without)


def test_no_retry_is_planned_for_when_the_idempotency_key_is_too_old(
    rules: Rules, remote: Vendor
) -> None:
    slow = Retry(base=2 * 3600.0, cap=1e6, jitter=False)
    rules(r=Rule(retry=slow, idempotency_ttl=timedelta(hours=1)))
    remote.answers["/"] = 500
    post, put = send("r"), send("r", method="put")
    run()
    assert fresh(post).status == Status.FAILED
    assert "idempotency" in fresh(post).error_message
    assert fresh(put).status == Status.ERROR


def test_an_old_idempotency_key_stops_a_retry_and_neither_a_person_nor_a_call_that_was_refused(
    rules: Rules, remote: Vendor
) -> None:
    rules(r=Rule(retry=QUICK, idempotency_ttl=timedelta(hours=1)))
    answers = iter([500, 429, 200])
    remote.answers["/"] = lambda: next(answers)
    call = send("r")
    run()
    _grow_old(call)
    run()
    assert fresh(call).status == Status.FAILED
    assert "idempotency" in fresh(call).error_message
    assert len(remote.requests) == 1, "the retry that waited too long was made"
    fresh(call).requeue()
    run()
    assert fresh(call).status == Status.ERROR
    run()
    assert fresh(call).status == Status.DONE
    assert len(remote.requests) == 3


def _grow_old(call: CallQueue) -> None:
    CallQueue.objects.filter(pk=call.pk).update(first_sent_dt=timezone.now() - timedelta(hours=2))


def test_a_call_refused_nineteen_times_is_still_alive(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule(retry=Retry(base=0.0, jitter=False)))
    remote.answers["/"] = 429
    call = send("r")
    for _ in range(19):
        assert run() == 1
    call = fresh(call)
    assert (call.status, call.failed_count, call.attempts.count()) == (Status.ERROR, 0, 19)
    remote.answers["/"] = 200
    run()
    assert fresh(call).status == Status.DONE


@pytest.fixture
def own_handlers() -> Iterator[list[Any]]:
    seen: list[Any] = []

    @callqueue.handler("sms")
    def sms(params: Any, context: Context) -> Any:
        seen.append((params, context))
        if params.get("fail"):
            raise OSError("line down")
        return (
            {"sent": params["to"]}
            if not params.get("give up")
            else GiveUp(OSError("no such number"))
        )

    yield seen
    handlers._registered.pop("sms")


def test_a_handler_makes_calls_of_its_own_kind(rules: Rules, own_handlers: list[Any]) -> None:
    rules(r=Rule(retry=QUICK))
    good = CallQueue.objects.send({"method": "sms", "params": {"to": "1"}}, rule="r", key="T1")
    bad = CallQueue.objects.send({"method": "sms", "params": {"to": "2", "fail": True}}, rule="r")
    never = CallQueue.objects.send(
        {"method": "sms", "params": {"to": "3", "give up": True}}, rule="r"
    )
    run()
    assert fresh(good).status == Status.DONE
    assert fresh(good).attempts.get().response_body == '{"sent": "1"}'
    assert fresh(bad).status == Status.ERROR
    assert "line down" in fresh(bad).error_message
    assert fresh(never).status == Status.FAILED
    assert fresh(never).error_message == "OSError: no such number"
    context = own_handlers[0][1]
    assert (context.call_id, context.rule, context.key, context.attempt) == (good.pk, "r", "T1", 1)
    assert context.deadline > timezone.now()


@pytest.mark.parametrize("spelt", ["sendFax", "SENDFAX", "sendfax"])
def test_a_handler_is_found_however_its_name_is_spelt(rules: Rules, spelt: str) -> None:
    rules(r=Rule())
    callqueue.handler("sendFax")(lambda params, context: "faxed")
    call = CallQueue.objects.send({"method": spelt, "params": {}}, rule="r")
    run()
    handlers._registered.pop("sendfax")
    assert fresh(call).status == Status.DONE and fresh(call).answer.json() == "faxed"


def test_an_async_handler_has_made_nothing(rules: Rules) -> None:
    """Its coroutine is no result: nobody would have awaited it."""
    rules(r=Rule())

    @callqueue.handler("fax")
    async def fax(params: Any, context: Context) -> None: ...

    call = CallQueue.objects.send({"method": "fax", "params": {}}, rule="r")
    run()
    handlers._registered.pop("fax")
    assert fresh(call).status == Status.ERROR
    assert "the handler is async; write def" in fresh(call).error_message


@pytest.mark.parametrize("name", [lambda params, context: None, None, "", 5, "x" * 101], ids=repr)
def test_a_handler_without_the_name_of_a_method_is_refused_at_once(name: Any) -> None:
    with pytest.raises(TypeError, match=r'write @callqueue.handler\("name"\)'):
        callqueue.handler(name)


def test_mail_is_sent(rules: Rules) -> None:
    rules(r=Rule())
    params = {"to": ["a@example.com"], "subject": "Hello", "message": "plain"}
    params |= {"html_message": "<b>x</b>", "cc": ["c@example.com"]}
    call = CallQueue.objects.send({"method": "send_email", "params": params}, rule="r")
    run()
    assert fresh(call).status == Status.DONE
    (message,) = mail.outbox
    said = (message.to, message.cc, message.subject)
    assert said == (["a@example.com"], ["c@example.com"], "Hello")


def test_a_call_expires_if_it_was_not_released_in_time(rules: Rules, remote: Vendor) -> None:
    rules(r=Rule())
    waiting, released = (
        send("r", expires_at=in_an_hour()),
        send("r", "/released", expires_at=in_an_hour(), priority=1),
    )
    CallQueue.objects.filter(pk=waiting.pk).update(
        expires_at_dt=timezone.now() - timedelta(seconds=1)
    )
    (call,) = release()
    CallQueue.objects.filter(pk=call.pk).update(expires_at_dt=timezone.now() - timedelta(seconds=1))
    executor.execute("default", list(call.attempts.values_list("pk", flat=True)))
    assert fresh(waiting).status == fresh(released).status == Status.EXPIRED
    assert remote.requests == []


def in_an_hour() -> Any:
    return timezone.now() + timedelta(hours=1)


noted: list[Any] = []


def test_a_handler_whose_lease_is_over_is_not_called_and_counts_no_failure(rules: Rules) -> None:
    """The process had no turn between the fence and the call: as for a request that was never
    sent.
    """
    rules(r=Rule(), more={"HANDLERS": {"note": f"{__name__}.note"}})
    call = CallQueue.objects.send({"method": "note", "params": {}}, rule="r")
    assert call is not None
    release()
    (job,) = claim.begin("default", [call.attempts.get().pk])
    job.lease_ends = 0.0
    recorder.record("default", [request.make(job)])
    assert not noted
    ended = (fresh(call).status, fresh(call).failed_count, call.attempts.get().outcome)
    assert ended == (Status.NEW, 0, "voided")


def note(params: Any, context: Context) -> None:
    noted.append(params)
