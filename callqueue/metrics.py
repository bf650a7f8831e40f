"""Metrics for Prometheus: a collector that reads the database when it is scraped, and a view that
answers a scrape.

Nothing is counted in processes, so any one process may be scraped and a restart loses nothing.
Needs prometheus_client, the extra `metrics`. Names rules and limits; never a key, a call or a
secret.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse

from callqueue.operations import dispensers, status_report
from callqueue.operations.status_report import RuleOverview

# name: what it says, and what gives its value for a rule (None: there is none)
_OF_RULES: dict[str, tuple[str, Any]] = {
    "callqueue_waiting_calls": (
        "Calls that wait, due or not; an estimate where they are many",
        lambda r: r.waiting,
    ),
    "callqueue_in_flight_calls": ("Calls released and not answered", lambda r: r.in_flight),
    "callqueue_oldest_due_seconds": (
        "For how long the oldest due call has been due",
        lambda r: r.oldest_due_s or 0.0,
    ),
    "callqueue_drain_seconds": (
        "Until all that waits is answered; missing where nobody can say",
        lambda r: r.drain_s,
    ),
    "callqueue_answered_per_second": (
        "Attempts answered a second, over the last minute",
        lambda r: r.rate_per_s,
    ),
    "callqueue_held": ("1 while the whole rule is held", lambda r: 0 if r.hold is None else 1),
}
_OF_LIMITS: dict[str, tuple[str, Any]] = {
    "callqueue_limit_capacity": ("What the limit allows", lambda limit: limit.capacity),
    "callqueue_limit_used": (
        "What of the limit is used now; per key: by the key that uses most",
        lambda limit: limit.used,
    ),
    "callqueue_limit_free": ("What of the limit is free now", lambda limit: limit.free),
}


class CallQueueCollector:
    """A Prometheus collector. `callqueue_up` is 0, and all else is missing, while the database is
    away.
    """

    def __init__(self, using: str = "default") -> None:
        self.using = using
        _client()

    def describe(self) -> Iterable[Any]:
        """Nothing: registering must not read the database."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics as of now."""
        try:
            rules = status_report.look(self.using)
            silent = dispensers.silence(self.using)
        except (DatabaseError, InterfaceError):
            yield _gauge("callqueue_up", "Whether callqueue's database answers", [], [([], 0)])
            return
        yield _gauge("callqueue_up", "Whether callqueue's database answers", [], [([], 1)])
        yield from _of_rules(rules)
        yield from _of_limits(rules)
        if silent is not None:
            text = "Since the last sign of life of any dispenser"
            yield _gauge(
                "callqueue_dispenser_silent_seconds", text, [], [([], silent.total_seconds())]
            )


def register(registry: Any = None, using: str = "default") -> CallQueueCollector:
    """Add the collector to a registry, by default the one that prometheus_client exports
    everywhere.
    """
    collector = CallQueueCollector(using)
    (registry or _client().REGISTRY).register(collector)
    return collector


def view(request: HttpRequest) -> HttpResponse:
    """A scrape's answer with callqueue's metrics alone, for a URL of yours: `path("metrics",
    callqueue.metrics.view)`.

    Whoever may reach the URL reads it: keep it behind what keeps your other internal pages.
    """
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(CallQueueCollector())
    return HttpResponse(client.generate_latest(registry), content_type=client.CONTENT_TYPE_LATEST)


def _of_rules(rules: Iterable[RuleOverview]) -> Iterator[Any]:
    for name, (text, value) in _OF_RULES.items():
        yield _gauge(
            name,
            text,
            ["rule"],
            [([rule.name], value(rule)) for rule in rules if value(rule) is not None],
        )


def _of_limits(rules: Iterable[RuleOverview]) -> Iterator[Any]:
    for name, (text, value) in _OF_LIMITS.items():
        samples = [
            ([rule.name, limit.name, limit.per], value(limit))
            for rule in rules
            for limit in rule.limits
        ]
        yield _gauge(name, text, ["rule", "limit", "per"], samples)


def _gauge(name: str, text: str, labels: list[str], samples: list[tuple[list[str], float]]) -> Any:
    _client()
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise ImproperlyConfigured(
            'callqueue.metrics needs prometheus_client: pip install "django-callqueue[metrics]"'
        ) from None
    return prometheus_client
