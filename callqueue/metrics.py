"""Metrics for Prometheus: a collector that reads the database when it is scraped, and a view that
answers a scrape.

Nothing is counted in processes, so any process may be scraped and a restart loses nothing. Counters
begin anew with each hour (UTC), as they would after a restart: Prometheus's rate() knows that.
Needs prometheus_client, the extra `metrics`. Names rules and limits; never a key, a call or a
secret.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse

from callqueue import conf, database, states, tables
from callqueue.execution.limit_headers import rate_limit_headers
from callqueue.operations import dispensers, outcome_counts, status_report
from callqueue.operations.outcome_counts import Outcomes
from callqueue.operations.status_report import RuleOverview

COUNTING = 0.5  # seconds that a scrape may count what ended this hour
SAID_LATELY = timedelta(minutes=10)  # for which a provider's word on what is left is shown
OUTCOMES = {
    states.SUCCEEDED: "succeeded",
    states.ERRORED: "failed",
    states.GAVE_UP: "gave_up",
    states.THROTTLED: "throttled",
    states.LOST: "lost",
    states.VOIDED: "voided",
}

# name: what it says, and what gives its value for a rule (None: there is none)
_OF_RULES: dict[str, tuple[str, Any]] = {
    "callqueue_waiting_calls": (
        "Calls that wait, due or not; an estimate where they are many",
        lambda r: r.waiting,
    ),
    "callqueue_in_flight_calls": ("Calls released and not answered", lambda r: r.in_flight),
    "callqueue_permits_in_flight": (
        "Those of them that are not queued: permits",
        lambda r: r.not_queued.in_flight,
    ),
    "callqueue_permits_waiting": (
        "Permits that wait for their turn",
        lambda r: r.not_queued.waiting,
    ),
    "callqueue_oldest_due_seconds": (
        "For how long the oldest due call has been due",
        lambda r: r.oldest_due_s or 0.0,
    ),
    "callqueue_drain_seconds": (
        "Until all that waits is answered; missing where there is no estimate",
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
            names = [rule.name for rule in rules]
            outcomes = outcome_counts.this_hour(
                self.using, names, until=time.monotonic() + COUNTING
            )
            left = _left_at_providers(self.using, names)
        except (DatabaseError, InterfaceError):
            yield _gauge("callqueue_up", "Whether callqueue's database answers", [], [([], 0)])
            return
        yield _gauge("callqueue_up", "Whether callqueue's database answers", [], [([], 1)])
        yield from _of_rules(rules)
        yield from _of_limits(rules)
        yield from _of_outcomes(outcomes or {})
        text = "What the provider said is left of its limit, in its last answer"
        yield _gauge("callqueue_provider_remaining", text, ["rule"], left)
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


def _of_outcomes(found: Mapping[str, Outcomes]) -> Iterator[Any]:
    """Counters and histograms since the hour began; missing while they are not counted yet."""
    _client()
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    attempts = CounterMetricFamily(
        "callqueue_attempts_total",
        "Attempts ended, since the hour began",
        labels=["rule", "outcome"],
    )
    calls = CounterMetricFamily(
        "callqueue_calls_ended_total",
        "Calls ended, since the hour began",
        labels=["rule", "status"],
    )
    waits = HistogramMetricFamily(
        "callqueue_wait_seconds", "From due to the last release, of calls ended", labels=["rule"]
    )
    answers = HistogramMetricFamily(
        "callqueue_answer_seconds", "From sent to answered, of attempts ended", labels=["rule"]
    )
    for rule, of in found.items():
        for outcome, word in OUTCOMES.items():
            attempts.add_metric([rule, word], of.attempts[outcome])
        for status in outcome_counts.ENDED:
            calls.add_metric([rule, conf.NAMES_OF_STATUS[status]], of.calls[status])
        waits.add_metric([rule], _buckets(outcome_counts.WAITS, of.waits), of.waited)
        answers.add_metric([rule], _buckets(outcome_counts.ANSWERS, of.answers), of.answered)
    yield from (attempts, calls, waits, answers)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    return list(zip([*map(str, bounds), "+Inf"], counts, strict=True))


def _left_at_providers(using: str, names: Iterable[str]) -> list[tuple[list[str], float]]:
    """Of rules whose newest answer says what is left of the provider's limit: that count. One row
    of an index for each rule.
    """
    now, found = database.clock(using), []
    for name in names:
        ended = tables.attempts(using).filter(rule=name, finished_at__gt=now - SAID_LATELY)
        row = ended.order_by("-finished_at").values_list("response_headers", flat=True).first()
        said = rate_limit_headers(row or {}, now=now, max_hold=0.0)
        if said.remaining is not None:
            found.append(([name], float(said.remaining)))
    return found


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
