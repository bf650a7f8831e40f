"""Metrics: what a scrape reads, and what it says while the database is away or the extra is
missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError
from django.test import RequestFactory
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from callqueue import Rule, SlidingWindow, metrics
from callqueue.operations import control
from tests.support.behaviour import release, send

Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def a_backlog(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h", name="vendor")]), idle=Rule())
    for _ in range(5):
        send("r")
    release()


def scraped() -> dict[tuple[str, ...], float]:
    """Every sample of the view: its name and its sorted labels' values -> its value."""
    answer = metrics.view(RequestFactory().get("/metrics"))
    assert answer["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.content.decode())
    return {
        (s.name, *(value for _, value in sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


def test_a_scrape_reads_every_rule_and_limit() -> None:
    found = scraped()
    assert found["callqueue_up",] == 1
    assert found["callqueue_waiting_calls", "r"] == 3
    assert found["callqueue_in_flight_calls", "r"] == 2
    assert found["callqueue_waiting_calls", "idle"] == 0
    assert found["callqueue_held", "r"] == 0
    assert found["callqueue_limit_capacity", "vendor", "rule", "r"] == 2
    assert found["callqueue_limit_used", "vendor", "rule", "r"] == 2
    assert found["callqueue_limit_free", "vendor", "rule", "r"] == 0
    assert found["callqueue_dispenser_silent_seconds",] < 60


def test_a_hold_is_seen_and_what_nobody_can_say_is_missing() -> None:
    control.pause("default", "r")
    found = scraped()
    assert found["callqueue_held", "r"] == 1
    assert ("callqueue_drain_seconds", "r") not in found
    assert ("callqueue_drain_seconds", "idle") in found


def test_a_database_that_is_away_is_a_metric_and_not_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(using: str) -> Any:
        raise OperationalError("nobody there")

    monkeypatch.setattr("callqueue.operations.status_report.look", away)
    assert scraped() == {("callqueue_up",): 0}


def test_registering_reads_nothing(django_assert_num_queries: Any) -> None:
    registry = CollectorRegistry()
    with django_assert_num_queries(0):
        metrics.register(registry)
    assert registry.get_sample_value("callqueue_waiting_calls", {"rule": "r"}) == 3


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImproperlyConfigured, match=r"django-callqueue\[metrics\]"):
        metrics.register()
