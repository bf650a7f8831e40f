"""System checks: what is wrong in the settings, with its place, and what does not go with them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connections

from callqueue import QueuedTask, Rule, SlidingWindow
from callqueue.tasks import make_api_call
from tests.celery_app import app

DEPLOYMENT = ("W010", "W011", "W012", "W013")


def found(*numbers: str) -> list[str]:
    """What the checks with these numbers say."""
    ids = [f"callqueue.{number}" for number in numbers]
    checked = run_checks(tags=["callqueue"], include_deployment_checks=True)
    return [one.msg for one in checked if one.id in ids]


@pytest.fixture(autouse=True)
def _no_tasks_of_other_tests() -> Iterator[None]:
    others = {name: app.tasks.pop(name) for name in list(app.tasks) if name.startswith("tests.")}
    yield
    app.tasks.update(others)


@pytest.fixture
def celery() -> Iterator[Any]:
    """The application's settings, to be changed until the test ends."""
    assert app.conf.task_default_queue  # reads the configuration, where nobody has yet
    before = dict(app.conf.changes)
    yield app.conf.changes
    app.conf.changes.clear()
    app.conf.changes.update(before)


def test_use_tz_off_is_an_error_that_says_what_to_set(settings: Any) -> None:
    settings.USE_TZ = False
    (why,) = found("E004")
    assert "USE_TZ = True" in why
    settings.USE_TZ = True
    assert run_checks(tags=["callqueue"]) == []


@pytest.mark.parametrize(("limit", "is_told"), [(None, False), (5, True), (89, True), (90, False)])
def test_a_hard_time_limit_shorter_than_a_call_is_told(
    monkeypatch: pytest.MonkeyPatch, celery: Any, limit: float | None, is_told: bool
) -> None:
    monkeypatch.setattr(make_api_call, "time_limit", limit)
    assert ["RULES['default']" in why for why in found("W002")] == [True] * is_told
    monkeypatch.setattr(make_api_call, "time_limit", None)
    celery.update(task_time_limit=limit)
    assert len(found("W002")) == is_told, "that of all tasks"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RULEZ": {}}, "did you mean 'RULES'"),
        ({"Rules": {}}, "did you mean 'RULES'"),
        ({"XYZ": {}}, "'ROUTER', and 2 more"),
        ({"RULES": []}, "not a dict of names, but list"),
        ({"RULES": {"a\0": Rule()}}, "not text that a database can store"),
        ({"RULES": {"a": "100/h"}}, "'a'"),
        ({"RULES": {rate: Rule(limits=[SlidingWindow(rate, name="x")]) for rate in ("1/s", "2/s")}}, "'x'"),
        ({"RETENTION": {"dun": None}}, "did you mean 'done'"),
        ({"RETENTION": {"done": 7}}, "timedelta"),
        ({"RETENTION": {"done": timedelta(-1)}}, "'done' is negative"),
        ({"DISPENSER": {"POL": 1}}, "did you mean 'POLL'"),
        ({"DISPENSER": {"IN_WORKERS": -1}}, "IN_WORKERS is not a number from 0 to 86400"),
        ({"LEASE": {"GRACE": -1}}, "GRACE"),
        ({"ALLOWED_NETWORKS": ["10.0.0.0/99"]}, "ALLOWED_NETWORKS"),
        ({"ALLOWED_HOSTS": ["https://api.example.com/"]}, "without scheme"),
        ({"ROUTER": "no.such.thing"}, "ROUTER"),
        ({"MAX_CALL_BYTES": "big"}, "MAX_CALL_BYTES"),
        ({"ENCRYPTION_KEYS": ["short"]}, "ENCRYPTION_KEYS"),
        ({"HANDLERS": {"x": 5}}, "HANDLERS"),
        ({"HANDLERS": {"x" * 101: "shop.fax"}}, "longer than 100 characters"),
        ([], "CALLQUEUE"),
    ],
)  # fmt: skip
def test_a_system_check_names_the_place_and_suggests(
    settings: Any, given: object, said: str
) -> None:
    settings.CALLQUEUE = given
    assert any(said in why for why in found("E001"))


