"""Five minutes of everybody at the same calls at once: no deadlock reaches anybody, and nothing is
left half done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from callqueue.dispatch.release_pass import ensure_states
from callqueue.execution import executor, wire
from tests.support import hammer
from tests.support.behaviour import Vendor

Length = Callable[[Any, Any], Any]


@pytest.mark.slow
def test_five_minutes_of_everybody_at_the_same_calls(
    transactional_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch, length: Length
) -> None:
    if not connection.features.has_select_for_update_skip_locked:
        pytest.skip("this database has one lock for all of it")
    settings.CALLQUEUE = hammer.SETTINGS
    ensure_states("default", list(hammer.SETTINGS["RULES"]))
    vendor = Vendor()
    monkeypatch.setattr(wire, "request", vendor.request)
    monkeypatch.setattr(executor, "LOCKED", (0.0,))
    everybody = hammer.Hammer(vendor)
    everybody.run(length(5, 300))
    print(dict(everybody.turns))
    everybody.judge()
