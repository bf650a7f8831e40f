"""QueuedTask: Celery tasks that run when their limits admit them, and are else as Celery's users
know them: results of every end, errbacks, signals, the request, what Celery's messages carry.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from unittest.mock import Mock

import pytest
from celery import chain, chord, current_app, group, shared_task, signals
from celery.backends.rpc import RPCBackend
from celery.exceptions import ChordError, Ignore, TaskRevokedError, WorkerLostError
from django.utils import timezone
from django.utils.translation import gettext_lazy

import callqueue
from callqueue import (
    GiveUp,
    HoldUntil,
    Retry,
    RetryLater,
    Rule,
    Secret,
    SlidingWindow,
    Succeeded,
    states,
)
from callqueue.exceptions import InvalidCall
from callqueue.handlers.celery_task import TaskExited, TaskGaveUp
from callqueue.integrations import queued_result
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.testing import Clock, Sent, run_callqueue
from tests.support.locking import fresh

Rules = Callable[..., None]
Status = CallQueue.Status
ran: list[Any] = []


@shared_task(base=callqueue.QueuedTask, rule="github", name="tests.queued.fetch")
def fetch(repo: str, page: int = 1) -> dict[str, Any]:
    ran.append((repo, page))
    return {"repo": repo, "page": page}


@shared_task(base=callqueue.QueuedTask, rule="github", name="tests.queued.add")
def add(a: int, b: int) -> int:
    ran.append((a, b))
    return a + b


@shared_task(base=callqueue.QueuedTask, rule="github", name="tests.queued.total")
def total(numbers: list[int]) -> int:
    ran.append(numbers)
    return sum(numbers)


@shared_task(name="tests.queued.plain")
def plain(result: Any, more: Any = None) -> Any:
    ran.append(("plain", result, more))
    return result


@shared_task(name="tests.queued.errback")
def errback(task_id: str) -> None:
    ran.append(("errback", task_id))


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.known.errback")
def queued_errback(task_id: str) -> None:
    errback(task_id)


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.known.identity")
def identity(value: Any) -> Any:
    ran.append(value)
    return value


@shared_task(
    base=callqueue.QueuedTask,
    rule="keyed",
    name="tests.queued.keyed",
    key=lambda customer_id, **_: str(customer_id),
    cost=lambda tokens: {"tokens": tokens},
    unique_key=lambda customer_id, tokens: f"{customer_id}/{tokens}",
    priority=7,
    callback="tests.queued.plain",
)
def keyed(customer_id: int, tokens: int = 5) -> None:
    ran.append((customer_id, tokens))


@shared_task(base=callqueue.QueuedTask, rule="github", name="tests.queued.broken")
def broken() -> None:
    ran.append("broken")
    raise ValueError("it broke")


@shared_task(
    base=callqueue.QueuedTask, rule="github", name="tests.queued.stubborn", bind=True, max_retries=2
)
def stubborn(self: Any, successes_after: int, **options: Any) -> int:
    ran.append((self.request.retries, self.request.id))
    if self.request.retries < successes_after:
        raise self.retry(exc=ValueError("not yet"), **options)
    return int(self.request.retries)


@shared_task(
    base=callqueue.QueuedTask,
    rule="github",
    name="tests.queued.auto",
    autoretry_for=(KeyError,),
    retry_kwargs={"countdown": 30},
)
def auto() -> str:
    ran.append("auto")
    if len(ran) == 1:
        raise KeyError("first")
    return "second"


@shared_task(base=callqueue.QueuedTask, rule="github", name="tests.queued.returns", bind=True)
def returns(self: Any, what: str) -> Any:
    if what == "ignore":
        raise Ignore
    return {(1, 2): datetime(2026, 1, 1, tzinfo=UTC)}


@pytest.fixture(autouse=True)
def _rules(rules: Rules) -> Iterator[None]:
    ran.clear()
    rules(
        {"SECRETS": {"KEY": "s3cret"}},
        github=Rule(retry=Retry(base=60.0, jitter=False)),
        keyed=Rule(limits=[SlidingWindow("100/m", unit="tokens"), SlidingWindow("1/m", per="key")]),
        r=Rule(retry=Retry(max_attempts=2, base=60.0, jitter=False)),
        soon=Rule(retry=Retry(max_attempts=3, base=0.0, jitter=False)),
    )
    yield
    ran.clear()


def last_attempt(call: CallQueue) -> CallAttempt:
    return call.attempts.order_by("-number")[0]


# --- Sending and running


def test_delay_queues_a_call_and_the_task_runs_when_it_is_admitted(
    callqueue_sent: Sent, django_capture_on_commit_callbacks: Any
) -> None:
    result = fetch.delay("callqueue", page=2)
    assert ran == []
    assert result.call == callqueue_sent.last
    assert result.state == "PENDING"
    call = callqueue_sent.assert_call_sent(
        method="celery_task", name=fetch.name, rule="github", kwargs={"page": 2}, count=1
    )
    assert run_callqueue() == 1
    assert ran == [("callqueue", 2)]
    assert fresh(call).status == Status.DONE
    assert json.loads(last_attempt(call).response_body) == {"repo": "callqueue", "page": 2}
    assert (result.state, result.result) == ("SUCCESS", {"repo": "callqueue", "page": 2})
    with django_capture_on_commit_callbacks(execute=True):
        fetch.delay_on_commit("a")
        assert len(callqueue_sent) == 1
    assert len(callqueue_sent) == 2


def test_what_a_call_has_comes_from_the_arguments_and_options_of_one_call_win() -> None:
    result = keyed.delay(12, tokens=8)
    call = result.call
    assert call is not None
    assert (call.key, call.cost, call.unique_key, call.priority) == ("12", {"tokens": 8}, "12/8", 7)
    assert call.callback == "tests.queued.plain"
    assert keyed.delay(customer_id=13).call.key == "13"
    assert keyed.delay(13).call.cost == {"tokens": 5}
    again = keyed.delay(12, tokens=8)
    assert (again.call, again.id) == (call, result.id)
    own = {"rule": "github", "key": "k", "cost": 3, "unique_key": "u", "priority": 2}
    call = keyed.apply_async((1,), callback="x", **own).call
    assert {name: getattr(call, name) for name in own} == own and call.callback == "x"


def test_countdown_eta_and_expires(callqueue_clock: Clock) -> None:
    now = timezone.now()
    later = fetch.apply_async(("later",), countdown=3600).call
    eta = fetch.apply_async(("eta",), eta=now + timedelta(hours=2)).call
    naive = fetch.apply_async(("naive",), eta=(now + timedelta(hours=2)).replace(tzinfo=None)).call
    gone = fetch.apply_async(("gone",), countdown=60, expires=1800).call
    assert all(fetch.apply_async(("now",), countdown=none).call.ready for none in (0, 0.0, None))
    assert abs(later.due_at_dt - now - timedelta(hours=1)) < timedelta(minutes=1)
    assert eta.due_at_dt == naive.due_at_dt == now + timedelta(hours=2)
    assert abs(gone.expires_at_dt - now - timedelta(minutes=30)) < timedelta(minutes=1)
    run_callqueue()
    assert ran == [("now", 1)] * 3
    callqueue_clock.forward(minutes=31)
    run_callqueue()
    assert fresh(gone).status == Status.EXPIRED
    callqueue_clock.forward(hours=2)
    run_callqueue()
    assert sorted(repo for repo, _ in ran[3:]) == ["eta", "later", "naive"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"queue": "fast"}, "queue"),
        ({"time_limit": 3}, "time_limit"),
        ({"soft_time_limit": 3}, "soft_time_limit"),
        ({"serializer": "pickle"}, "serializer"),
        ({"countdwon": 3}, "countdwon"),
        ({"not_before": 3}, "not_before: .*eta="),  # as Celery calls it
        ({"expires_at": 3}, "expires_at: .*expires="),
        ({"args": (object(),)}, "repo"),
        ({"args": ("a", bytearray(b"x"))}, "page"),
        ({"kwargs": {"page": {"x": {1, 2}}}}, "page.x"),
        ({"args": ("a\0",)}, "repo"),
        ({"kwargs": {"page": ["\ud800"]}}, "page[0]"),
        ({"kwargs": {"page": {"__type__": "a", "__value__": 1}}}, "kwargs"),
    ],
)
def test_options_without_a_meaning_and_arguments_that_are_no_json_are_refused_by_name(
    options: dict[str, Any], field: str
) -> None:
    field, _, own_name = field.partition(": ")
    with pytest.raises(InvalidCall, match=own_name or None) as refused:
        fetch.apply_async(**{"args": ("a",), **options})
    assert refused.value.field == field
    assert not CallQueue.objects.exists()


@pytest.mark.parametrize("option", ["time_limit", "soft_time_limit", "rate_limit"])
def test_what_a_task_states_that_has_no_meaning_is_refused_when_it_is_sent(option: str) -> None:
    @shared_task(
        base=callqueue.QueuedTask, rule="github", name=f"tests.queued.{option}", **{option: 3}
    )
    def stating() -> None: ...

    with pytest.raises(InvalidCall, match=f"the task tests.queued.{option} states it"):
        stating.delay()


def test_options_that_say_how_a_message_travels_do_nothing_and_signatures_are_minded() -> None:
    policy = {"retry": True, "retry_policy": {"max_retries": 3}, "compression": "zlib"}
    fetch.apply_async(("a",), serializer="json", **policy)
    assert run_callqueue() == 1
    for arguments in ({}, {"repo": "a", "colour": "red"}):
        with pytest.raises(TypeError):
            fetch.delay(**arguments)


def test_calling_apply_and_always_eager_run_at_once_and_queue_nothing() -> None:
    assert fetch("a") == {"repo": "a", "page": 1}
    assert fetch.apply(("b",)).get() == {"repo": "b", "page": 1}
    current_app.conf.task_always_eager = True
    try:
        assert fetch.delay("a").get() == {"repo": "a", "page": 1}
        assert keyed.apply_async((1,), rule="github", key="k", countdown=60).successful()
        assert chain(add.s(1, 2), add.s(3)).apply_async().get() == 6
        with pytest.raises(InvalidCall, match="queue"):
            fetch.apply_async(("a",), queue="fast")
    finally:
        current_app.conf.task_always_eager = False
    assert not CallQueue.objects.exists()


# --- Failing and retrying


def test_an_exception_is_a_failed_attempt_and_lands_there_with_its_traceback(
    callqueue_clock: Clock,
) -> None:
    result = broken.apply_async(link_error=errback.s())
    run_callqueue()
    call = fresh(result.call)
    assert (call.status, call.failed_count, result.state) == (Status.ERROR, 1, "RETRY")
    message = last_attempt(call).error_message
    assert message.startswith("ValueError: it broke\n")
    assert message.rstrip().endswith("ValueError: it broke")
    assert 'raise ValueError("it broke")' in message and len(message) <= 2000
    assert ran == ["broken"]
    run_callqueue(skip_waits=True)
    assert ran == ["broken"] * 3 + [("errback", result.id)], "once, after the last attempt"
    assert (fresh(call).status, result.state) == (Status.FAILED, "FAILURE")
    assert "it broke" in str(result.result)


@shared_task(name="tests.queued.plain_stubborn", bind=True)
def plain_stubborn(self: Any) -> str:
    ran.append((self.request.retries, "plain"))
    if not self.request.retries:
        raise self.retry(countdown=600)
    return "done"


def test_retry_goes_through_the_table_when_it_asked_to(
    callqueue_clock: Clock, callqueue_sent: Sent
) -> None:
    """A plain task's that a call names, too."""
    result = stubborn.delay(1, countdown=600)
    plain_data = {"method": "celery_task", "params": {"name": plain_stubborn.name}}
    calls = [result.call, CallQueue.objects.send(plain_data, rule="github")]
    run_callqueue()
    for call in calls:
        assert (fresh(call).status, fresh(call).failed_count) == (Status.ERROR, 1)
    assert "not yet" in fresh(result.call).error_message
    callqueue_clock.forward(minutes=9)
    assert run_callqueue() == 0
    callqueue_clock.forward(minutes=2)
    assert run_callqueue() == 2
    assert ran == [(0, result.id), (0, "plain"), (1, result.id), (1, "plain")]
    assert {fresh(call).status for call in calls} == {Status.DONE}
    assert len(callqueue_sent) == 2


