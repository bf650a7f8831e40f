"""A limit per value of a key: what a pass costs and remembers does not grow with the values."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from callqueue import FixedWindow, Rule, SlidingWindow, TokenBucket
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue, RuleState
from callqueue.sending.validation import check_key
from tests.support.behaviour import release

pytestmark = pytest.mark.usefixtures("trusted_workers")

LIMITS = [
    SlidingWindow("5000/d", per="workspace"),
    FixedWindow("5000/d", per="workspace"),
    TokenBucket("5000/d", burst=100, per="workspace"),
]


@pytest.mark.parametrize("limit", LIMITS, ids=repr)
def test_a_row_remembers_no_more_and_a_pass_says_no_more_for_more_workspaces(
    rules: Callable[..., None], limit: Any
) -> None:
    rules(r=Rule(limits=[limit]))
    few, many = (measured(count) for count in (20, 1500))
    assert many["statements"] <= few["statements"]
    assert many["memo"] <= few["memo"] + 200


def measured(workspaces: int) -> dict[str, int]:
    """What a pass costs, and leaves in the rule's row, where so many workspaces have used some."""
    for model in (CallAttempt, CallQueue, RuleState):
        model.objects.all().delete()
    used_by(workspaces)
    for round_ in range(3):  # the first counts, the second remembers, the third is an ordinary one
        send_for(round_, workspaces)
        with CaptureQueriesContext(connection) as captured:
            assert len(release()) == 10
    memo = json.dumps(RuleState.objects.get(rule="r").memo)
    return {"statements": len(captured), "memo": len(memo)}


def used_by(workspaces: int) -> None:
    at = ledger_time.now("default") - timedelta(hours=1)
    instants = dict.fromkeys(["released_at", "started_at", "sent_at", "finished_at"], at)
    CallAttempt.objects.bulk_create(
        CallAttempt(
            call_id=10**9 + i,
            number=1,
            rule="r",
            key=check_key({"workspace": f"w{i}"}),
            cost=1,
            outcome="succeeded",
            **instants,
        )
        for i in range(workspaces)
    )


def send_for(round_: int, workspaces: int) -> None:
    call = {"method": "post", "params": {"url": "http://vendor.example/"}}
    for i in range(10):
        key = {"workspace": f"w{(round_ * 10 + i) % workspaces}"}
        CallQueue.objects.send(call, rule="r", key=key)
