"""A limit of a new kind is kept, shown, plotted and audited like any other."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from callqueue import Rule
from callqueue.history import audit
from callqueue.limits import kinds
from callqueue.look import look
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import release, send
from tests.support.new_kind import Spaced

Rules = Callable[..., None]


@pytest.mark.parametrize(("per", "most"), [("rule", 1), ("queue", 2), ("key", 1)])
def test_a_new_kind_goes_through_everything(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, per: str, most: int
) -> None:
    monkeypatch.setitem(kinds.KINDS, "Spaced", Spaced)  # type: ignore[arg-type]
    rules(r=Rule(limits=[Spaced("4/h", per=per)], queues=["a", "b"]))
    for _ in range(5):
        send("r", key="k")
    assert (len(release()), len(release())) == (most, 0)
    assert CallAttempt.objects.open().count() == most
    rule = look("default").rule("r")
    (limit,) = rule.limits
    assert (limit.used, limit.free) == (most, 0)
    assert rule.seconds()
    assert not CallQueue.objects.under_threshold("r", "k")
    assert not audit.audit("default", since=timedelta(hours=1)).exceeded
    assert CallQueue.objects.waiting()[0].forecast().reason
