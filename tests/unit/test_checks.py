"""System checks of time: USE_TZ=False is refused, and a time limit shorter than a call is told."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.checks import run_checks

from callqueue.checks import check_time_limit
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