def test_retry_without_a_time_waits_as_the_rule_says_and_not_with_other_arguments(
    callqueue_clock: Clock,
) -> None:
    result, refused = stubborn.delay(1), stubborn.apply_async((1,), {"args": (0,)})
    run_callqueue()
    wait = fresh(result.call).due_at_dt - callqueue_clock.now()
    assert timedelta(seconds=50) < wait <= timedelta(seconds=60)
    assert fresh(refused.call).status == Status.FAILED
    assert "retry(args=...) is not offered" in fresh(refused.call).error_message


def test_past_max_retries_the_call_has_failed_and_autoretry_is_a_retry(
    callqueue_clock: Clock, settings: Any
) -> None:
    settings.CALLQUEUE = {"RULES": {"github": Rule(retry=Retry(max_attempts=50, base=1.0))}}
    tried_in_vain = stubborn.delay(9, countdown=1)
    run_callqueue(skip_waits=True)
    assert [retries for retries, _ in ran] == [0, 1, 2]
    assert fresh(tried_in_vain.call).status == Status.FAILED
    ran.clear()
    result = auto.delay()
    run_callqueue()
    assert fresh(result.call).status == Status.ERROR
    wait = fresh(result.call).due_at_dt - callqueue_clock.now()
    assert timedelta(seconds=20) < wait <= timedelta(seconds=30)
    run_callqueue(skip_waits=True)
    assert (ran, result.result) == (["auto", "auto"], "second")


