"""The doctor: everything it finds, and what it says to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Rule, beat_schedule, checks, database
from callqueue.dispatch.dispenser import Dispenser
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue, DispenserState
from callqueue.operations import doctor
from callqueue.operations.doctor import (
    broker_checks,
    database_checks,
    settings_checks,
    worker_checks,
)
from callqueue.operations.doctor.check import Check
from callqueue.operations.doctor.worker_checks import Workers
from callqueue.testing import run_callqueue
from tests.celery_app import app
from tests.db.commands import run
from tests.support import servers
from tests.support.behaviour import release, send
from tests.support.history import ended

Rules = Callable[..., None]
NOBODY = Workers({}, [])


@pytest.fixture(autouse=True)
def one_rule(rules: Rules) -> None:
    rules(r=Rule(queues="egress"))


@pytest.fixture
def celery() -> Iterator[Callable[..., None]]:
    """`celery(name=value)`: the application's settings, for this test."""
    assert app.conf.task_default_queue  # reads the configuration, where nobody has yet
    before = dict(app.conf.changes)
    yield app.conf.changes.update
    app.conf.changes.clear()
    app.conf.changes.update(before)


def assert_wrong(check: Check, detail: str, todo: str) -> None:
    assert not check.ok
    assert detail in check.detail
    assert todo in check.todo


def test_a_dispensers_sign_of_life_is_wanted_every_few_seconds() -> None:
    assert_wrong(database_checks.check_dispenser("default"), "no dispenser", "callqueue_dispenser")
    Dispenser(name="host:1").run_once()
    assert database_checks.check_dispenser("default") == Check("dispenser", True, "running: host:1")
    DispenserState.objects.update(seen_at=timezone.now() - timedelta(minutes=3))
    assert_wrong(
        database_checks.check_dispenser("default"), "of host:1, is 18", "callqueue_dispenser"
    )


def test_a_dispenser_that_has_ended_does_not_run() -> None:
    only = Dispenser(name="host:1")
    only.run_once()
    only.leave()
    wrong = database_checks.check_dispenser("default")
    assert_wrong(wrong, "none runs: the last, host:1, ended 0 s ago", "callqueue_dispenser")


def test_a_run_of_the_test_kit_is_no_dispenser_that_runs() -> None:
    run_callqueue()
    assert not database_checks.check_dispenser("default").ok


def test_beats_task_that_leaves_the_work_to_others_runs() -> None:
    recovery.beat("default", "host:2", "beat")
    assert database_checks.check_dispenser("default") == Check("dispenser", True, "running: host:2")


def test_a_queue_without_a_worker_is_named(rules: Rules, celery: Callable[..., None]) -> None:
    celery(task_default_queue="standard")
    rules(r=Rule(queues=["egress", "other"]))
    wrong = worker_checks.check_workers("default", Workers({"w@host": {"egress"}}, []))
    assert_wrong(wrong, "no worker listens on other", "--queues other")
    assert_wrong(
        worker_checks.check_workers("default", NOBODY),
        "no worker answered",
        "--queues egress,other",
    )
    assert worker_checks.check_workers("default", Workers({"a": {"egress"}, "b": {"other"}}, [])).ok


def test_the_default_queue_needs_a_worker_once_calls_come_to_it(
    celery: Callable[..., None], rules: Rules
) -> None:
    celery(task_default_queue="standard")
    workers = Workers({"w@host": {"egress"}}, [])
    assert worker_checks.check_workers("default", workers).ok
    send("default")
    assert_wrong(
        worker_checks.check_workers("default", workers),
        "no worker listens on standard",
        "--queues standard",
    )
    CallQueue.objects.all().delete()
    rules(default=Rule())
    assert_wrong(
        worker_checks.check_workers("default", workers),
        "no worker listens on standard",
        "--queues standard",
    )


def test_two_schedules_are_one_too_many(celery: Callable[..., None]) -> None:
    assert settings_checks.check_schedule("default").ok
    run("schedule")
    recovery.beat("default", "w:1", "beat")
    assert settings_checks.check_schedule("default") == Check(
        "schedule", True, "in django-celery-beat, and beat runs"
    )
    celery(beat_schedule=beat_schedule())
    assert_wrong(
        settings_checks.check_schedule("default"),
        "CELERY_BEAT_SCHEDULE: callqueue.dispenser",
        "callqueue_schedule --remove",
    )
    run("schedule", "--remove")
    assert settings_checks.check_schedule("default") == Check(
        "schedule", True, "in CELERY_BEAT_SCHEDULE, and beat runs"
    )


def test_a_beat_that_is_scheduled_and_does_not_run_is_told(celery: Callable[..., None]) -> None:
    celery(beat_schedule=beat_schedule())
    recovery.beat("default", "d:1", "steady")
    assert_wrong(settings_checks.check_schedule("default"), "no task of beat has run", "beat`")
    recovery.beat("default", "w:1", "beat")
    assert settings_checks.check_schedule("default").ok
    DispenserState.objects.update(seen_at=timezone.now() - timedelta(minutes=3))
    assert_wrong(settings_checks.check_schedule("default"), "nothing deletes old calls", "beat`")


