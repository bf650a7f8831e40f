"""USE_TZ=False is refused with a system check."""

from __future__ import annotations

from typing import Any

from django.core.checks import run_checks


def test_use_tz_off_is_an_error_that_says_what_to_set(settings: Any) -> None:
    settings.USE_TZ = False
    (error,) = run_checks(tags=["callqueue"])
    assert error.id == "callqueue.E004"
    assert "USE_TZ = True" in error.msg
    settings.USE_TZ = True
    assert run_checks(tags=["callqueue"]) == []