def test_a_result_that_is_no_json_is_kept_as_text_and_ignoring_is_success() -> None:
    odd, ignored = returns.delay("odd"), returns.delay("ignore")
    run_callqueue()
    assert "datetime" in last_attempt(odd.call).response_body
    assert fresh(odd.call).status == fresh(ignored.call).status == Status.DONE


# --- Callbacks, chains, groups, chords


def test_link_is_sent_with_the_result_once_the_task_has_succeeded() -> None:
    fetch.apply_async(("a",), link=plain.s("more"))
    fetch.apply_async(("b",), link=[add.si(1, 2), plain.s()])
    run_callqueue()
    assert ("plain", {"repo": "a", "page": 1}, "more") in ran
    assert (1, 2) in ran
    assert ("plain", {"repo": "b", "page": 1}, None) in ran


def test_a_chain_goes_on_when_the_queued_task_has_succeeded_and_ends_where_one_has_failed(
    callqueue_clock: Clock, callqueue_sent: Sent
) -> None:
    result = chain(add.s(1, 2), add.s(3), plain.s("end")).apply_async()
    assert len(callqueue_sent) == 1
    run_callqueue()
    assert ran == [(1, 2), (3, 3), ("plain", 6, "end")]
    assert [result.parent.parent.id, result.parent.id] == ids_of(callqueue_sent)
    ran.clear()
    chain(broken.si(), add.si(1, 2)).apply_async(link_error=errback.s())
    run_callqueue(skip_waits=True)
    assert ran[:3] == ["broken"] * 3 and (1, 2) not in ran
    assert len(callqueue_sent) == 3


