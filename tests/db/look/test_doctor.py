"""The doctor: everything it finds, and what it says to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from callqueue import Rule, beat_schedule, broker, database
from callqueue.dispatch.dispenser import Dispenser
from callqueue.ledger import ledger_time
from callqueue.look import doctor
from callqueue.look.doctor import Check, Facts, examined
from callqueue.maintenance import recovery
from callqueue.models import CallAttempt, CallQueue, DispenserState, Hold
from callqueue.testing import run_callqueue
from tests.celery_app import app
from tests.db.commands import run
from tests.support.behaviour import move_ledger, release, send
from tests.support.history import ended

Rules = Callable[..., None]
Queues = dict[str, set[str]]
NOBODY: Queues = {}


@pytest.fixture(autouse=True)
def one_rule(rules: Rules, no_queued_tasks: None) -> None:
    rules(r=Rule(queues="egress"))


@pytest.fixture
def celery() -> Iterator[Callable[..., None]]:
    """`celery(name=value)`: the application's settings, for this test."""
    assert app.conf.task_default_queue  # reads the configuration, where nobody has yet
    before = dict(app.conf.changes)

    def change(**new: Any) -> None:
        app.conf.changes.update(new)
        app.amqp.__dict__.pop("router", None)  # made of the routes of before
        app.amqp._rtable = None

    yield change
    app.conf.changes.clear()
    change(**before)


def found(name: str, workers: Queues = NOBODY) -> Check:
    """What the doctor says of one thing, where these workers answered."""
    facts = Facts("default")
    facts.queues = workers
    return examined(name, facts)


def assert_wrong(check: Check, detail: str, todo: str) -> None:
    assert not check.ok
    assert detail in check.detail
    assert todo in check.todo


def test_a_dispensers_sign_of_life_is_wanted_every_few_seconds() -> None:
    assert_wrong(found("dispenser"), "no dispenser", "callqueue_dispenser")
    only = Dispenser(name="host:1")
    only.run_once()
    assert found("dispenser") == Check("dispenser", True, "running: host:1")
    only.leave()
    wrong = found("dispenser")
    assert_wrong(wrong, "none runs: the last, host:1, ended ", "callqueue_dispenser")
    Dispenser(name="host:1").run_once()
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(minutes=3))
    assert_wrong(found("dispenser"), "of host:1, is 18", "callqueue_dispenser")
    run_callqueue()
    assert not found("dispenser").ok, "a run of the test kit is none"


def test_beats_task_runs_between_its_turns_and_leaves_the_work_to_others(settings: Any) -> None:
    settings.CALLQUEUE = {"DISPENSER": {"INTERVAL": 300.0}}
    recovery.beat("default", "host:2", "beat")
    assert found("dispenser") == Check("dispenser", True, "running: host:2")
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(seconds=290))
    assert found("dispenser").ok
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(seconds=1000))
    assert not found("dispenser").ok
    recovery.beat("default", "host:2", "beat")
    Dispenser(name="host:1").run_once()
    assert found("dispenser") == Check("dispenser", True, "running: host:1")


def test_where_callqueue_run_makes_all_calls_no_broker_is_missed(
    rules: Rules, celery: Callable[..., None]
) -> None:
    celery(broker_url="amqp://guest:guest@127.0.0.1:1//", broker_transport_options={})
    rules(r=Rule(queues="egress"))
    send("r", callback="tests.echo")
    assert not found("broker").ok
    recovery.beat("default", "host:1", "run", digest="ab")
    for name in ("settings", "broker", "visibility timeout", "workers", "one broker", "schedule"):
        assert found(name).ok, found(name)
    assert found("workers").detail == found("broker").detail == doctor.RUNS
    assert found("dispenser").detail == "running: host:1 (callqueue_run)"
    celery(beat_schedule=beat_schedule())
    assert found("schedule").ok, "it does what beat would do"
    recovery.beat("default", "host:2", "steady", digest="ab")
    assert not found("workers").ok, "the other one publishes"
    assert not found("broker").ok


