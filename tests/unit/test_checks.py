"""System checks: what is wrong in the settings, with its place, and what does not go with them."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.checks import run_checks

from callqueue import Rule, SlidingWindow
from callqueue.checks import check_handlers, check_settings, check_time_limit
from callqueue.tasks import make_api_call


def test_use_tz_off_is_an_error_that_says_what_to_set(settings: Any) -> None:
    settings.USE_TZ = False
    (error,) = run_checks(tags=["callqueue"])
    assert error.id == "callqueue.E004"
    assert "USE_TZ = True" in error.msg
    settings.USE_TZ = True
    assert run_checks(tags=["callqueue"]) == []


@pytest.mark.parametrize(("limit", "is_told"), [(None, False), (5, True), (89, True), (90, False)])
def test_a_hard_time_limit_shorter_than_a_call_is_told(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, is_told: bool
) -> None:
    monkeypatch.setattr(make_api_call, "time_limit", limit)
    assert [(found.id, "RULES['default']" in found.msg) for found in check_time_limit()] == [
        ("callqueue.W002", True)
    ] * is_told


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RULEZ": {}}, "did you mean 'RULES'"),
        ({"RULES": {"a": "100/h"}}, "'a'"),
        ({"RULES": {rate: Rule(limits=[SlidingWindow(rate, name="x")]) for rate in ("1/s", "2/s")}}, "'x'"),
        ({"RETENTION": {"dun": None}}, "did you mean 'done'"),
        ({"RETENTION": {"done": 7}}, "timedelta"),
        ({"DISPENSER": {"POL": 1}}, "did you mean 'POLL'"),
        ({"LEASE": {"GRACE": -1}}, "GRACE"),
        ({"ALLOWED_NETWORKS": ["10.0.0.0/99"]}, "ALLOWED_NETWORKS"),
        ({"ALLOWED_HOSTS": ["https://api.example.com/"]}, "without scheme"),
        ({"ROUTER": "no.such.thing"}, "ROUTER"),
        ({"MAX_CALL_BYTES": "big"}, "MAX_CALL_BYTES"),
        ({"ENCRYPTION_KEYS": ["short"]}, "ENCRYPTION_KEYS"),
        ({"HANDLERS": {"x": 5}}, "HANDLERS"),
        ([], "CALLQUEUE"),
    ],
)  # fmt: skip
def test_a_system_check_names_the_place_and_suggests(
    settings: Any, given: object, said: str
) -> None:
    settings.CALLQUEUE = given
    assert any(said in message.msg for message in check_settings())


def test_a_handler_that_cannot_be_imported_is_a_check_error(settings: Any) -> None:
    settings.CALLQUEUE = {
        "HANDLERS": {"sms": "no.such.handler"},
        "RULES": {"a": Rule(classify="no.such.thing")},
    }
    assert len(check_handlers()) == 2