def ids_of(sent: Sent) -> list[str]:
    return [call.call_data["params"]["headers"]["id"] for call in sent]


def test_a_group_is_as_many_calls_and_a_chord_needs_a_result_backend(callqueue_sent: Sent) -> None:
    result = group(add.s(n, n) for n in range(3)).apply_async()
    assert len(callqueue_sent) == 3
    run_callqueue()
    assert sorted(ran) == [(0, 0), (1, 1), (2, 2)]
    assert [child.id for child in result.children] == ids_of(callqueue_sent)
    with pytest.raises(NotImplementedError):
        chord([add.s(1, 1), add.s(2, 2)])(total.s())


@pytest.mark.usefixtures("results")
def test_a_chord_goes_on_when_all_of_its_calls_are_done() -> None:
    result = chord([add.s(1, 1), add.s(2, 2)])(total.s())
    run_callqueue()
    assert sorted(ran, key=str) == [(1, 1), (2, 2), [2, 4]]
    assert result.get(timeout=1) == 6


# --- As Celery's users know them


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.known.outcome")
def outcome(what: str) -> Any:
    return {
        "hold": HoldUntil(60, "wait"),
        "give up": GiveUp("no use"),
        "later": RetryLater("not yet", after=60),
        "done": Succeeded({"n": 1}),
    }[what]


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.known.request", bind=True)
def request_of(self: Any) -> dict[str, Any]:
    names = ("id", "is_eager", "hostname", "eta", "expires", "correlation_id", "argsrepr", "lang",
             "origin", "headers", "delivery_info", "properties", "traceparent")  # fmt: skip
    return {name: self.request.get(name) for name in names}


ERRORS = {"exit": SystemExit(3), "generator": GeneratorExit(), "error": ValueError("it broke")}


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.known.exits", bind=True)
def exits(self: Any, kind: str) -> None:
    raise ERRORS[kind]