def test_a_worker_that_releases_needs_a_broker_and_no_beat(
    rules: Rules, celery: Callable[..., None]
) -> None:
    celery(broker_url="amqp://guest:guest@127.0.0.1:1//", broker_transport_options={})
    rules(r=Rule())
    celery(beat_schedule=beat_schedule())
    assert not found("schedule").ok
    recovery.beat("default", "host:1", "worker", digest="ab")
    assert found("dispenser").detail == "running: host:1 (a worker)"
    assert found("schedule").ok, "it does what beat would do"
    assert not found("broker").ok
    recovery.beat("default", "host:1", "busy", digest="ab")
    assert found("dispenser").detail == "running: host:1 (a busy worker)"
    assert found("schedule").ok


def test_a_queue_without_a_worker_is_named(rules: Rules, celery: Callable[..., None]) -> None:
    celery(task_default_queue="standard")
    rules(r=Rule(queues=["egress", "other"]))
    wrong = found("workers", {"w@host": {"egress"}})
    assert_wrong(wrong, "no worker listens on other", "--queues other")
    assert_wrong(
        found("workers", NOBODY),
        "no worker answered",
        "--queues egress,other",
    )
    two = found("workers", {"a": {"egress"}, "b": {"other"}})
    assert two.ok and two.detail == "2 workers listen on egress, other"
    one = found("workers", {"a": {"egress", "other"}})
    assert one.ok and one.detail == "1 worker listens on egress, other"


def test_the_default_queue_needs_a_worker_once_calls_come_to_it(
    celery: Callable[..., None], rules: Rules
) -> None:
    celery(task_default_queue="standard")
    workers = {"w@host": {"egress"}}
    assert found("workers", workers).ok
    send("default")
    assert_wrong(
        found("workers", workers),
        "no worker listens on standard",
        "--queues standard",
    )
    CallQueue.objects.all().delete()
    rules(default=Rule())
    assert_wrong(
        found("workers", workers),
        "no worker listens on standard",
        "--queues standard",
    )


def test_two_schedules_are_one_too_many(celery: Callable[..., None]) -> None:
    assert found("schedule").ok
    run("schedule")
    recovery.beat("default", "w:1", "beat")
    assert found("schedule") == Check("schedule", True, "in django-celery-beat, and beat runs")
    celery(beat_schedule=beat_schedule())
    assert_wrong(
        found("schedule"),
        "CELERY_BEAT_SCHEDULE: callqueue.dispenser",
        "callqueue_schedule --remove",
    )
    run("schedule", "--remove")
    assert found("schedule") == Check("schedule", True, "in CELERY_BEAT_SCHEDULE, and beat runs")


def test_a_beat_that_is_scheduled_and_does_not_run_is_told(celery: Callable[..., None]) -> None:
    celery(beat_schedule=beat_schedule())
    recovery.beat("default", "d:1", "steady")
    assert_wrong(found("schedule"), "no task of beat has run", "beat`")
    recovery.beat("default", "w:1", "beat")
    assert found("schedule").ok
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(minutes=3))
    assert_wrong(found("schedule"), "nothing deletes old calls", "beat`")


def test_cleanup_that_nobody_runs_is_told() -> None:
    call = ended(CallQueue.Status.DONE)
    assert found("schedule").ok
    CallQueue.objects.filter(pk=call.pk).update(finished_at_dt=timezone.now() - timedelta(days=12))
    assert_wrong(found("schedule"), "for 5 days", "callqueue_cleanup")


