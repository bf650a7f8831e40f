"""The doctor: everything it finds, and what it says to do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db.migrations.recorder import MigrationRecorder
from django.utils import timezone

from callqueue import Rule, beat_schedule, broker, database
from callqueue.dispatch.dispenser import Dispenser, give_sign_of_life
from callqueue.ledger import ledger_time
from callqueue.look import doctor
from callqueue.look.doctor import Check, Facts, run_check
from callqueue.models import CallAttempt, CallQueue, DispenserState, Hold
from callqueue.testing import run_callqueue
from tests.celery_app import app
from tests.db.commands import run
from tests.support.behaviour import move_ledger, release, send
from tests.support.history import ended
from tests.support.processes import Processes

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
    facts.queues_of_workers = workers
    return run_check(name, facts)


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
    give_sign_of_life("default", "host:2", "beat")
    assert found("dispenser") == Check("dispenser", True, "running: host:2")
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(seconds=290))
    assert found("dispenser").ok
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(seconds=1000))
    assert not found("dispenser").ok
    give_sign_of_life("default", "host:2", "beat")
    Dispenser(name="host:1").run_once()
    assert found("dispenser") == Check("dispenser", True, "running: host:1")


def test_where_callqueue_run_makes_all_calls_no_broker_is_missed(
    rules: Rules, celery: Callable[..., None]
) -> None:
    celery(broker_url="amqp://guest:guest@127.0.0.1:1//", broker_transport_options={})
    rules(r=Rule(queues="egress"))
    send("r", callback="tests.echo")
    assert not found("broker").ok
    give_sign_of_life("default", "host:1", "run", digest="ab")
    for name in ("settings", "broker", "visibility timeout", "workers", "one broker", "schedule"):
        assert found(name).ok, found(name)
    assert found("workers").detail == found("broker").detail == doctor.NONE_NEEDED
    assert found("dispenser").detail == "running: host:1 (callqueue_run)"
    celery(beat_schedule=beat_schedule())
    assert found("schedule").ok, "it does what beat would do"
    give_sign_of_life("default", "host:2", "steady", digest="ab")
    assert not found("workers").ok, "the other one publishes"
    assert not found("broker").ok


def test_a_worker_that_releases_needs_a_broker_and_no_beat(
    rules: Rules, celery: Callable[..., None]
) -> None:
    celery(broker_url="amqp://guest:guest@127.0.0.1:1//", broker_transport_options={})
    rules(r=Rule())
    celery(beat_schedule=beat_schedule())
    assert not found("schedule").ok
    give_sign_of_life("default", "host:1", "worker", digest="ab")
    assert found("dispenser").detail == "running: host:1 (a worker)"
    assert found("schedule").ok, "it does what beat would do"
    assert not found("broker").ok
    give_sign_of_life("default", "host:1", "busy", digest="ab")
    assert found("dispenser").detail == "running: host:1 (a busy worker)"
    assert found("schedule").ok


def test_a_queue_without_a_worker_is_named(rules: Rules, celery: Callable[..., None]) -> None:
    """The default queue needs one once calls come to it."""
    celery(task_default_queue="standard")
    workers = {"w@host": {"egress"}}
    assert found("workers", workers).ok
    send("default")
    missing = "no worker listens on standard"
    assert_wrong(found("workers", workers), missing, "--queues standard")
    CallQueue.objects.all().delete()
    rules(default=Rule())
    assert_wrong(found("workers", workers), missing, "--queues standard")
    rules(r=Rule(queues=["egress", "other"]))
    assert_wrong(found("workers", workers), "no worker listens on other", "--queues other")
    assert_wrong(found("workers", NOBODY), "no worker answered", "--queues egress,other")
    two = found("workers", {"a": {"egress"}, "b": {"other"}})
    assert two.ok and two.detail == "2 workers listen on egress, other"
    one = found("workers", {"a": {"egress", "other"}})
    assert one.ok and one.detail == "1 worker listens on egress, other"


def test_two_schedules_are_one_too_many(celery: Callable[..., None]) -> None:
    """But where django-celery-beat's scheduler copies one into the database."""
    assert found("schedule").ok
    run("schedule")
    give_sign_of_life("default", "w:1", "beat")
    assert found("schedule") == Check("schedule", True, "in django-celery-beat, and beat runs")
    celery(beat_schedule=beat_schedule())
    assert_wrong(
        found("schedule"),
        "CELERY_BEAT_SCHEDULE: callqueue.dispenser",
        "callqueue_schedule --remove",
    )
    celery(beat_scheduler="django_celery_beat.schedulers:DatabaseScheduler")
    assert found("schedule").ok
    celery(beat_scheduler=app.conf.beat_scheduler)
    run("schedule", "--remove")
    assert found("schedule") == Check("schedule", True, "in CELERY_BEAT_SCHEDULE, and beat runs")