@shared_task(base=callqueue.QueuedTask, rule="soon", name="tests.known.silent", bind=True)
def retries_in_silence(self: Any) -> str:
    ran.append(self.request.retries)
    if self.request.retries < 2:
        self.retry(throw=False, countdown=0)
    if self.request.is_eager:
        ran.append("what it sends now is not sent")
    return "done"


# --- Outcomes, with a result backend


@pytest.mark.usefixtures("results")
def test_an_outcome_is_the_calls_and_the_tasks_end(callqueue_clock: Clock) -> None:
    given_up = outcome.apply_async(("give up",), link_error=queued_errback.s())
    later = outcome.delay("later")
    run_callqueue()
    assert fresh(given_up.call).error_message == "no use"
    with pytest.raises(TaskGaveUp, match="no use"):
        current_app.AsyncResult(given_up.id).get(timeout=1)
    assert ran == [("errback", given_up.id)]
    assert current_app.AsyncResult(later.id).state == "RETRY"
    run_callqueue(skip_waits=True)
    assert fresh(later.call).status == fresh(given_up.call).status == Status.FAILED
    with pytest.raises(TaskGaveUp, match="not yet"):
        later.get(timeout=1)
    held = outcome.delay("hold")
    run_callqueue()
    assert (fresh(held.call).status, Hold.objects.count()) == (Status.ERROR, 1)
    assert current_app.AsyncResult(held.id).state == "RETRY"


@pytest.mark.usefixtures("results")
def test_succeeded_is_its_result_and_what_no_call_asked_for_is_the_outcome_itself() -> None:
    result = chain(outcome.si("done"), identity.s()).apply_async()
    run_callqueue()
    assert result.get(timeout=1) == result.parent.get(timeout=1) == {"n": 1}
    assert outcome("give up") == GiveUp("no use")
    assert outcome.apply(("hold",)).get() == HoldUntil(60, "wait")


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.known.calls_itself")
def calls_itself(depth: int) -> Any:
    return calls_itself(depth - 1) == GiveUp("no use") if depth else GiveUp("no use")


def test_what_a_task_calls_itself_is_no_run_of_its_call() -> None:
    result = calls_itself.delay(1)
    run_callqueue()
    assert (result.state, result.result) == ("SUCCESS", True)


@pytest.mark.parametrize("way", ["__call__", "run"])
def test_a_call_of_the_tasks_own_changes_nothing(way: str) -> None:
    class Own(callqueue.QueuedTask):
        abstract = True

        def __call__(self, *args: Any) -> Any:
            ran.append("own")
            return super().__call__(*args) if way == "__call__" else self.run(*args)

    @shared_task(base=Own, rule="r", name=f"tests.known.own_{way}")
    def own() -> Any:
        return GiveUp("no use")

    call = own.delay().call
    run_callqueue()
    assert (fresh(call).status, fresh(call).error_message) == (Status.FAILED, "no use")
    assert (own(), ran) == (GiveUp("no use"), ["own", "own"])


@pytest.mark.parametrize("kind", ["exit", "generator", "error"])
@pytest.mark.usefixtures("results")
def test_a_task_that_exits_or_raises_has_failed_and_is_told_of_once(
    kind: str, callqueue_clock: Clock
) -> None:
    result = exits.apply_async((kind,), link_error=queued_errback.s())
    run_callqueue(skip_waits=True)
    assert (fresh(result.call).status, fresh(result.call).failed_count) == (Status.FAILED, 2)
    with pytest.raises(ValueError if kind == "error" else TaskExited) as raised:
        result.get(timeout=1)
    assert ("it broke" if kind == "error" else "Exit") in fresh(result.call).error_message
    assert kind != "error" or "it broke" in str(raised.value)
    assert ran == [("errback", result.id)]


def test_a_retry_that_is_not_raised_is_a_retry_and_what_is_released_has_not_started(
    results: Any,
) -> None:
    result = retries_in_silence.delay()
    run_callqueue()
    assert ran == [0, 1, 2]
    assert (result.state, result.result) == ("SUCCESS", "done")
    result = identity.delay(1)
    CallQueue.objects.update(status=Status.DISPATCHED)
    assert result.state == "PENDING"


