"""QueuedTask: Celery tasks that run when their limits admit them, and behave as Celery's do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, chord, current_app, group, shared_task
from celery.exceptions import Ignore
from django.utils import timezone

import callqueue
from callqueue import Retry, Rule, SlidingWindow
from callqueue.exceptions import InvalidCall
from callqueue.models import CallAttempt, CallQueue
from callqueue.testing import Clock, Sent, run_callqueue

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
def github(rules: Rules) -> Iterator[None]:
    ran.clear()
    by_key = Rule(limits=[SlidingWindow("100/m", unit="tokens"), SlidingWindow("1/m", per="key")])
    rules(github=Rule(retry=Retry(base=60.0, jitter=False)), keyed=by_key)
    yield
    ran.clear()


def fresh(call: CallQueue | None) -> CallQueue:
    assert call is not None
    return CallQueue.objects.get(pk=call.pk)


def last_attempt(call: CallQueue | None) -> CallAttempt:
    return fresh(call).attempts.order_by("-number")[0]


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
    assert abs(later.due_at_dt - now - timedelta(hours=1)) < timedelta(minutes=1)
    assert eta.due_at_dt == naive.due_at_dt == now + timedelta(hours=2)
    assert abs(gone.expires_at_dt - now - timedelta(minutes=30)) < timedelta(minutes=1)
    run_callqueue()
    assert ran == []
    callqueue_clock.forward(minutes=31)
    run_callqueue()
    assert fresh(gone).status == Status.EXPIRED
    callqueue_clock.forward(hours=2)
    run_callqueue()
    assert sorted(repo for repo, _ in ran) == ["eta", "later", "naive"]


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