def test_a_beat_that_is_scheduled_and_does_not_run_is_told(celery: Callable[..., None]) -> None:
    """And so is a cleanup that nobody runs."""
    call = ended(CallQueue.Status.DONE)
    assert found("schedule").ok
    CallQueue.objects.filter(pk=call.pk).update(finished_at_dt=timezone.now() - timedelta(days=12))
    assert_wrong(found("schedule"), "for 5 days", "callqueue_cleanup")
    call.delete()
    celery(beat_schedule=beat_schedule())
    give_sign_of_life("default", "d:1", "steady")
    assert_wrong(found("schedule"), "no task of beat has run", "beat`")
    give_sign_of_life("default", "w:1", "beat")
    assert found("schedule").ok
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(minutes=3))
    assert_wrong(found("schedule"), "nothing deletes old calls", "beat`")


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


def test_clocks_that_disagree_and_a_standby_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("clock").ok
    monkeypatch.setattr(database, "clock", lambda using: timezone.now() + timedelta(seconds=30))
    assert_wrong(found("clock"), "30.0 s ahead of this host's", "NTP")
    monkeypatch.setattr(database, "is_standby", lambda using: True)
    assert_wrong(found("database"), "standby", "primary")


@pytest.mark.parametrize("set_by", [3600, 0, -3600])
def test_a_ledger_from_the_future_is_told_and_a_clock_that_was_set_long_ago_makes_none(
    set_by: int,
) -> None:
    """Rules that a dispenser held after a restore are a sign for an hour."""
    move_ledger(set_by)
    give_sign_of_life("default", "d:1", "steady", digest="one")
    send("r")
    release()
    assert found("ledger").ok
    until = ledger_time.now("default") - timedelta(minutes=30)
    hold = Hold.objects.create(rule="r", per="rule", until=until, source="restored")
    assert_wrong(found("ledger"), "held 1 rules", "one full window")
    hold.until -= timedelta(hours=1)
    hold.save()
    assert found("ledger").ok
    ahead = ledger_time.now("default") + timedelta(minutes=5)
    DispenserState.objects.update(seen_at=ahead)
    assert_wrong(found("ledger"), "from the future", "one full window")
    DispenserState.objects.all().delete()
    assert found("ledger").ok
    CallAttempt.objects.update(released_at=ahead)
    assert_wrong(found("ledger"), "from the future", "one full window")


def test_missing_migrations_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def applied(self: Any) -> Any:
        return {node: row for node, row in whole(self).items() if node[0] != "callqueue"}

    whole = MigrationRecorder.applied_migrations
    monkeypatch.setattr(MigrationRecorder, "applied_migrations", applied)
    assert_wrong(found("migrations"), "0001_initial", "migrate callqueue")


def test_a_check_that_fails_is_a_finding_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def faints(facts: Facts) -> str:
        raise RuntimeError("at the sight of blood")

    monkeypatch.setitem(doctor.ALL, "clock", faints)
    checks = {check.name: check for check in doctor.examine("default")}
    assert_wrong(checks["clock"], "at the sight of blood", "other checks")
    assert checks["calls"].ok


ADDRESSES = {
    "redis://127.0.0.1:6379/5": "redis://127.0.0.1:6379/5",
    "redis://:hidden@mq:6379/5?ssl=1": "redis://mq:6379/5",
    "amqp://shop:hidden@mq:5672/vhost": "amqp://mq:5672/vhost",
    "amqp://a:hidden@one//;amqp://b:hidden@two//": "amqp://one//;amqp://two//",
}


def test_a_dispenser_that_publishes_elsewhere_is_named_without_user_and_password(
    celery: Callable[..., None],
) -> None:
    for url, place in ADDRESSES.items():
        celery(broker_url=url, broker_write_url=url)
        assert broker.address(app) == place
    celery(broker_url="redis://:hidden@127.0.0.1:1/5", broker_write_url=None)
    Dispenser(name="host:1").run_once()
    assert found("one broker", NOBODY).ok
    celery(broker_url="redis://127.0.0.1:1/6")
    wrong = "host:1 publishes to redis://127.0.0.1:1/5; here it is"
    assert_wrong(found("one broker", NOBODY), wrong, "one CELERY_BROKER_URL")
    DispenserState.objects.update(seen_at=ledger_time.now("default") - timedelta(minutes=3))
    assert found("one broker", NOBODY).ok