@pytest.mark.usefixtures("results")
def test_a_hold_of_the_last_attempt_is_no_end_and_what_is_done_is_told_by_its_run_alone(
    rules: Rules,
) -> None:
    rules(r=Rule(retry=Retry(max_attempts=1)))
    held, done = outcome.delay("hold"), identity.delay(1)
    run_callqueue()
    assert (fresh(held.call).status, held.state) == (Status.ERROR, "RETRY")
    unknown = CallQueue.objects.filter(pk=done.call.pk)
    params = {**done.call.call_data["params"], "headers": {"id": "8"}}
    unknown.update(call_data={"method": "celery_task", "params": params})
    assert queued_result.write_ends("default", [done.call.pk, held.call.pk]) == 0


@shared_task(base=callqueue.QueuedTask, rule="r", name="tests.known.parent", bind=True)
def parent_of(self: Any, depth: int) -> None:
    ran.append((self.request.id, self.request.root_id, self.request.parent_id))
    if depth:
        parent_of.delay(depth - 1)


def test_what_a_task_sends_knows_its_parent_and_its_root() -> None:
    parent_of.delay(2)
    run_callqueue()
    first, second, third = ran
    assert [root for _, root, _ in ran[1:]] == [first[0]] * 2
    assert (second[2], third[2]) == (first[0], second[0])


# --- Ends that no run tells


@pytest.mark.django_db(transaction=True)
def test_get_of_what_was_revoked_or_is_unknown_says_so(results: Any) -> None:
    result = identity.delay(1)
    result.revoke()
    with pytest.raises(TaskRevokedError, match="revoked"):
        result.maybe_throw()
    assert result.state == "REVOKED"
    for waiting in (result, current_app.AsyncResult(result.id)):
        with pytest.raises(TaskRevokedError):
            waiting.get(timeout=1)
    lost = identity.apply_async((1,), link_error=queued_errback.s())
    CallQueue.objects.filter(pk=lost.call.pk).update(
        status=states.UNKNOWN, finished_at_dt=timezone.now(), error_message="fell silent"
    )
    assert queued_result.write_ends("default", [lost.call.pk]) == 1
    with pytest.raises(WorkerLostError, match="fell silent"):
        current_app.AsyncResult(lost.id).get(timeout=1)
    assert queued_result.write_ends("default", [lost.call.pk]) == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("column", ["", "post", "celery_task"])
@pytest.mark.parametrize("how", ["is cancelled", "expires", "fails"])
def test_the_end_of_what_other_code_has_made_a_task_is_told(
    results: Any, callqueue_clock: Clock, column: str, how: str
) -> None:
    """What is made goes by the data, whatever the column beside it says; so does who hears of it."""
    result = identity.apply_async((1,), expires=90)
    CallQueue.objects.update(method=column)
    if how == "is cancelled":
        CallQueue.objects.all().cancel()
    elif how == "expires":
        callqueue_clock.forward(minutes=2)
    else:
        params = {**result.call.call_data["params"], "name": "gone"}
        CallQueue.objects.update(call_data={"method": "celery_task", "params": params})
    run_callqueue(skip_waits=True)
    assert fresh(result.call).finished_at_dt
    assert not fresh(result.call).callback_pending
    match = {"expires": "expired", "is cancelled": "revoked", "fails": None}[how]
    with pytest.raises(TaskGaveUp if how == "fails" else TaskRevokedError, match=match):
        current_app.AsyncResult(result.id).get(timeout=1)


@pytest.mark.django_db(transaction=True)
def test_what_other_code_has_made_something_else_is_no_task_any_more(results: Any) -> None:
    result = identity.delay(1)
    data = {"method": "get", "params": {**result.call.call_data["params"], "url": "http://x/"}}
    CallQueue.objects.update(call_data=data)
    CallQueue.objects.all().cancel()
    assert not fresh(result.call).callback_pending
    assert current_app.AsyncResult(result.id).state == "PENDING"


