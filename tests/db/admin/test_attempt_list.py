"""The list of attempts: what it shows and finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from callqueue import Rule
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt
from tests.db.admin.staff import attempt, text_of
from tests.support.behaviour import send

Rules = Callable[..., None]
LIST = "admin:callqueue_callattempt_changelist"


def listed(client: Client, query: str = "") -> list[int]:
    """The attempts on the first page, in its order."""
    text = text_of(client.get(f"{reverse(LIST)}?{query}"))
    return [
        int(pk) for pk in re.findall(r'<a href="/admin/callqueue/callattempt/(\d+)/change', text)
    ]


def made(rule: str, minutes: float, **fields: Any) -> CallAttempt:
    """An attempt that ended so long ago; one that is open where `finished_at` is None."""
    one = attempt(send(rule, key=fields.pop("key", "")), **fields)
    at = ledger_time.now("default") - timedelta(minutes=minutes)
    ends = None if one.outcome == "" else at
    CallAttempt.objects.filter(pk=one.pk).update(released_at=at, finished_at=ends)
    return one


@pytest.fixture
def attempts(rules: Rules, db: None) -> dict[str, CallAttempt]:
    rules(pay=Rule(), ship=Rule())
    return {
        "open": made("pay", 0.1, outcome="", response_status=None),
        "done": made("pay", 1, outcome="succeeded", response_status=200),
        "created": made("ship", 2, outcome="succeeded", response_status=201, key="acct_2"),
        "throttled": made("pay", 3, outcome="throttled", response_status=429, key="acct_2"),
        "declined": made("pay", 4, outcome="gave up", response_status=402),
        "lost": made("ship", 5, outcome="lost", response_status=None),
        "forgiven": made("ship", 90, outcome="succeeded", response_status=402),
        "failed": made("ship", 60 * 30, outcome="failed", response_status=500),
    }


OUTCOMES = {
    "": {"open", "done", "created", "throttled", "declined", "lost", "forgiven", "failed"},
    "outcome__exact=open": {"open"},
    "outcome__exact=succeeded": {"done", "created", "forgiven"},
    "outcome__exact=throttled": {"throttled"},
    "outcome__exact=lost": {"lost"},
}
PLACES = {
    "": OUTCOMES[""],
    "rule__exact=pay": {"open", "done", "throttled", "declined"},
    "rule__exact=gone": set(),
    "q=acct_2": {"created", "throttled"},
    "ended=1h": {"done", "created", "throttled", "declined", "lost"},
    "ended=24h": {"done", "created", "throttled", "declined", "lost", "forgiven"},
    "rule__exact=ship&ended=24h": {"created", "lost", "forgiven"},
}


def test_filters_and_search_find_exactly_what_they_name_in_any_combination(
    root: Client, attempts: dict[str, CallAttempt]
) -> None:
    """The newest first."""
    newest = [one.pk for one in attempts.values()][::-1]
    for outcome, place in product(OUTCOMES, PLACES):
        query = "&".join(filter(None, (outcome, place)))
        wanted = {attempts[name].pk for name in OUTCOMES[outcome] & PLACES[place]}
        assert listed(root, query) == [pk for pk in newest if pk in wanted], query


def test_an_attempt_whose_call_is_gone_is_still_listed(
    root: Client, attempts: dict[str, CallAttempt]
) -> None:
    lost = attempts["lost"]
    assert listed(root, f"q={lost.call_id}") == [lost.pk], "a call is found by its number"
    lost.call.delete()
    assert lost.pk in listed(root)
    page = reverse("admin:callqueue_callattempt_change", args=[lost.pk])
    assert root.get(page).status_code == 200