def test_what_the_system_checks_say_is_told_and_only_errors_are_wrong(
    rules: Rules, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is a project that forgot its Celery application."""
    assert found("settings").detail.startswith("2 rules; ")
    rules(r=Rule(hosts=["api.example.com"]), s=Rule(hosts=["api.example.com"]))
    assert found("settings").ok
    assert "RULES['r'] has it too" in found("settings").detail
    settings.SILENCED_SYSTEM_CHECKS = ["callqueue.W004"]
    assert "RULES['r'] has it too" not in found("settings").detail
    with monkeypatch.context() as forgotten:
        forgotten.setattr(app, "main", "default")
        forgotten.setattr(app, "set_as_current", False)
        assert_wrong(found("settings"), "not loaded", "from .celery import app")
    settings.CALLQUEUE = {"RULS": {}}
    assert_wrong(found("settings"), "did you mean 'RULES'", "correct the settings")


def test_a_broker_that_is_away_or_may_drop_or_repeat_messages_is_told(
    celery: Callable[..., None],
) -> None:
    celery(broker_url="amqp://guest@127.0.0.1:1//", broker_transport_options={})
    assert_wrong(found("broker"), "refused", "start the broker")
    assert_wrong(found("settings"), "may drop a message", '{"confirm_publish": True}')
    celery(broker_transport_options={"confirm_publish": True})
    assert found("settings").ok
    celery(broker_url="redis://127.0.0.1:1", broker_transport_options={"visibility_timeout": 100})
    assert found("settings").ok
    wrong = "again after 100 s, and an attempt may take 390 s"
    assert_wrong(found("visibility timeout"), wrong, '"visibility_timeout": 450')
    celery(broker_transport_options={"visibility_timeout": 450})
    assert found("visibility timeout").ok


def test_calls_that_no_worker_begins_or_whose_rule_is_gone_are_told(rules: Rules) -> None:
    for _ in range(3):
        send("r")
    rules(other=Rule())
    assert_wrong(found("calls"), "'r'", "put the rule back")
    rules(r=Rule(queues="egress"))
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
    assert Facts("default").queues_of_workers == {"w@here": {"egress", "other"}}
    monkeypatch.setattr(Inspect, "active_queues", lambda self: 1 / 0)
    assert Facts("default").queues_of_workers == {}


def test_json_has_a_remedy_for_everything_that_is_wrong_and_people_get_a_line_for_each(
    settings: Any,
) -> None:
    """What depends on wrong settings is left out."""
    ran = run("doctor", "--json")
    assert ran.code == 1
    document = ran.document
    assert document["ok"] is False
    assert all(set(check) == {"name", "ok", "detail", "todo"} for check in document["checks"])
    assert all(bool(check["todo"]) != check["ok"] for check in document["checks"])
    well = {check["name"] for check in document["checks"] if check["ok"]}
    assert well >= {"settings", "database", "migrations", "clock"}
    assert not well & {"dispenser", "workers"}
    said = run("doctor")
    assert "dispenser: no dispenser has ever run" in said.out
    assert "do: run `manage.py callqueue_run`" in said.out
    assert "checks found something" in said.error
    settings.CALLQUEUE = {"RULS": {}}
    first, *others = run("doctor", "--json").document["checks"]
    assert (first["name"], first["ok"]) == ("settings", False)
    assert [one["name"] for one in others] == ["broker"]
    assert "did you mean 'RULES'" in first["detail"]


def test_a_real_worker_and_a_real_dispenser_are_found(
    processes: Processes, configure: Callable[[str], None]
) -> None:
    queue = processes.broker.queue("one")
    configure(f"""
CALLQUEUE = {{"RULES": {{"r": Rule(queues={queue!r})}}}}
CELERY_BROKER_TRANSPORT_OPTIONS = {{"confirm_publish": True}}
""")
    processes.worker("one")
    dispenser = processes.dispenser()
    dispenser.wait_for_log("dispensing")
    deadline = time.monotonic() + 60
    while True:  # a busy machine may keep a worker from answering in time
        document = json.loads(processes.manage("callqueue_doctor", "--json").stdout)
        wrong = [check for check in document["checks"] if not check["ok"]]
        if not wrong or time.monotonic() > deadline:
            break
    assert not wrong
    workers = next(check for check in document["checks"] if check["name"] == "workers")
    assert queue in workers["detail"]
