"""The commands that are short: what each does and says, and what is wrong use of any."""

from __future__ import annotations

import json
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
        *((f"dispenser --for {seconds}", "") for seconds in ("-1", "nan", "soon")),
        ("dispenser --once --rule othr", "did you mean 'other'"),
        ("dispenser --onec", ""),
        ("run --rule othr", "did you mean 'other'"),
        ("run --for -1", ""),
        ("requeue --status done", "--again"),
        ("requeue --status faild", "did you mean 'failed'"),
        ("requeue --status new", "'new' is not possible here; choose from"),
        ("cancel --status done", "'done' is not possible here; choose from"),
        ("cancel", "--all"),
        ("cancel --all --rule r", "cannot go together"),
        ("requeue --rule othr", "did you mean 'other'"),
        ("requeue --since 2hours", "not a duration"),
        ("requeue --key {nonsense", "not JSON"),
        ("pause r --key=", "--key: is empty"),
        ("requeue --database nowhere", "no 'nowhere' in DATABASES"),
        ("pause othr", "did you mean 'other'"),
        ("pause r --for soon", "not a duration"),
        ("resume othr", "did you mean 'other'"),
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


JSON_KEY = {"workspace": "T1", "channel": "C9"}
# what is asked for, what is said, and of which of the calls below the status is NEW after it
PICKED = {
    "requeue": ("requeued 4 calls", {"a", "b", "others", "keyed"}),
    "requeue --status failed unknown --status error": (
        "requeued 6 calls", {"a", "b", "others", "keyed", "unknown", "failing"},
    ),
    "requeue --status done --again": ("requeued 1 call", {"done"}),
    "requeue --rule r --key a": ("requeued 1 call", {"a"}),
    f"requeue --key {json.dumps(JSON_KEY, separators=(',', ':'))}": ("requeued 1 call", {"keyed"}),
    "requeue --dry-run": ("would requeue 4 calls; nothing was changed", set()),
    "cancel --dry-run": ("would cancel 2 calls; nothing was changed", set()),
}  # fmt: skip


@pytest.mark.parametrize("line", PICKED)
def test_the_calls_that_options_pick_are_acted_on_and_no_others(line: str) -> None:
    calls = {
        "a": ended(Status.FAILED, key="a"),
        "b": ended(Status.FAILED, key="b"),
        "others": ended(Status.FAILED, rule="other", key="a"),
        "keyed": ended(Status.FAILED, rule="other", key=JSON_KEY),
        "unknown": ended(Status.UNKNOWN),
        "cancelled": ended(Status.CANCELLED),
        "done": ended(Status.DONE),
        "failing": failing(1),
    }
    waiting, said = send("r"), PICKED[line][0]
    ran = run(*line.split())
    assert (ran.code, ran.out) == (0, f"{said}\n")
    now = dict(zip(calls, statuses(*calls.values()), strict=True))
    assert {name for name, status in now.items() if status == Status.NEW} == PICKED[line][1]
    assert statuses(waiting) == [Status.NEW]


# --- schedule

TASKS = ["callqueue.cleanup_call_queue", "callqueue.dispenser", "callqueue.recover_lost_calls"]


def ours() -> list[PeriodicTask]:
    return list(PeriodicTask.objects.filter(task__startswith="callqueue.").order_by("task"))


def test_tasks_are_written_as_beat_wants_them_and_again_corrected_in_place(settings: Any) -> None:
    """Nor is a task that somebody disabled enabled."""
    ran = run("schedule")
    assert (ran.code, ran.out.count(": created")) == (0, 3)
    cleanup, dispenser, recovery = ours()
    assert [cleanup.task, dispenser.task, recovery.task] == TASKS
    every = dispenser.interval
    assert (every.every, every.period, dispenser.expire_seconds) == (1, "seconds", 1)
    assert recovery.interval.every == 30
    assert (cleanup.crontab.minute, cleanup.crontab.hour, cleanup.interval) == ("17", "3", None)
    assert dispenser.schedule.run_every.total_seconds() == 1.0
    PeriodicTask.objects.filter(task="callqueue.dispenser").update(enabled=False)
    before = [(row.pk, row.date_changed) for row in ours()]
    assert run("schedule").out.count(": unchanged") == 3
    assert [(row.pk, row.date_changed) for row in ours()] == before
    settings.CALLQUEUE = {"DISPENSER": {"INTERVAL": 0.5}}
    ran = run("schedule")
    assert (ran.out.count(": changed"), ran.out.count(": unchanged")) == (1, 2)
    run("schedule", "--queue", "care")
    rows = ours()
    assert [row.pk for row in rows] == [pk for pk, _ in before]
    assert {row.queue for row in rows} == {"care"}
    assert rows[1].schedule.run_every.total_seconds() == 0.5
    assert [row.enabled for row in rows] == [True, False, True]
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
    none = run("simulate", "--rule", "r", "--calls", "0", "--json").document
    assert none == {"rule": "r", "calls": 0, "seconds": 0.0, "binding_limit": None}
    tokens = SlidingWindow("100/m", unit="tokens", per="key")
    rules(r=Rule(limits=[SlidingWindow("20/s", name="vendor"), tokens]))
    control.change_limit("default", "r", "vendor", "40/s")
    assert run("simulate", "--rule", "r", "--calls", "200", "--json").document["seconds"] < 5
    line = "simulate --rule r --calls 20 --cost tokens=50 --keys 5 --json"
    slow = run(*line.split()).document
    assert slow["seconds"] == pytest.approx(60.05 + 0.2, abs=0.2)


def test_people_get_a_table(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s")]))
    paced(5, 0.1)
    ran = run("audit")
    assert "5 attempts since" in ran.out
    assert "SlidingWindow 20/s" in ran.out
