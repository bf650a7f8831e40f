"""Metrics: what a scrape reads, also while the database is away or the extra is missing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError
from django.test import RequestFactory
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from callqueue import Rule, SlidingWindow, database, metrics, states
from callqueue.history import sums
from callqueue.ledger import ledger_time
from callqueue.models import CallAttempt, CallQueue
from tests.support.behaviour import release, send

Rules = Callable[..., None]


@pytest.fixture(autouse=True)
def a_backlog(rules: Rules) -> None:
    rules(r=Rule(limits=[SlidingWindow("2/h", name="vendor")]), idle=Rule())
    for _ in range(5):
        send("r")
    release()


def count_up() -> None:
    """What a dispenser does some seconds later."""
    while sums.add_up("default"):
        pass


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
    counts = ("waiting_calls", "in_flight_calls", "held")
    assert found["callqueue_up",] == 1
    assert [found[f"callqueue_{name}", "r"] for name in counts] == [3, 2, 0]
    assert found["callqueue_waiting_calls", "idle"] == 0
    of_limit = [f"callqueue_limit_{name}" for name in ("capacity", "used", "free")]
    assert [found[name, "vendor", "rule", "r"] for name in of_limit] == [2, 2, 0]
    assert found["callqueue_dispenser_silent_seconds",] < 60
    # what nobody has counted is missing, and not nought
    assert not [name for name in found if name[0] == "callqueue_attempts_total"]
    count_up()
    assert scraped()["callqueue_attempts_total", "failed", "idle"] == 0


def test_limits_of_one_rate_and_two_units_are_told_apart(rules: Rules) -> None:
    rules(llm=Rule(limits=[SlidingWindow("100/m"), SlidingWindow("100/m", unit="tokens")]))
    send("llm", cost={"tokens": 30})
    release()
    found = scraped()
    assert found["callqueue_limit_used", "SlidingWindow 100/m", "rule", "llm"] == 1
    assert found["callqueue_limit_used", "SlidingWindow 100/m of tokens", "rule", "llm"] == 30


def test_a_database_that_is_away_or_a_missing_extra_is_told(
    monkeypatch: pytest.MonkeyPatch, django_assert_num_queries: Any
) -> None:
    registry = CollectorRegistry()
    with django_assert_num_queries(0):  # a process that registers need have no database yet
        metrics.register(registry)
    assert registry.get_sample_value("callqueue_waiting_calls", {"rule": "r"}) == 3
    monkeypatch.setattr("callqueue.metrics.look", Mock(side_effect=OperationalError("nobody")))
    assert scraped() == {("callqueue_up",): 0}, "a metric and no error"
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImproperlyConfigured, match=r"django-callqueue\[metrics\]"):
        metrics.register()


def end(outcome: str, status: int, *, waited: float, took: float | None, **columns: Any) -> None:
    """A call that ended so ten seconds ago, with one attempt."""
    call, now = send("r"), database.clock("default") - timedelta(seconds=10)
    sent = None if took is None else now - timedelta(seconds=took)
    due = (sent or now) - timedelta(seconds=waited)
    ended = {"status": status, "ready": False, "finished_at_dt": now, "last_attempt": 1}
    CallQueue.objects.filter(pk=call.pk).update(**ended, due_at_dt=due)
    moved = ledger_time.moved("default") * database.MICROSECOND
    now, sent = now - moved, sent and sent - moved
    values = {"released_at": now, "sent_at": sent, "finished_at": now, "outcome": outcome}
    CallAttempt.objects.create(call=call, number=1, rule="r", **values, **columns)


def bucket(found: dict[tuple[str, ...], float], name: str, seconds: float) -> float:
    """How many took no longer than the last bound before so many seconds."""
    bounds = [(float(key[1]), count) for key, count in found.items() if key[0] == f"{name}_bucket"]
    return max((bound, count) for bound, count in bounds if bound <= seconds)[1]


def test_what_ended_is_counted_upwards_with_its_times() -> None:
    end(states.SUCCEEDED, states.DONE, waited=2.0, took=0.2)
    end(states.SUCCEEDED, states.DONE, waited=70.0, took=3.0)
    end(states.GAVE_UP, states.FAILED, waited=0.0, took=0.01)
    end(states.LOST, states.UNKNOWN, waited=0.0, took=50.0)
    end(states.VOIDED, states.CANCELLED, waited=0.0, took=None)
    end(states.THROTTLED, states.ERROR, waited=0.0, took=0.1)
    count_up()
    found = scraped()
    for _ in range(2):
        of = {
            name[1]: value
            for name, value in found.items()
            if name[0] == "callqueue_attempts_total" and name[2] == "r"
        }
        assert of == {"succeeded": 2, "failed": 1, "throttled": 1, "lost": 1}
        count_up()
    found = {name: value for name, value in found.items() if "idle" not in name}
    assert found["callqueue_failed_calls", "r"] == found["callqueue_unknown_calls", "r"] == 1
    waits, answers = "callqueue_wait_seconds", "callqueue_answer_seconds"
    assert [bucket(found, waits, seconds) for seconds in (1.6, 5.4, 300)] == [3, 4, 5]
    assert found[f"{waits}_count", "r"] == 5
    # each as if it was in the middle of its bucket
    assert found[f"{waits}_sum", "r"] == pytest.approx(3 * 0.025 + 1.75 + 180)
    assert (bucket(found, answers, 0.05), bucket(found, answers, 0.4)) == (1, 3)
    assert found[f"{answers}_count", "r"] == 5
    assert found[f"{answers}_sum", "r"] == pytest.approx(49.025)


MONITORING = Path(__file__).parents[2] / "docs" / "how-to" / "monitoring"
NAME = re.compile(r"\bcallqueue_[a-z_]+")


def test_the_dashboard_and_the_alerts_ask_for_what_there_is_and_say_what_to_do() -> None:
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text(encoding="utf-8"))
    panels, variables = board["panels"], board["templating"]["list"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["targets"] for panel in panels)
    document = yaml.safe_load((MONITORING / "prometheus-alerts.yml").read_text(encoding="utf-8"))
    alerts = [rule for group in document["groups"] for rule in group["rules"]]
    for rule in alerts:
        assert rule["alert"].startswith("Callqueue")
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    asked += [json.dumps(variable.get("query")) for variable in variables]
    asked += [rule["expr"] for rule in alerts]
    named = {name for expression in asked for name in NAME.findall(expression)}
    assert len(named) > 10
    end(states.SUCCEEDED, states.DONE, waited=1, took=1)
    count_up()
    assert named <= {name[0] for name in scraped()}
