"""System checks: what is wrong in the settings, with its place, and what does not go with them."""

from __future__ import annotations

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


def test_use_tz_off_is_an_error_that_says_what_to_set(settings: Any) -> None:
    settings.USE_TZ = False
    (why,) = found("E004")
    assert "USE_TZ = True" in why
    settings.USE_TZ = True
    assert run_checks(tags=["callqueue"]) == []


@pytest.mark.parametrize(("limit", "is_told"), [(None, False), (5, True), (89, True), (90, False)])
def test_a_hard_time_limit_shorter_than_a_call_is_told(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, is_told: bool
) -> None:
    monkeypatch.setattr(make_api_call, "time_limit", limit)
    assert ["RULES['default']" in why for why in found("W002")] == [True] * is_told


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


def test_a_handler_that_cannot_be_imported_is_a_check_error(settings: Any) -> None:
    settings.CALLQUEUE = {
        "HANDLERS": {"sms": "no.such.handler"},
        "RULES": {"a": Rule(classify="no.such.thing")},
    }
    assert len(found("E002")) == 2


def test_a_host_of_two_rules_is_told(settings: Any) -> None:
    settings.CALLQUEUE = {
        "RULES": {name: Rule(hosts=["api.example.com", f"{name}.example"]) for name in ("a", "b")}
    }
    (why,) = found("W004")
    assert "RULES['b'].hosts: 'api.example.com': RULES['a'] has it too" in why


@pytest.mark.parametrize(
    ("timeouts", "is_told"),
    [
        ({"read_timeout": 120}, True),
        ({"connect_timeout": 61}, True),
        ({"read_timeout": 120, "total_timeout": 120}, False),
        ({"total_timeout": 10}, False),  # the others were not stated
    ],
)
def test_a_timeout_that_total_timeout_cuts_is_told(
    settings: Any, timeouts: dict[str, float], is_told: bool
) -> None:
    settings.CALLQUEUE = {"RULES": {"a": Rule(**timeouts)}}
    assert len(found("W005")) == is_told


@pytest.mark.parametrize(
    ("listed", "creates", "is_told"),
    [(["stripe"], False, True), (["stripe"], True, False), ([], False, False)],
)
def test_a_queue_that_celery_does_not_create_is_told(
    settings: Any, listed: list[str], creates: bool, is_told: bool
) -> None:
    settings.CALLQUEUE = {"RULES": {"a": Rule(queues=["stripe", "stripes"])}}
    before = dict(app.conf.changes)
    assert app.conf.task_default_queue  # reads the configuration, where nobody has yet
    try:
        app.conf.changes.update(task_queues=listed, task_create_missing_queues=creates)
        said = ["'stripes' is not in CELERY_TASK_QUEUES" in why for why in found("E003")]
        assert said == [True] * is_told
    finally:
        app.conf.changes.clear()
        app.conf.changes.update(before)


def test_a_queued_task_whose_rule_is_gone_is_told(settings: Any) -> None:
    @app.task(base=QueuedTask, rule="githup", name="tests.checked")
    def checked() -> None: ...

    try:
        settings.CALLQUEUE = {"RULES": {"github": Rule()}}
        (why,) = found("E007")
        assert "tests.checked" in why
        assert "did you mean 'github'" in why
        settings.CALLQUEUE = {"RULES": {"githup": Rule()}}
        assert found("E007") == []
    finally:
        app.tasks.pop("tests.checked")


def test_a_database_that_commits_nothing_by_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert found("E008") == []
    monkeypatch.setitem(connections["default"].settings_dict, "AUTOCOMMIT", False)
    (why,) = found("E008")
    assert "AUTOCOMMIT" in why


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        ({}, False),
        ({"isolation_level": "read committed"}, False),
        ({"isolation_level": "REPEATABLE READ"}, True),
        ({"isolation_level": None}, True),
    ],
)
def test_repeatable_read_is_refused_on_mariadb_and_mysql(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], is_told: bool
) -> None:
    monkeypatch.setattr(connections["default"], "vendor", "mysql")
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", options)
    assert len(found("E006")) == is_told
    monkeypatch.setattr(connections["default"], "vendor", "postgresql")
    assert found("E006") == []


def test_what_is_for_trying_it_is_told_before_a_deployment(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setattr(connections["default"], "vendor", "sqlite")
    settings.CALLQUEUE = {"ALLOWED_NETWORKS": ["127.0.0.0/8"]}
    before = dict(app.conf.changes)
    assert app.conf.task_default_queue  # reads the configuration, where nobody has yet
    try:
        app.conf.changes.update(broker_url="amqp://mq//", broker_write_url="amqp://mq//")
        assert [len(found(number)) for number in DEPLOYMENT] == [1] * 4
        app.conf.changes.update(broker_transport_options={"confirm_publish": True})
        monkeypatch.setattr(connections["default"], "vendor", "postgresql")
        settings.CALLQUEUE = {"ALLOWED_NETWORKS": ["10.0.0.0/8"], "ALLOWED_HOSTS": ["a.example"]}
        assert found(*DEPLOYMENT) == []
    finally:
        app.conf.changes.clear()
        app.conf.changes.update(before)
    settings.CALLQUEUE = {"ALLOWED_NETWORKS": ["127.0.0.0/8"]}
    assert run_checks(tags=["callqueue"]) == []


@pytest.mark.parametrize("vendor", ["oracle", "microsoft", "unknown"])
def test_a_database_of_another_vendor_beside_ours_is_nothing_to_us(
    vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of `DATABASES["default"] = {}`, whose vendor is unknown."""
    monkeypatch.setattr(connections["default"], "vendor", vendor)
    assert run_checks(tags=["callqueue"]) == []
    assert found("W010") == []
