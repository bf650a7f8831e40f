from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.db import connection

from callqueue import clocks
from callqueue.database import server_clock
from callqueue.ledger import ledger_time, tallies
from callqueue.look import limits
from tests.support import length

if TYPE_CHECKING:
    from tests.support.ledger import Later


@pytest.fixture(autouse=True)
def _own_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tests move the ledger: no other judges the clock by what they read."""
    monkeypatch.setattr(ledger_time, "_watches", {})


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """`later(3)`: now it is three seconds after the test began, by both clocks."""
    real = clocks.monotonic

    def apply(seconds: float) -> None:
        monkeypatch.setattr(server_clock, "ahead", timedelta(seconds=seconds))
        monkeypatch.setattr(clocks, "monotonic", lambda: real() + seconds)

    return apply


@pytest.fixture
def thousand(monkeypatch: pytest.MonkeyPatch) -> int:
    """A thousand calls, or a tenth on slower databases, and of the thresholds of tallies too."""
    if connection.vendor == "postgresql" or length.is_whole():
        return 1000
    coarse = tallies.COARSE // 10
    monkeypatch.setattr(tallies, "COARSE", coarse)
    monkeypatch.setattr(limits, "COARSE", coarse)
    monkeypatch.setattr(tallies, "ROOMY", tallies.ROOMY // 10)
    return 100
