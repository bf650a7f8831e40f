"""The commands that are short: what each does and says, and what is wrong use of any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django_celery_beat.models import PeriodicTask

from callqueue import Concurrency, Rule, SlidingWindow, control
from callqueue.models import CallQueue
from tests.db.commands import run
from tests.support.behaviour import send
from tests.support.history import ended, failing, paced, statuses

Rules = Callable[..., None]
Status = CallQueue.Status


@pytest.fixture(autouse=True)
def two_rules(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s", per="key")]), other=Rule())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("requeue --status faild", "did you mean 'failed'"),
        ("requeue --status new", "'new' is not possible here; choose from"),
        ("cancel --status done", "'done' is not possible here; choose from"),
        ("cancel", "--all"),
        ("cancel --all --rule r", "cannot go together"),
        ("requeue --rule othr", "did you mean 'other'"),
        ("requeue --since 2hours", "not a duration"),
        ("requeue --key {nonsense", "not JSON"),
        ("requeue --database nowhere", "no 'nowhere' in DATABASES"),
        ("pause othr", "did you mean 'other'"),
        ("pause r --for soon", "not a duration"),
        ("resume othr", "did you mean 'other'"),
        ("schedule --interval 0", "0.05 to 86400"),
        ("schedule --interval -1", "0.05 to 86400"),
        ("schedule --interval nan", "0.05 to 86400"),
        ("audit --since yesterday", "not a duration"),
        ("status --json --watch", "cannot go together"),
        ("status --call 99999999", "no call"),
        ("cleanup --older-than 7", "not a duration"),
        ("cleanup --older-than -1d", "--older-than"),
        ("cleanup --batch-size 0", "at least 1"),
        ("simulate --rule x --calls 1", "'x'"),
        ("simulate --rule r --calls -1", "--calls is from 0"),
        ("simulate --rule r --calls 1 --latency -1", "--latency"),
        ("simulate --rule r --calls 1 --latency nan", "--latency"),
        ("simulate --rule r --calls 1 --keys 0", "--keys"),
        ("simulate --rule r --calls 1 --cost 21", "never be admitted"),
        ("simulate --rule r --calls 1 --cost many", "neither a whole number"),
        ("simulate --rule r --calls 1 --cost tokens=1", "no limit of the rule counts"),
    ],
)
def test_wrong_use_is_2_and_says_why(line: str, why: str) -> None:
    ran = run(*line.split())
    assert ran.code == 2
    assert why in ran.error


# --- requeue and cancel


def test_requeue_takes_the_failed_ones_unless_told_which() -> None:
    calls = ended(Status.FAILED), ended(Status.UNKNOWN), ended(Status.CANCELLED), ended(Status.DONE)
    ran = run("requeue")
    assert (ran.code, ran.out) == (0, "requeued 1 call\n")
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
    assert run("requeue", "--status", "done", "--again").out == "requeued 1 call\n"


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
        run("requeue", "--key", '{"workspace": "T1", "channel": "C9"}').out == "requeued 1 call\n"
    )
    assert statuses(call) == [Status.NEW]


def test_a_dry_run_counts_and_changes_nothing() -> None:
    call = ended(Status.FAILED)
    assert run("requeue", "--dry-run").out == "would requeue 1 call; nothing was changed\n"
    assert statuses(call) == [Status.FAILED]
    waiting = send("r")
    assert run("cancel", "--dry-run").out == "would cancel 1 call; nothing was changed\n"
    assert statuses(waiting) == [Status.NEW]


# --- schedule

TASKS = ["callqueue.cleanup_call_queue", "callqueue.dispenser", "callqueue.recover_lost_calls"]


def ours() -> list[PeriodicTask]:
    return list(PeriodicTask.objects.filter(task__startswith="callqueue.").order_by("task"))


def test_the_tasks_are_written_as_beat_wants_them() -> None:
    ran = run("schedule")
    assert ran.code == 0
    cleanup, dispenser, recovery = ours()
    assert [cleanup.task, dispenser.task, recovery.task] == TASKS
    assert (dispenser.interval.every, dispenser.interval.period, dispenser.expire_seconds) == (
        1,
        "seconds",
        1,
    )
    assert recovery.interval.every == 30
    assert (cleanup.crontab.minute, cleanup.crontab.hour, cleanup.interval) == ("17", "3", None)
    assert dispenser.schedule.run_every.total_seconds() == 1.0


def test_writing_them_again_changes_nothing() -> None:
    run("schedule")
    before = [(row.pk, row.date_changed) for row in ours()]
    ran = run("schedule")
    assert ran.out.count("unchanged") == 3
    assert [(row.pk, row.date_changed) for row in ours()] == before


def test_another_interval_and_queue_are_corrected_in_place() -> None:
    assert run("schedule").out.count(": created") == 3
    before = [row.pk for row in ours()]
    ran = run("schedule", "--interval", "0.5")
    assert (ran.out.count(": changed"), ran.out.count(": unchanged")) == (1, 2)
    run("schedule", "--interval", "0.5", "--queue", "care")
    rows = ours()
    assert [row.pk for row in rows] == before
    assert {row.queue for row in rows} == {"care"}
    assert rows[1].schedule.run_every.total_seconds() == 0.5


def test_a_task_that_somebody_disabled_stays_disabled() -> None:
    run("schedule")
    PeriodicTask.objects.filter(task="callqueue.dispenser").update(enabled=False)
    run("schedule", "--interval", "2")
    assert not PeriodicTask.objects.get(task="callqueue.dispenser").enabled


def test_they_can_be_removed() -> None:
    run("schedule")
    assert run("schedule", "--remove").out == "removed 3 periodic tasks\n"
    assert ours() == []


def test_without_django_celery_beat_it_says_what_to_do(settings: Any) -> None:
    settings.INSTALLED_APPS = [
        app for app in settings.INSTALLED_APPS if app != "django_celery_beat"
    ]
    ran = run("schedule")
    assert ran.code == 1
    assert "django-celery-beat is not installed" in ran.error


# --- simulate and audit


def test_a_simulation_says_what_draining_takes(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s", name="vendor"), Concurrency(50)]))
    ran = run("simulate", "--rule", "r", "--calls", "200", "--json")
    assert ran.code == 0
    document = ran.document
    assert (document["rule"], document["calls"], document["binding_limit"]) == ("r", 200, "vendor")
    assert document["seconds"] == pytest.approx(9.65, abs=0.1)
    assert "the limit that binds is vendor" in run("simulate", "--rule", "r", "--calls", "200").out


def test_a_simulation_knows_changed_limits_keys_and_costs(rules: Rules) -> None:
    rules(
        r=Rule(
            limits=[
                SlidingWindow("20/s", name="vendor"),
                SlidingWindow("100/m", unit="tokens", per="key"),
            ]
        )
    )
    control.change_limit("default", "r", "vendor", "40/s")
    assert run("simulate", "--rule", "r", "--calls", "200", "--json").document["seconds"] < 5
    slow = run(
        "simulate", "--rule", "r", "--calls", "20", "--cost", "tokens=50", "--keys", "5", "--json"
    ).document
    assert slow["seconds"] == pytest.approx(60.05 + 0.2, abs=0.2)


def test_no_calls_take_no_time(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s"), Concurrency(50)]))
    ran = run("simulate", "--rule", "r", "--calls", "0", "--json")
    assert ran.code == 0
    assert ran.document == {"rule": "r", "calls": 0, "seconds": 0.0, "binding_limit": None}


def test_people_get_a_table(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s")]))
    paced(5, 0.1)
    ran = run("audit")
    assert "5 attempts since" in ran.out
    assert "SlidingWindow 20/s" in ran.out