def test_the_queues_of_callbacks_and_of_chores_want_a_worker_too(
    celery: Callable[..., None],
) -> None:
    celery(task_default_queue="standard", task_routes={"shop.*": {"queue": "shop"}})
    listens = {"w@host": {"egress"}}
    assert found("workers", listens).ok
    send("r", callback="shop.paid")
    celery(beat_schedule=beat_schedule())
    wrong = found("workers", listens)
    assert_wrong(wrong, "no worker listens on shop, standard", "--queues shop,standard")
    wrong = found("workers", NOBODY)
    assert_wrong(wrong, "no worker answered", "--queues egress,shop,standard")
    celery(beat_schedule=beat_schedule(queue="egress"))
    wrong = found("workers", listens)
    assert_wrong(wrong, "no worker listens on shop, and", "--queues shop`")
    CallQueue.objects.update(callback="")
    assert_wrong(found("workers", NOBODY), "no worker", "--queues egress`")


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
        assert_wrong(found("broker"), f"the package {package} is not", todo)
    monkeypatch.setattr("kombu.connection.get_transport_cls", fails)  # as a connection is made
    Dispenser(name="host:1").run_once()  # waits for it as for a broker that is away
    assert found("one broker", NOBODY).ok
    assert_wrong(found("broker"), f"the package {package} is not", todo)
    assert "3600 s" in found("visibility timeout").detail


def test_a_project_that_forgot_its_celery_application_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found("settings").ok
    monkeypatch.setattr(app, "main", "default")
    monkeypatch.setattr(app, "set_as_current", False)
    assert_wrong(found("settings"), "not loaded", "from .celery import app")


def test_a_schedule_that_the_database_scheduler_copied_is_one(celery: Callable[..., None]) -> None:
    run("schedule")
    recovery.beat("default", "w:1", "beat")
    celery(
        beat_schedule=beat_schedule(),
        beat_scheduler="django_celery_beat.schedulers:DatabaseScheduler",
    )
    assert found("schedule").ok


def test_a_broker_that_is_away_is_told_within_seconds(celery: Callable[..., None]) -> None:
    celery(broker_url="amqp://guest@127.0.0.1:1//")
    assert_wrong(found("broker"), "refused", "start the broker")


def test_redis_must_not_repeat_what_is_still_at_work(
    celery: Callable[..., None], rules: Rules
) -> None:
    celery(broker_url="redis://127.0.0.1:1", broker_transport_options={"visibility_timeout": 100})
    assert_wrong(
        found("visibility timeout"),
        "again after 100 s, and an attempt may take 390 s",
        '"visibility_timeout": 450',
    )
    celery(broker_transport_options={"visibility_timeout": 450})
    assert found("visibility timeout").ok


def test_clocks_that_disagree_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("clock").ok
    monkeypatch.setattr(database, "clock", lambda using: timezone.now() + timedelta(seconds=30))
    assert_wrong(found("clock"), "30.0 s ahead of this host's", "NTP")


def test_calls_under_a_rule_that_is_gone_are_told(rules: Rules) -> None:
    send("r")
    assert found("calls").ok
    rules(other=Rule())
    assert_wrong(found("calls"), "'r'", "put the rule back")


def test_a_standby_is_no_place_to_dispense_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "is_standby", lambda using: True)
    assert_wrong(found("database"), "standby", "primary")


def test_a_ledger_from_the_future_is_told() -> None:
    send("r")
    release()
    CallAttempt.objects.update(released_at=ledger_time.now("default") + timedelta(minutes=5))
    DispenserState.objects.update(seen_at=ledger_time.now("default") + timedelta(minutes=5))
    assert_wrong(found("ledger"), "from the future", "one full window")


@pytest.mark.parametrize("set_by", [3600, -3600])
def test_a_clock_that_was_set_long_ago_makes_no_ledger_from_the_future(set_by: int) -> None:
    move_ledger(set_by)
    recovery.beat("default", "d:1", "steady", digest="one")
    send("r")
    release()
    assert found("ledger").ok
    DispenserState.objects.update(seen_at=ledger_time.now("default") + timedelta(minutes=5))
    assert_wrong(found("ledger"), "from the future", "one full window")


def test_missing_migrations_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db.migrations.recorder import MigrationRecorder

    whole = MigrationRecorder.applied_migrations
    monkeypatch.setattr(
        MigrationRecorder,
        "applied_migrations",
        lambda self: {node: row for node, row in whole(self).items() if node[0] != "callqueue"},
    )
    assert_wrong(found("migrations"), "0001_initial", "migrate callqueue")


