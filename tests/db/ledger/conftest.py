from __future__ import annotations

import pytest
from django.db import connection

from callqueue.ledger import tallies
from callqueue.look import limits
from tests.support import length


@pytest.fixture
def thousand(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls stand for a thousand where a window is so long that it is tallied.

    A tenth of it on the other databases than PostgreSQL, of the thresholds too, unless their whole
    suite runs: there the same passes take four times as long.
    """
    if connection.vendor == "postgresql" or length.is_whole():
        return 1000
    coarse = tallies.COARSE // 10
    monkeypatch.setattr(tallies, "COARSE", coarse)
    monkeypatch.setattr(limits, "COARSE", coarse)
    monkeypatch.setattr(tallies, "ROOMY", tallies.ROOMY // 10)
    return 100
