"""callqueue_schedule: the periodic tasks as rows of django-celery-beat."""

from __future__ import annotations

import pytest
from django_celery_beat.models import PeriodicTask

from tests.db.commands import run

pytestmark = pytest.mark.django_db
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


def test_without_django_celery_beat_it_says_what_to_do(settings) -> None:
    settings.INSTALLED_APPS = [
        app for app in settings.INSTALLED_APPS if app != "django_celery_beat"
    ]
    ran = run("schedule")
    assert ran.code == 1
    assert "django-celery-beat is not installed" in ran.error


@pytest.mark.parametrize("interval", ["0", "-1", "nan"])
def test_an_interval_that_is_none_is_wrong_use(interval: str) -> None:
    assert run("schedule", "--interval", interval).code == 2