def test_a_check_that_fails_is_a_finding_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def faints(facts: Facts) -> str:
        raise RuntimeError("at the sight of blood")

    monkeypatch.setitem(doctor.ALL, "clock", faints)
    checks = {check.name: check for check in doctor.examine("default")}
    assert_wrong(checks["clock"], "at the sight of blood", "other checks")
    assert checks["calls"].ok


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://127.0.0.1:6379/5", "redis://127.0.0.1:6379/5"),
        ("redis://:hidden@mq:6379/5?ssl=1", "redis://mq:6379/5"),
        ("amqp://shop:hidden@mq:5672/vhost", "amqp://mq:5672/vhost"),
        ("amqp://a:hidden@one//;amqp://b:hidden@two//", "amqp://one//;amqp://two//"),
    ],
)
def test_a_broker_s_address_has_no_user_and_no_password(
    celery: Callable[..., None], url: str, place: str
) -> None:
    celery(broker_url=url, broker_write_url=url)
    assert broker.address(app) == place


def test_a_dispenser_that_publishes_elsewhere_is_named(celery: Callable[..., None]) -> None:
    celery(broker_url="redis://:hidden@127.0.0.1:1/5")
    Dispenser(name="host:1").run_once()
    assert found("one broker", NOBODY).ok
    celery(broker_url="redis://127.0.0.1:1/6")
    wrong = found("one broker", NOBODY)
    assert_wrong(
        wrong, "host:1 publishes to redis://127.0.0.1:1/5; here it is", "one CELERY_BROKER_URL"
    )
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(minutes=3))
    assert found("one broker", NOBODY).ok


def test_what_the_system_checks_say_is_told_and_only_errors_are_wrong(
    rules: Rules, settings: Any
) -> None:
    assert found("settings").detail.startswith("2 rules; ")
    rules(r=Rule(hosts=["api.example.com"]), s=Rule(hosts=["api.example.com"]))
    assert found("settings").ok
    assert "RULES['r'] has it too" in found("settings").detail
    settings.SILENCED_SYSTEM_CHECKS = ["callqueue.W004"]
    assert "RULES['r'] has it too" not in found("settings").detail
    settings.CALLQUEUE = {"RULS": {}}
    assert_wrong(found("settings"), "did you mean 'RULES'", "correct the settings")


def test_rules_that_a_dispenser_held_after_a_restore_are_a_sign_for_an_hour() -> None:
    until = ledger_time.now("default") - timedelta(minutes=30)
    hold = Hold.objects.create(rule="r", per="rule", until=until, source="restored")
    assert_wrong(found("ledger"), "held 1 rules", "one full window")
    hold.until -= timedelta(hours=1)
    hold.save()
    assert found("ledger").ok


def test_a_broker_that_may_drop_messages_is_told(celery: Callable[..., None]) -> None:
    celery(broker_url="amqp://guest@127.0.0.1:1//", broker_transport_options={})
    assert_wrong(found("settings"), "may drop a message", '{"confirm_publish": True}')
    celery(broker_transport_options={"confirm_publish": True})
    assert found("settings").ok
    celery(broker_url="redis://127.0.0.1:1", broker_transport_options={})
    assert found("settings").ok


def test_calls_that_no_worker_begins_are_told() -> None:
    for _ in range(3):
        send("r")
    release()
    assert found("calls").ok
    CallAttempt.objects.update(released_at=ledger_time.now("default") - timedelta(seconds=11))
    assert_wrong(found("calls"), "3 calls of r are released, and no worker", "--concurrency")
    CallAttempt.objects.update(started_at=ledger_time.now("default"))
    assert found("calls").ok


def test_the_workers_are_asked_for_their_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that nobody can be asked is as if nobody answered."""

    class Inspect:
        def __init__(self, **_: Any) -> None: ...

        def active_queues(self) -> Any:
            return {"w@here": [{"name": "egress"}, {"name": "other"}]}

    monkeypatch.setattr(app.control, "inspect", Inspect)
    assert Facts("default").queues == {"w@here": {"egress", "other"}}
    monkeypatch.setattr(Inspect, "active_queues", lambda self: 1 / 0)
    assert Facts("default").queues == {}
