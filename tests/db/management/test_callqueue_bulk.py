"""callqueue_requeue, callqueue_cancel, callqueue_pause, callqueue_resume: what operators do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Rule, SlidingWindow, database, states
from callqueue.models import CallAttempt, CallQueue, Hold
from callqueue.operations import bulk
from tests.db.commands import run
from tests.support.behaviour import release, send

Rules = Callable[..., None]
Status = CallQueue.Status


@pytest.fixture(autouse=True)
def two_rules(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("100/s", per="key")]), other=Rule())


def ended(status: int, hours_ago: float = 0.1, rule: str = "r", **options: Any) -> CallQueue:
    call = send(rule, **options)
    finished = timezone.now() - timedelta(hours=hours_ago)
    CallQueue.objects.filter(pk=call.pk).update(
        status=status, finished_at_dt=finished, ready=False, active_key=None
    )
    return call


def failing(hours_ago: float, outcome: str = states.ERRORED) -> CallQueue:
    """A call that will be retried, and whose last attempt ended so long ago."""
    call = send("r")
    CallQueue.objects.filter(pk=call.pk).update(
        status=states.ERROR, ready=False, due_at_dt=timezone.now() + timedelta(days=1)
    )
    at = timezone.now() - timedelta(hours=hours_ago)
    CallAttempt.objects.create(
        call=call, number=1, rule="r", released_at=at, finished_at=at, outcome=outcome
    )
    return call


def statuses(*calls: CallQueue) -> list[int]:
    found = CallQueue.objects.in_bulk([call.pk for call in calls])
    return [found[call.pk].status for call in calls]


def test_requeue_takes_the_failed_ones_unless_told_which() -> None:
    calls = ended(Status.FAILED), ended(Status.UNKNOWN), ended(Status.CANCELLED), ended(Status.DONE)
    ran = run("requeue")
    assert (ran.code, ran.out) == (0, "requeued 1 calls\n")
    assert statuses(*calls) == [Status.NEW, Status.UNKNOWN, Status.CANCELLED, Status.DONE]


def test_requeue_takes_several_statuses() -> None:
    calls = ended(Status.FAILED), ended(Status.UNKNOWN), ended(Status.EXPIRED), failing(1)
    assert (
        run("requeue", "--status", "failed", "unknown", "--status", "error").out
        == "requeued 3 calls\n"
    )
    assert statuses(*calls) == [Status.NEW, Status.NEW, Status.EXPIRED, Status.NEW]


def test_done_calls_are_made_again_only_where_that_is_said() -> None:
    call = ended(Status.DONE)
    refused = run("requeue", "--status", "done")
    assert refused.code == 2
    assert "--again" in refused.error
    assert statuses(call) == [Status.DONE]
    assert run("requeue", "--status", "done", "--again").out == "requeued 1 calls\n"


def test_only_one_rule_and_one_key() -> None:
    calls = (
        ended(Status.FAILED, key="a"),
        ended(Status.FAILED, key="b"),
        ended(Status.FAILED, rule="other", key="a"),
    )
    run("requeue", "--rule", "r", "--key", "a")
    assert statuses(*calls) == [Status.NEW, Status.FAILED, Status.FAILED]


def test_a_key_of_several_names_is_json() -> None:
    call = ended(Status.FAILED, rule="other", key={"workspace": "T1", "channel": "C9"})
    assert (
        run("requeue", "--key", '{"workspace": "T1", "channel": "C9"}').out == "requeued 1 calls\n"
    )
    assert statuses(call) == [Status.NEW]
    assert run("requeue", "--key", "{nonsense").code == 2


def test_since_counts_from_the_end_and_for_an_error_from_its_last_failure() -> None:
    calls = (
        ended(Status.FAILED, 1),
        ended(Status.FAILED, 3),
        failing(1),
        failing(3),
        failing(1, states.VOIDED),
    )
    ran = run("requeue", "--status", "failed", "error", "--since", "2h")
    assert ran.out == "requeued 2 calls\n"
    assert statuses(*calls) == [Status.NEW, Status.FAILED, Status.NEW, Status.ERROR, Status.ERROR]


def test_a_dry_run_counts_and_changes_nothing() -> None:
    call = ended(Status.FAILED)
    assert run("requeue", "--dry-run").out == "would requeue 1 calls; nothing was changed\n"
    assert statuses(call) == [Status.FAILED]
    waiting = send("r")
    assert run("cancel", "--dry-run").out == "would cancel 1 calls; nothing was changed\n"
    assert statuses(waiting) == [Status.NEW]


def test_cancel_takes_what_no_worker_has_begun() -> None:
    begun, released = send("r"), send("r")
    release()
    CallAttempt.objects.filter(call=begun).update(started_at=timezone.now())
    waiting, failing_one, done = send("r"), failing(1), ended(Status.DONE)
    ran = run("cancel")
    assert ran.out == "cancelled 3 calls\n"
    assert statuses(begun, released, waiting, failing_one, done) == [
        Status.DISPATCHED,
        Status.CANCELLED,
        Status.CANCELLED,
        Status.CANCELLED,
        Status.DONE,
    ]


def test_cancel_by_age_counts_what_never_ended_from_its_creation() -> None:
    old, young = send("r"), send("r")
    CallQueue.objects.filter(pk=old.pk).update(created_dt=timezone.now() - timedelta(hours=5))
    run("cancel", "--since", "2h")
    assert statuses(old, young) == [Status.NEW, Status.CANCELLED]


def test_many_calls_go_in_batches_with_word_of_how_far_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk, "BATCH", 3)
    for _ in range(7):
        ended(Status.FAILED)
    told: list[tuple[int, int | None]] = []
    pick = bulk.Pick((Status.FAILED,))
    assert (
        bulk.requeue("default", pick, progress=lambda done, total: told.append((done, total))) == 7
    )
    assert told == [(3, 7), (6, 7), (7, 7)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("requeue", "--status", "faild"), "did you mean 'failed'"),
        (("requeue", "--status", "new"), "'new' is none that this acts on"),
        (("cancel", "--status", "done"), "'done' is none that this acts on"),
        (("requeue", "--rule", "othr"), "did you mean 'other'"),
        (("requeue", "--since", "2 hours"), "not a duration"),
        (("requeue", "--database", "nowhere"), "no 'nowhere' in DATABASES"),
        (("pause", "othr"), "did you mean 'other'"),
        (("pause", "r", "--for", "soon"), "not a duration"),
        (("resume", "othr"), "did you mean 'other'"),
    ],
)
def test_wrong_use_is_2_and_says_why(arguments: tuple[str, ...], why: str) -> None:
    ran = run(*arguments)
    assert ran.code == 2
    assert why in ran.error


def test_a_paused_rule_releases_nothing_until_it_is_resumed() -> None:
    call = send("r")
    assert run("pause", "r", "--reason", "they asked us to").out == "paused r until it is resumed\n"
    hold = Hold.objects.get()
    assert (hold.rule, hold.per, hold.until, hold.reason) == ("r", "rule", None, "they asked us to")
    assert release() == []
    assert run("resume", "r").out == "resumed r: 1 holds ended\n"
    assert release() == [call]


def test_a_pause_ends_by_itself() -> None:
    assert run("pause", "r", "--for", "10m").out == "paused r for 10m\n"
    left = Hold.objects.get().until - database.clock("default")
    assert timedelta(minutes=9) < left <= timedelta(minutes=10)


def test_one_key_is_paused_and_the_others_go_on() -> None:
    held, free = send("r", key="a"), send("r", key="b")
    assert run("pause", "r", "--key", "a").out == "paused r, key a until it is resumed\n"
    assert release() == [free]
    assert run("resume", "r", "--key", "b").out == "r, key b was not held\n"
    assert run("resume", "r", "--key", "a").code == 0
    assert release() == [held]


def test_resuming_a_rule_ends_the_holds_on_its_keys_too() -> None:
    call = send("r", key="a")
    run("pause", "r", "--key", "a")
    run("resume", "r")
    assert release() == [call]