def test_cleanup_that_nobody_runs_is_told() -> None:
    call = ended(CallQueue.Status.DONE)
    assert settings_checks.check_schedule("default").ok
    CallQueue.objects.filter(pk=call.pk).update(finished_at_dt=timezone.now() - timedelta(days=12))
    assert_wrong(settings_checks.check_schedule("default"), "for 5 days", "callqueue_cleanup")


def test_the_queues_of_callbacks_and_of_chores_want_a_worker_too(
    celery: Callable[..., None],
) -> None:
    celery(task_default_queue="standard", task_routes={"shop.*": {"queue": "shop"}})
    listens = Workers({"w@host": {"egress"}}, [])
    assert worker_checks.check_workers("default", listens).ok
    send("r", callback="shop.paid")
    celery(beat_schedule=beat_schedule())
    wrong = worker_checks.check_workers("default", listens)
    assert_wrong(wrong, "no worker listens on shop, standard", "--queues shop,standard")
    wrong = worker_checks.check_workers("default", NOBODY)
    assert_wrong(wrong, "no worker answered", "--queues egress,shop,standard")
    celery(beat_schedule=beat_schedule(queue="egress"))
    wrong = worker_checks.check_workers("default", listens)
    assert_wrong(wrong, "no worker listens on shop, and", "--queues shop`")
    CallQueue.objects.update(callback="")
    assert_wrong(worker_checks.check_workers("default", NOBODY), "no worker", "--queues egress`")


@pytest.mark.parametrize("package", ["redis", "packaging"])
def test_a_package_that_the_broker_needs_is_named(
    celery: Callable[..., None], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    import kombu

    def fails(*_: Any) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    celery(broker_url="redis://127.0.0.1:1")
    todo = 'pip install "django-callqueue[redis]"'
    with monkeypatch.context() as missing:
        missing.setattr(kombu.Connection, "transport", property(fails))
        assert_wrong(broker_checks.check_broker(), f"the package {package} is not", todo)
    monkeypatch.setattr("kombu.connection.get_transport_cls", fails)  # as a connection is made
    assert_wrong(broker_checks.check_broker(), f"the package {package} is not", todo)
    assert "3600 s" in broker_checks.check_visibility().detail


def test_a_project_that_forgot_its_celery_application_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings_checks.check_application().ok
    monkeypatch.setattr(app, "main", "default")
    monkeypatch.setattr(app, "set_as_current", False)
    assert_wrong(settings_checks.check_application(), "not loaded", "from .celery import app")
    (warning,) = checks.check_application()
    assert warning.id == "callqueue.W003"


def test_a_schedule_that_the_database_scheduler_copied_is_one(celery: Callable[..., None]) -> None:
    run("schedule")
    recovery.beat("default", "w:1", "beat")
    celery(
        beat_schedule=beat_schedule(),
        beat_scheduler="django_celery_beat.schedulers:DatabaseScheduler",
    )
    assert settings_checks.check_schedule("default").ok


def test_a_broker_that_may_drop_messages_is_told(celery: Callable[..., None]) -> None:
    celery(broker_url="amqp://guest@127.0.0.1:1//", broker_transport_options={})
    assert_wrong(broker_checks.check_confirms(), "may drop a message", '{"confirm_publish": True}')
    celery(broker_transport_options={"confirm_publish": True})
    assert broker_checks.check_confirms().ok
    celery(broker_url="redis://127.0.0.1:1", broker_transport_options={})
    assert broker_checks.check_confirms().ok


def test_a_broker_that_is_away_is_told_within_seconds(celery: Callable[..., None]) -> None:
    celery(broker_url="amqp://guest@127.0.0.1:1//")
    assert_wrong(broker_checks.check_broker(), "refused", "start the broker")


def test_redis_must_not_repeat_what_is_still_at_work(
    celery: Callable[..., None], rules: Rules
) -> None:
    celery(broker_url="redis://127.0.0.1:1", broker_transport_options={"visibility_timeout": 100})
    assert_wrong(
        broker_checks.check_visibility(),
        "again after 100 s, and an attempt may take 390 s",
        '"visibility_timeout": 450',
    )
    celery(broker_transport_options={"visibility_timeout": 450})
    assert broker_checks.check_visibility().ok


def test_clocks_that_disagree_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert database_checks.check_clock("default").ok
    monkeypatch.setattr(database, "clock", lambda using: timezone.now() + timedelta(seconds=30))
    assert_wrong(database_checks.check_clock("default"), "30.0 s ahead of this host's", "NTP")


def test_what_nobody_recovers_is_told() -> None:
    send("r")
    release()
    assert database_checks.check_stuck("default").ok
    CallAttempt.objects.update(lease_until=timezone.now() - timedelta(minutes=5))
    assert_wrong(database_checks.check_stuck("default"), "1 attempts", "recovers at once")


def test_calls_under_a_rule_that_is_gone_are_told(rules: Rules) -> None:
    send("r")
    assert database_checks.check_rules("default").ok
    rules(other=Rule())
    assert_wrong(database_checks.check_rules("default"), "'r'", "put the rule back")


def test_dead_rows_are_told_where_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        database, "dead_rows", lambda using, tables: {"callqueue_callqueue": (10, 1000)}
    )
    assert database_checks.check_bloat("default").ok
    monkeypatch.setattr(
        database, "dead_rows", lambda using, tables: {"callqueue_callqueue": (900_000, 1000)}
    )
    assert_wrong(
        database_checks.check_bloat("default"),
        "900000 dead rows beside 1000",
        "callqueue_cleanup --vacuum",
    )