@pytest.mark.django_db(transaction=True)
def test_a_result_backend_that_is_away_keeps_back_the_ends_of_tasks_alone(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits to hear of another call that was announced with them hears of it."""
    result = identity.delay(1)
    request = {"method": "get", "params": {"url": "http://vendor.test/"}}
    other = CallQueue.objects.send(request, callback="tests.echo")
    monkeypatch.setattr(queued_result, "write_ends", Mock(side_effect=OSError("no route to host")))
    CallQueue.objects.all().cancel()
    assert fresh(result.call).callback_pending
    assert not fresh(other).callback_pending


@pytest.mark.django_db(transaction=True)
def test_a_chord_fails_when_a_part_is_revoked(results: Any) -> None:
    result = chord([identity.s(1), identity.s(2)])(total.s())
    CallQueue.objects.order_by("pk")[0].cancel()
    run_callqueue()
    assert result.state == "FAILURE"
    with pytest.raises((ChordError, TaskRevokedError)):
        result.get(timeout=1)


@pytest.mark.usefixtures("results")
def test_the_end_of_a_task_with_a_secret_is_told() -> None:
    result = identity.delay({"key": Secret("KEY"), "at": datetime(2026, 1, 2, tzinfo=UTC)})
    current_app.conf.result_extended = True
    try:
        CallQueue.objects.update(status=Status.CANCELLED)
        assert queued_result.write_ends("default", [result.call.pk]) == 1
    finally:
        current_app.conf.result_extended = False
    with pytest.raises(TaskRevokedError):
        current_app.AsyncResult(result.id).get(timeout=1)


@pytest.mark.usefixtures("results")
def test_a_message_that_cannot_be_read_keeps_no_other_end_back() -> None:
    """Nor one of a task that this worker does not have."""
    args = [{"__type__": "unheard of", "__value__": 1}]
    bad = {"name": identity.name, "args": args, "headers": {"id": "7"}}
    calls = [CallQueue.objects.send({"method": "celery_task", "params": bad}, rule="r")]
    calls += [identity.delay(1).call, identity.delay(2).call]
    params = {**calls[-1].call_data["params"], "name": "gone"}
    gone = CallQueue.objects.filter(pk=calls[-1].pk)
    gone.update(call_data={"method": "celery_task", "params": params})
    CallQueue.objects.update(status=Status.CANCELLED)
    assert queued_result.write_ends("default", [call.pk for call in calls]) == 2


@pytest.mark.django_db(transaction=True)
def test_without_a_result_backend_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("callqueue.broker.send_beside", lambda *args, **how: told.append(args))
    result = identity.delay(1)
    result.revoke()
    assert (told, fresh(result.call).callback_pending) == ([], False)


@pytest.mark.usefixtures("results")
def test_an_ignored_result_is_none_at_once_though_the_row_has_one() -> None:
    result = identity.apply_async((1,), ignore_result=True)
    assert (result.ignored, result.get()) == (True, None)
    run_callqueue()
    assert (result.get(), result.result) == (None, None)
    assert result.call.attempts.get().response_body == "1"


def test_get_with_the_rpc_backend_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    result = identity.delay(1)
    monkeypatch.setattr(result, "backend", RPCBackend.__new__(RPCBackend))
    with pytest.raises(NotImplementedError, match="rpc"):
        result.get(timeout=1)


# --- Canvas and options


@pytest.mark.usefixtures("results")
def test_errbacks_of_a_group_run() -> None:
    jobs = group(outcome.si("give up"), outcome.si("give up"))
    jobs.link_error(queued_errback.s())
    result = jobs.apply_async()
    run_callqueue()
    assert sorted(ran) == sorted(("errback", child.id) for child in result.children)
    with pytest.raises(TaskGaveUp):
        result.get(timeout=1)


def test_an_instant_in_a_chain_is_kept(callqueue_clock: Clock) -> None:
    later = callqueue_clock.now() + timedelta(hours=1)
    chain(identity.s(1), identity.s().set(eta=later)).apply_async()
    run_callqueue()
    assert ran == [1]
    assert CallQueue.objects.new().get().due_at_dt == later
    callqueue_clock.forward(hours=2)
    run_callqueue()
    assert ran == [1, 1]


VALUES = [
    b"\xff\x00", b"text", datetime(2026, 1, 2, 3, tzinfo=UTC), date(2026, 1, 2), time(3, 4),
    Decimal("1.10"), uuid.UUID(int=7), {"deep": [Decimal(1), {"x": b"y"}]}, gettext_lazy("Yes"),
]  # fmt: skip
LOOKS = {"__type__": "decimal", "__value__": "1"}


def test_the_values_that_celerys_messages_carry_are_arguments() -> None:
    identity.apply_async((VALUES,), link=identity.si({"again": VALUES}))
    identity.apply_async(kwargs={"value": [VALUES, Secret("KEY")]})
    assert "s3cret" not in str(CallQueue.objects.order_by("-pk")[0].call_data)
    run_callqueue()
    assert sorted(ran, key=str) == sorted([VALUES, [VALUES, "s3cret"], {"again": VALUES}], key=str)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("send", "why"),
    [
        (lambda: identity.delay({"a": [LOOKS]}), "__type__"),
        (lambda: identity.apply_async((1,), link=identity.s(LOOKS)), "__type__"),
        (lambda: identity.delay(nested(900)), "nested"),
        (lambda: chain(identity.s(1), identity.s(Secret("KEY"))).apply_async(), "Secret"),
        (lambda: identity.apply_async((1,), link_error=queued_errback.s(Secret("KEY"))), "Secret"),
        (lambda: identity.apply_async((1,), headers={"key": Secret("KEY")}), "Secret"),
        (lambda: identity.map([1]), "group"),
        (lambda: identity.starmap([(1,)]), "group"),
        (lambda: identity.chunks([(1,)], 1), "group"),
    ],
)
def test_what_would_not_be_the_same_in_a_message_is_refused(
    send: Callable[[], Any], why: str
) -> None:
    with pytest.raises(InvalidCall, match=why):
        send()
    assert not CallQueue.objects.exists()


def test_data_that_looks_like_something_else_is_data() -> None:
    named = {"$secret": "KEY"}
    by_hand = {"name": identity.name, "args": [[LOOKS, named]]}
    call = CallQueue.objects.send({"method": "celery_task", "params": by_hand}, rule="r")
    chain(identity.si(named), identity.si([named])).apply_async()
    run_callqueue()
    assert (fresh(call).status, ran) == (Status.DONE, [[LOOKS, named], named, [named]])


# --- Signals and the request


def test_what_receivers_put_into_the_headers_reaches_the_request() -> None:
    told: list[Any] = []

    def before(sender: str, headers: Any, body: Any, properties: Any, **_: Any) -> None:
        told.append((sender, headers["id"], headers["task"], body[0]))
        headers["traceparent"] = "00-abc"
        properties["app_id"] = "shop"

    def after(sender: str, headers: dict[str, Any], **_: Any) -> None:
        told.append((sender, CallQueue.objects.count()))

    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        result = request_of.apply_async(headers={"mine": 1})
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    name = request_of.name
    assert told == [(name, result.id, name, ()), (name, 1)]
    run_callqueue()
    assert result.result["traceparent"] == "00-abc"
    assert result.result["headers"] == {"mine": 1, "traceparent": "00-abc"}
    assert result.result["properties"]["app_id"] == "shop"


def test_the_request_has_celerys_fields(callqueue_clock: Clock) -> None:
    eta = callqueue_clock.now() + timedelta(seconds=5)
    given = {"argsrepr": "(a card)", "kwargsrepr": "{...}"}  # what stands for the arguments in logs
    result = request_of.apply_async(
        eta=eta, expires=600, priority=3, app_id="shop", throw=True, **given
    )
    without = request_of.delay().call.call_data["params"]["headers"]
    assert given.items() <= result.call.call_data["params"]["headers"].items()
    assert not given.keys() & without.keys()
    callqueue_clock.forward(10)
    run_callqueue()
    told = result.result
    assert told["is_eager"] is False
    assert (told["id"], told["correlation_id"], told["lang"]) == (result.id, result.id, "py")
    assert datetime.fromisoformat(told["eta"]) == eta
    assert datetime.fromisoformat(told["expires"]) == result.call.expires_at_dt
    assert (told["argsrepr"], told["delivery_info"]["priority"]) == ("(a card)", 3)
    assert told["properties"]["app_id"] == "shop"


def test_what_the_sender_does_not_state_is_as_the_decorator_says() -> None:
    @shared_task(base=callqueue.QueuedTask, rule="r", name="tests.known.urgent", priority=7)
    def urgent(value: Any) -> Any:
        return value

    class Urgent(callqueue.QueuedTask):
        abstract = True
        priority = 6

    @shared_task(base=Urgent, rule="r", name="tests.known.by_its_base")
    def by_its_base(value: Any) -> Any:
        return value

    @shared_task(base=Urgent, rule="r", name="tests.known.less", priority=2)
    def less(value: Any) -> None:
        pass

    chain(identity.s(1), urgent.s(), by_its_base.s(), less.s()).apply_async()
    run_callqueue()
    assert list(CallQueue.objects.order_by("pk").values_list("priority", flat=True)) == [0, 7, 6, 2]
