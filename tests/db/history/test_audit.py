"""The audit: what the ledger says was used of every limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.utils import timezone

from callqueue import (
    Concurrency,
    FixedWindow,
    Rule,
    SlidingWindow,
    TokenBucket,
    control,
    events,
    states,
)
from callqueue.history import audit
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt
from tests.db.commands import run
from tests.support.behaviour import move_ledger
from tests.support.history import NOON, attempt, paced

Rules = Callable[..., None]


def limits(document: Any) -> Sequence[Any]:
    return [limit for limit in document["limits"] if limit["rule"] == "r"]


def test_every_limit_is_reported_with_its_highest_use(rules: Rules) -> None:
    in_windows = SlidingWindow("20/s"), FixedWindow("500/d"), TokenBucket("10/s", burst=15)
    rules(r=Rule(limits=[*in_windows, Concurrency(3, name="few")]))
    paced(50, 0.1)
    ran = run("audit", "--json")
    assert ran.code == 0
    document = ran.document
    assert set(document) >= {"since", "limits"}
    sliding, fixed, bucket, few = limits(document)
    keys = {"name", "rule", "per", "rate", "allowed", "highest", "used_share", "exceeded"}
    assert all(keys <= set(limit) for limit in document["limits"])
    told = [sliding[name] for name in ("rate", "allowed", "highest", "exceeded")]
    assert told == ["20/s", 20, 10, False]
    assert (fixed["allowed"], fixed["highest"]) == (500, 50)
    assert (bucket["allowed"], bucket["highest"]) == (15, 1)
    assert (few["name"], few["allowed"], few["highest"]) == ("few", 3, 2)
    assert 0.4 < sliding["used_share"] < 0.55


@pytest.mark.parametrize("set_by", [0, 7200])
def test_since_when_is_said_by_the_clock(rules: Rules, set_by: int) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s")]))
    move_ledger(set_by)
    since = datetime.fromisoformat(run("audit", "--json", "--since", "1h").document["since"])
    assert abs(timezone.now() - timedelta(hours=1) - since) < timedelta(seconds=30)


def test_an_exceeded_limit_ends_with_1_and_is_told_by_the_rates_in_force_today(
    rules: Rules,
) -> None:
    rules(r=Rule(limits=[SlidingWindow("20/s", name="vendor")]))
    paced(12, 0.1)
    told = Mock()
    events.limit_exceeded.connect(told)
    assert run("audit").code == 0
    control.change_limit("default", "r", "vendor", "5/s")
    ran = run("audit", "--json")
    events.limit_exceeded.disconnect(told)
    assert ran.code == 1
    assert limits(ran.document)[0]["exceeded"]
    assert "exceeded: vendor of r (10/5)" in ran.error
    ((_, facts),) = told.call_args_list
    assert (facts["limit"], facts["highest"], facts["allowed"]) == ("vendor", 10, 5)


def test_what_never_reached_the_wire_or_ended_before_is_not_counted(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/s")]))
    paced(5, 0.1)
    paced(9, 0.1, outcome=states.VOIDED, sent_at=None)
    never = dict.fromkeys(("finished_at", "started_at", "sent_at"))
    attempt(ledger_time.now("default"), outcome="", **never).save()
    for since, highest in (("24h", 5), ("2h", 5), ("10m", 0)):
        assert limits(run("audit", "--json", "--since", since).document)[0]["highest"] == highest


@pytest.mark.parametrize(
    ("columns", "every_s", "highest"),
    [
        ({"finished_at": None, "sent_at": None, "outcome": ""}, 0, [3, 3]),  # as of now
        ({"sent_at": None}, 2, [1, 1]),  # at its end
    ],
    ids=["begun and open", "without an instant of sending"],
)
def test_what_has_no_instant_of_its_own_counts_at_another(
    rules: Rules, columns: dict[str, Any], every_s: int, highest: list[int]
) -> None:
    rules(r=Rule(limits=[SlidingWindow("5/s"), Concurrency(5)]), without_limits=Rule())
    CallAttempt.objects.bulk_create(
        [attempt(NOON + timedelta(seconds=n * every_s), **columns) for n in range(3)]
    )
    attempt(NOON, **{**columns, "rule": "without_limits"}).save()
    document = run("audit", "--json").document
    assert [limit["highest"] for limit in limits(document)] == highest
    assert document["attempts"] == 3


def test_pages_are_read_without_missing_or_doubling_any(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "PAGE", 7)
    rules(r=Rule(limits=[SlidingWindow("50/s")]), other=Rule(limits=[SlidingWindow("50/s")]))
    paced(40, 0.01)
    paced(10, 0.01, rule="other")
    CallAttempt.objects.bulk_create([attempt(NOON) for _ in range(9)])
    found = run("audit", "--json").document
    assert found["attempts"] == 59
    highest = {limit["rule"]: limit["highest"] for limit in found["limits"]}
    assert (highest["r"], highest["other"]) == (49, 10)