def test_a_standby_is_no_place_to_dispense_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "is_standby", lambda using: True)
    assert_wrong(database_checks.check_database("default"), "standby", "primary")


def at_hand(pk: int, queue: str = "egress", **kwargs: str) -> dict[str, Any]:
    """What a worker says of a task that it has at hand."""
    return {
        "name": "callqueue.make_api_call",
        "args": [[pk]],
        "kwargs": kwargs,
        "delivery_info": {"routing_key": queue},
    }


def test_what_others_on_the_same_broker_have_at_hand_is_none_of_ours(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules(r=Rule(queues="egress"))
    tasks = [
        at_hand(1),
        at_hand(2, queue="somebody-elses"),
        at_hand(3, using="archive"),
        {"name": "shop.tasks.mail", "args": [4]},
    ]

    class Inspect:
        def __init__(self, **_: Any) -> None: ...

        def active_queues(self) -> Any:
            return {"w@ours": [{"name": "egress"}], "w@theirs": [{"name": "somebody-elses"}]}

        def active(self) -> Any:
            return {"w@ours": tasks}

        def reserved(self) -> Any:
            return {"w@ours": []}

    monkeypatch.setattr(broker_checks.celery_app().control, "inspect", Inspect)
    assert Workers.asked("default").attempt_ids == [1]
    assert Workers.asked("archive").attempt_ids == [3]


def test_a_ledger_that_was_put_back_in_time_is_told() -> None:
    send("r")
    release()
    known = CallAttempt.objects.get().pk
    assert worker_checks.check_ledger("default", Workers({}, [known])).ok
    assert_wrong(
        worker_checks.check_ledger("default", Workers({}, [known, known + 7])),
        "making 1 attempts",
        "callqueue_pause",
    )


def test_a_ledger_from_the_future_is_told() -> None:
    send("r")
    release()
    CallAttempt.objects.update(released_at=timezone.now() + timedelta(minutes=5))
    DispenserState.objects.update(seen_at=timezone.now() + timedelta(minutes=5))
    assert_wrong(worker_checks.check_ledger("default", NOBODY), "in the future", "one full window")


def test_attempts_are_read_from_what_workers_say_of_their_tasks() -> None:
    for args, found in (([[1, 2]], [1, 2]), ([3], [3]), ([], [])):
        assert (
            worker_checks._attempts_of({**at_hand(0), "args": args}, "default", {"egress"}) == found
        )
    assert (
        worker_checks._attempts_of(
            {"name": "callqueue.dispenser", "args": [[1]]}, "default", {"egress"}
        )
        == []
    )


def test_missing_migrations_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db.migrations.recorder import MigrationRecorder

    whole = MigrationRecorder.applied_migrations
    monkeypatch.setattr(
        MigrationRecorder,
        "applied_migrations",
        lambda self: {node: row for node, row in whole(self).items() if node[0] != "callqueue"},
    )
    assert_wrong(database_checks.check_migrations("default"), "0001_initial", "migrate callqueue")


def test_a_check_that_fails_is_a_finding_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def faints(using: str) -> Check:
        raise RuntimeError("at the sight of blood")

    faints.__name__ = "check_blood"
    monkeypatch.setattr(doctor, "OF_THE_DATABASE", (faints,))
    found = next(check for check in doctor.examine("default") if check.name == "blood")
    assert_wrong(found, "at the sight of blood", "other checks")


def test_rabbitmq_4_3_wants_another_celery(
    celery: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    celery(broker_url="amqp://guest@127.0.0.1:1//")
    monkeypatch.setattr(broker_checks, "_server_version", lambda: (4, 3))
    celery(control_queue_exclusive=False, event_queue_exclusive=False)
    assert_wrong(broker_checks.check_queues_of_control(), "refuses the queues", "celery>=5.7")
    celery(control_queue_durable=True, event_queue_durable=True)
    assert broker_checks.check_queues_of_control().ok
    celery(control_queue_exclusive=False, control_queue_durable=False)
    monkeypatch.setattr(broker_checks, "_server_version", lambda: (4, 2))
    assert broker_checks.check_queues_of_control().ok
    celery(broker_url="redis://127.0.0.1:1")
    assert broker_checks.check_queues_of_control().ok


@pytest.mark.server("rabbitmq")
def test_the_version_of_rabbitmq_is_read(celery: Callable[..., None]) -> None:
    celery(broker_url=servers.address("rabbitmq").text)
    assert broker_checks._server_version() > (3, 0)
    assert broker_checks.check_queues_of_control().ok
