"""What tests of the ledger and of passes do: answer attempts, and let time go by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
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


def past_attempts(
    rule: str, keys: Sequence[str], *, minutes: Sequence[float], cost: Any = 1
) -> datetime:
    """Answered attempts of these keys that ended so many minutes before the instant returned."""
    now, made = ledger_time.now("default"), []
    for number, (key, ago) in enumerate(zip(keys, minutes, strict=True)):
        at = now - timedelta(minutes=ago)
        instants = dict.fromkeys(["released_at", "started_at", "sent_at", "finished_at"], at)
        columns = {"call_id": 10**9 + number, "number": 1, "rule": rule, "key": key, "cost": cost}
        made.append(CallAttempt(**columns, outcome=states.SUCCEEDED, **instants))
    CallAttempt.objects.bulk_create(made, batch_size=2000)
    return now