TWICE = {name: Rule(hosts=[host, f"{name}.example"]) for name, host in
         (("a", "API.example.com"), ("b", "api.example.com"))}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "number", "said"),
    [
        ({"HANDLERS": {"sms": "no.such.handler"}}, "E002", ["sms"]),
        ({"RULES": {"a": Rule(classify="no.such.thing")}}, "E002", ["RULES['a']"]),
        ({"RULES": TWICE}, "W004", ["RULES['b'].hosts: 'api.example.com': RULES['a'] has it too"]),
        ({"RULES": {"a": Rule(read_timeout=120)}}, "W005", ["read_timeout"]),
        ({"RULES": {"a": Rule(connect_timeout=61)}}, "W005", ["connect_timeout"]),
        ({"RULES": {"a": Rule(read_timeout=120, total_timeout=120)}}, "W005", []),
        ({"RULES": {"a": Rule(total_timeout=10)}}, "W005", []),  # the others were not stated
    ],
)
def test_what_does_not_go_together_is_told(
    settings: Any, given: object, number: str, said: list[str]
) -> None:
    settings.CALLQUEUE = given
    assert [one in why for one, why in zip(said, found(number), strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("listed", "creates", "is_told"),
    [(["stripe"], False, True), (["stripe"], True, False), ([], False, False)],
)
def test_a_queue_that_celery_does_not_create_is_told(
    settings: Any, celery: Any, listed: list[str], creates: bool, is_told: bool
) -> None:
    settings.CALLQUEUE = {"RULES": {"a": Rule(queues=["stripe", "stripes"])}}
    celery.update(task_queues=listed, task_create_missing_queues=creates)
    said = ["'stripes' is not in CELERY_TASK_QUEUES" in why for why in found("E003")]
    assert said == [True] * is_told


def test_a_queued_task_whose_rule_is_gone_is_told(settings: Any) -> None:
    @app.task(base=QueuedTask, rule="githup", name="tests.checked")
    def checked() -> None: ...

    try:
        settings.CALLQUEUE = {"RULES": {"github": Rule()}}
        (why,) = found("E007")
        assert "tests.checked" in why and "did you mean 'github'" in why
        settings.CALLQUEUE = {"RULES": {"githup": Rule()}}
        assert found("E007") == []
    finally:
        app.tasks.pop("tests.checked")


@pytest.mark.parametrize(
    ("vendor", "changed", "number"),
    [
        ("postgresql", {"AUTOCOMMIT": False}, "E008"),
        ("mysql", {"OPTIONS": {}}, ""),
        ("mysql", {"OPTIONS": {"isolation_level": "read committed"}}, ""),
        ("mysql", {"OPTIONS": {"isolation_level": "REPEATABLE READ"}}, "E006"),
        ("mysql", {"OPTIONS": {"isolation_level": None}}, "E006"),
        ("postgresql", {"OPTIONS": {"isolation_level": None}}, ""),
        # beside ours; that of `DATABASES["default"] = {}` is unknown
        *[(vendor, {}, "") for vendor in ("oracle", "microsoft", "unknown")],
    ],
)
def test_a_database_that_cannot_be_counted_on_is_refused(
    monkeypatch: pytest.MonkeyPatch, vendor: str, changed: dict[str, Any], number: str
) -> None:
    monkeypatch.setattr(connections["default"], "vendor", vendor)
    for name, value in changed.items():
        monkeypatch.setitem(connections["default"].settings_dict, name, value)
    assert [one.id for one in run_checks(tags=["callqueue"])] == [f"callqueue.{number}"] * bool(
        number
    )
    assert vendor in ("postgresql", "mysql") or found("W010") == []


def test_what_is_for_trying_it_is_told_before_a_deployment(
    monkeypatch: pytest.MonkeyPatch, settings: Any, celery: Any
) -> None:
    monkeypatch.setattr(connections["default"], "vendor", "sqlite")
    settings.CALLQUEUE = {"ALLOWED_NETWORKS": ["127.0.0.0/8"]}
    celery.update(broker_url="amqp://mq//", broker_write_url="amqp://mq//")
    assert [len(found(number)) for number in DEPLOYMENT] == [1] * 4
    assert run_checks(tags=["callqueue"]) == []
    celery.update(broker_transport_options={"confirm_publish": True})
    monkeypatch.setattr(connections["default"], "vendor", "postgresql")
    settings.CALLQUEUE = {"ALLOWED_NETWORKS": ["10.0.0.0/8"], "ALLOWED_HOSTS": ["a.example"]}
    assert found(*DEPLOYMENT) == []
