"""What `send` refuses and what it writes: rules, unique keys, the caller's transaction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

import callqueue
from callqueue import Rule, SlidingWindow
from callqueue.exceptions import IllegalTransition, InvalidCall, NotAllowed, UnknownRule
from callqueue.models import CallQueue
from callqueue.sending import intake
from tests.support.behaviour import Vendor, release, run, send
from tests.support.locking import fresh

Rules = Callable[..., None]
Status = CallQueue.Status


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order-A", "order-a"),
        ("café", "cafe"),
        ("straße", "strasse"),
        ("T1", "T1 "),
        (" ", "  "),
        ("é", "e\u0301"),
        ("a", "a\u200b"),
    ],
)
def test_keys_that_differ_in_case_accents_or_spaces_are_two(
    rules: Rules, one: str, other: str
) -> None:
    rules(r=Rule(limits=[SlidingWindow("1/h", per="key")]))
    first, second = send("r", unique_key=one, key=one), send("r", unique_key=other, key=other)
    assert first != second
    assert set(release()) == {first, second}


def test_while_an_unfinished_call_carries_the_key_send_returns_it(
    rules: Rules, remote: Vendor
) -> None:
    """Whoever made it, and whoever ended it, in whatever way."""
    rules(r=Rule())
    first = send("r", unique_key="order-1")
    assert send("r", unique_key="order-1") == first
    run()
    data = {"method": "GET", "url": "http://vendor.test/"}
    second = CallQueue.objects.create(rule="r", call_data=data, unique_key="order-1")
    for status in (Status.NEW, Status.DISPATCHED, Status.ERROR, Status.NEW):
        CallQueue.objects.filter(pk=second.pk).update(status=status)
        assert send("r", unique_key="order-1") == second != first
    with pytest.raises(IllegalTransition):
        fresh(first).requeue(again=True)
    with pytest.raises(IntegrityError), transaction.atomic():
        CallQueue.objects.create(rule="r", call_data=data, unique_key="order-1")
    CallQueue.objects.filter(pk=second.pk).update(status=Status.DONE)
    assert send("r", unique_key="order-1") not in (first, second)
    with pytest.raises(IntegrityError), transaction.atomic():
        CallQueue.objects.filter(pk=second.pk).update(status=Status.NEW)
    items = [
        {"call_data": send("r").call_data, "unique_key": "twice", "priority": n} for n in (3, 4)
    ]
    assert [one.priority for one in CallQueue.objects.send_many(items, rule="r")] == [3, 3]


def test_who_carries_a_key_is_found_without_a_look_at_all_that_had_it(rules: Rules) -> None:
    """A key may come again every minute, and what has ended is kept for a month."""
    rules(r=Rule())
    plans: list[str] = []

    def explained(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("SELECT") and "unique_key" in sql.partition("WHERE")[2]:
            with connection.cursor() as cursor:
                cursor.cursor.execute(f"{connection.ops.explain_query_prefix()} {sql}", params)
                plans.append(str(cursor.cursor.fetchall()))
        return execute(sql, params, many, context)

    ended = {"rule": "r", "call_data": {}, "unique_key": "order-1", "status": Status.DONE}
    CallQueue.objects.bulk_create(CallQueue(**ended) for _ in range(1000))
    with connection.execute_wrapper(explained):
        assert send("r", unique_key="order-1") == send("r", unique_key="order-1")
    assert plans
    everything = ("INDEX callqueue_unique_key", "'ALL'", "'index'")  # SQLite's word, and MariaDB's
    assert not [plan for plan in plans for word in everything if word in plan]


def test_a_refused_send_names_the_field_and_writes_nothing(rules: Rules) -> None:
    limits = [SlidingWindow("5/s")]
    named = Rule(limits=[*limits, SlidingWindow("5/s", per="team")])
    rules({"ALLOWED_HOSTS": ["vendor.example"]}, r=Rule(limits=limits), named=named)
    url, past = "http://vendor.example/", timezone.now() - timedelta(hours=1)
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ({"method": "pust"}, {}, InvalidCall, "method"),
        ({"url": None}, {}, InvalidCall, "url"),
        ({"timeout": 3}, {}, InvalidCall, "timeout"),
        ({"url": "http://evil.example/"}, {}, NotAllowed, "evil.example"),
        ({}, {"rule": "rr"}, UnknownRule, "'r'"),
        ({}, {"cost": -1}, InvalidCall, "cost"),
        ({}, {"cost": 6}, InvalidCall, "cost"),
        ({}, {"not_before": past.replace(tzinfo=None)}, InvalidCall, "not_before"),
        ({}, {"expires_at": past}, InvalidCall, "expires_at"),
        ({}, {"priority": 99999}, InvalidCall, "priority"),
        ({}, {"key": "a\nb"}, InvalidCall, "key"),
        ({}, {"rule": "named", "key": "a"}, InvalidCall, "key.*per team"),
    ]
    for given, options, error, said in refused:
        params = {"url": url, **given}
        data = {"method": params.pop("method", "post"), "params": params}
        with pytest.raises(error, match=said):
            CallQueue.objects.send(data, **{"rule": "r", **options})
    with pytest.raises(InvalidCall, match=r"\[1\]"):
        CallQueue.objects.send_many(
            [{"method": "post", "params": {"url": url}}, {"method": "post"}], rule="r"
        )
    assert not CallQueue.objects.exists()
    largest = send("r", cost=5)
    assert largest.ready and not send("r", not_before=timezone.now() + timedelta(hours=1)).ready
    assert release() == [largest]


def test_the_rule_is_stated_or_routed_or_found_by_its_hosts(rules: Rules) -> None:
    def router(data: Any) -> Any:
        if "drop" in data["params"]["url"]:
            return callqueue.Discard("not wanted")
        if "routed" in data["params"]["url"]:
            return callqueue.Route(rule="routed", key="K", priority=4, cost=2)
        return None

    rules(
        {"ROUTER": router},
        default=Rule(),
        routed=Rule(),
        hosted=Rule(hosts=["*.vendor.example", "vendor.example"]),
        whole=Rule(hosts=["one.vendor.example"]),
        stated=Rule(priority=9),
    )

    def put(url: str, **options: Any) -> Any:
        return CallQueue.objects.send({"method": "get", "params": {"url": url}}, **options)

    assert put("http://x.example/drop", rule="stated") is None
    routed = put("http://x.example/routed")
    assert (routed.rule, routed.key, routed.priority, routed.cost) == ("routed", "K", 4, 2)
    own = {"rule": "stated", "key": "mine", "priority": 0, "cost": 3}
    stated = put("http://x.example/routed", **own)
    assert {name: getattr(stated, name) for name in own} == own
    assert put("http://one.vendor.example/").rule == "whole", "it wins over a pattern"
    assert put("http://api.vendor.example/").rule == put("http://vendor.example/").rule == "hosted"
    assert put("http://elsewhere.example/").rule == "default"


def test_a_call_that_was_in_nobodys_way_and_was_not_inserted_is_inserted_by_itself(
    rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was in its way each time was gone when it was looked for."""
    rules(r=Rule())
    insert = intake.database.insert_objects

    def insert_unless_asked_to_pass_over(
        *given: Any, unless_there: bool = False, **more: Any
    ) -> Any:
        return [] if unless_there else insert(*given, **more)

    monkeypatch.setattr(intake.database, "insert_objects", insert_unless_asked_to_pass_over)
    call = send("r", unique_key="one")
    assert CallQueue.objects.get() == call
