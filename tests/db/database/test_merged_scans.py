"""Reads of one order from many stretches of an index: what they find, and that their statements do
not grow with the rules on PostgreSQL.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from callqueue import database
from callqueue.database import merged_scans
from callqueue.models import CallQueue

TABLE = CallQueue._meta.db_table
COLUMNS = ("rule", "status", "method")
ORDER = ("-created_dt", "-pk")
NEW, DONE = int(CallQueue.Status.NEW), int(CallQueue.Status.DONE)


@pytest.fixture
def calls() -> list[int]:
    """Calls of thirty rules with two states and two methods in turn, the newest last."""
    return [
        CallQueue.objects.create(
            rule=f"rule 100% {n % 30}",
            status=(NEW, DONE)[n % 2],
            method=("get", "post")[n // 2 % 2],
            call_data={},
        ).pk
        for n in range(120)
    ]


def alike(given: dict[str, Any], **filters: Any) -> list[database.Stretch]:
    found = database.combinations("default", TABLE, COLUMNS, given)
    assert found is not None
    rows = CallQueue.objects.filter(**given, **filters).order_by()
    return [database.Alike(rows, COLUMNS, found)]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"status": DONE},
        {"method": "post"},
        {"rule": "rule 100% 7"},
        {"rule": "rule 100% 7", "status": DONE, "method": "get"},
        {"status": NEW, "method": "get"},
        {"status": 6},
    ],
    ids=str,
)
def test_pages_and_counts_are_those_of_the_table(calls: list[int], given: dict[str, Any]) -> None:
    everything = CallQueue.objects.filter(**given)
    expected = list(everything.order_by(*ORDER).values_list("pk", flat=True))
    found = database.combinations("default", TABLE, COLUMNS, given)
    assert sorted(found or ()) == sorted(set(everything.order_by().values_list(*COLUMNS)))
    stretches = alike(given)
    assert database.merged_pks(stretches, ORDER, 0, 20) == expected[:20]
    assert database.merged_pks(stretches, ORDER, 20, 40) == expected[20:40]
    assert database.merged_count(stretches, ORDER, 1000) == len(expected)
    assert database.merged_count(stretches, ORDER, 10) == min(11, len(expected))


@pytest.mark.django_db
def test_a_deep_page_is_merged_alike(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(
        CallQueue.objects.filter(status=NEW).order_by(*ORDER).values_list("pk", flat=True)
    )
    monkeypatch.setattr(merged_scans, "FEW", 30)
    assert database.merged_pks(alike({"status": NEW}), ORDER, 30, 50) == expected[30:50]


@pytest.mark.django_db
def test_what_narrows_further_keeps_its_values(calls: list[int]) -> None:
    """A parameter that is no stretch's value, and a text with a per cent sign in it."""
    chosen = set(calls[10:70])
    stretches = alike({"status": DONE}, pk__in=sorted(chosen), rule__contains="100%")
    found = database.merged_pks(stretches, ORDER, 0, 100)
    assert found == [pk for pk in reversed(calls[1::2]) if pk in chosen]
    assert database.merged_count(stretches, ORDER, 100) == len(found) == 30


@pytest.mark.django_db
def test_numbers_of_calls_are_not_taken_for_what_stands_for_a_value(calls: list[int]) -> None:
    """Whatever number stands for a state while the SQL is made."""
    call = CallQueue.objects.get(pk=calls[1])
    numbers = [1, 2, 100, 101, 102, 200, 201, 202, 31_999, 32_000, 32_001, 32_002]
    for number in numbers:
        CallQueue.objects.filter(pk=number).delete()
        call.pk = number
        call.idempotency_key = uuid4()
        call.save(force_insert=True)
    found = database.merged_pks(alike({}, pk__in=numbers), ("-pk",), 0, 50)
    assert found == sorted(numbers, reverse=True)


@pytest.mark.django_db
def test_postgresql_plans_the_stretches_of_all_rules_once(calls: list[int]) -> None:
    if connection.vendor != "postgresql":
        pytest.skip("others have no LATERAL")
    with CaptureQueriesContext(connection) as asked:
        stretches = alike({"status": DONE})
        database.merged_pks(stretches, ORDER, 0, 50)
        database.merged_count(stretches, ORDER, 1000)
    assert [one["sql"].count(f'FROM "{TABLE}"') for one in asked.captured_queries] == [2, 2, 1, 1]
