"""What tests of the ledger and of passes do: answer attempts, and let time go by."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from callqueue import states
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt

CALL = {"method": "post", "params": {"url": "http://vendor.example/"}}
Later = Callable[[float], None]


def answer(attempts: Any = None, *, ago: float = 0.0) -> None:
    """These attempts, or all that are open, were answered, so many seconds ago."""
    at = ledger_time.now("default") - timedelta(seconds=ago)
    ended = dict.fromkeys(("started_at", "sent_at", "finished_at"), at)
    pks = [one.pk for one in (CallAttempt.objects.open() if attempts is None else attempts)]
    for first in range(0, len(pks), 900):  # as many as SQLite takes
        some = CallAttempt.objects.filter(pk__in=pks[first : first + 900])
        some.update(**ended, outcome=states.SUCCEEDED)
