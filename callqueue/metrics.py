"""Metrics for Prometheus: a collector that reads the database when it is scraped, and a view that
answers a scrape.

Nothing is counted here, so any process may be scraped and a restart loses nothing. Counters are
those that a dispenser keeps (operations.counting), some seconds behind; they begin anew with each
hour (UTC), as they would after a restart: Prometheus's rate() knows that. Needs prometheus_client,
the extra `metrics`. Names rules and limits; never a key, a call or a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError
from django.db.models import Count
from django.http import HttpRequest, HttpResponse

from callqueue import conf, database, states, tables
from callqueue.execution.limit_headers import rate_limit_headers
from callqueue.operations import backlog, dispensers, histograms, history, status_report
from callqueue.operations.history import Counts
from callqueue.operations.status_report import RuleStatus

SAID_LATELY = timedelta(minutes=10)  # for which a provider's word on what is left is shown
# The histograms' stretches (each a tenth longer than the one before) that end its buckets: about
# 0.05 s, 0.1 s, 0.2 s, and so on up to a day.
BOUNDS = tuple(range(41, 196, 7))
OUTCOMES: Mapping[str, Callable[[Counts], int]] = {
    "succeeded": lambda counts: counts.done,
    "failed": lambda counts: counts.failed - counts.lost,
    "throttled": lambda counts: counts.throttled,
    "lost": lambda counts: counts.lost,
}
KEPT = {states.FAILED: "callqueue_failed_calls", states.UNKNOWN: "callqueue_unknown_calls"}

# name: what it says, and what gives its value for a rule (None: there is none)
_OF_RULES: dict[str, tuple[str, Any]] = {
    "callqueue_waiting_calls": (
        "Calls that wait, due or not",
        lambda r: r.standing.backlog.waiting,
    ),
    "callqueue_in_flight_calls": (
        "Calls released and not answered",
        lambda r: r.standing.in_flight.count,
    ),
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
        "Until all that is due is answered; missing where there is no estimate",
        lambda r: r.drain_s,
    ),
    "callqueue_answered_per_second": (
        "Attempts answered a second, over the last minute",
        lambda r: r.standing.rate,
    ),
    "callqueue_held": (
        "1 while the whole rule is held",
        lambda r: int(r.standing.hold is not None),
    ),
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
            outcomes = _this_hour(self.using, names)
            kept = _kept(self.using, names)
            left = _left_at_providers(self.using, names)
        except (DatabaseError, InterfaceError):
            yield _gauge("callqueue_up", "Whether callqueue's database answers", [], [([], 0)])
            return
        yield _gauge("callqueue_up", "Whether callqueue's database answers", [], [([], 1)])
        yield from _of_rules(rules)
        yield from _of_limits(rules)
        yield from _of_outcomes(outcomes)
        for status, name in KEPT.items():
            text = f"Calls that are {conf.NAMES_OF_STATUS[status]} and wait for a decision"
            yield _gauge(name, text, ["rule"], kept[status])
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


def _of_rules(rules: Iterable[RuleStatus]) -> Iterator[Any]:
    for name, (text, value) in _OF_RULES.items():
        yield _gauge(
            name,
            text,
            ["rule"],
            [([rule.name], value(rule)) for rule in rules if value(rule) is not None],
        )


def _of_limits(rules: Iterable[RuleStatus]) -> Iterator[Any]:
    for name, (text, value) in _OF_LIMITS.items():
        samples = [
            ([rule.name, limit.name, limit.per], value(limit))
            for rule in rules
            for limit in rule.limits
        ]
        yield _gauge(name, text, ["rule", "limit", "per"], samples)


def _this_hour(using: str, names: list[str]) -> Mapping[str, Counts]:
    """What a dispenser has counted since the hour began; empty where none ever counted."""
    now, until, _ = history.counted_until(using)
    return history.this_hour(using, names, now) if until else {}


def _of_outcomes(found: Mapping[str, Counts]) -> Iterator[Any]:
    """Counters and histograms since the hour began."""
    _client()
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    attempts = CounterMetricFamily(
        "callqueue_attempts_total",
        "Attempts that may have reached the provider, since the hour began",
        labels=["rule", "outcome"],
    )
    waits = HistogramMetricFamily(
        "callqueue_wait_seconds", "From due to sent, of attempts", labels=["rule"]
    )
    answers = HistogramMetricFamily(
        "callqueue_answer_seconds", "From sent to answered, of attempts", labels=["rule"]
    )
    for rule, counts in found.items():
        for outcome, value in OUTCOMES.items():
            attempts.add_metric([rule, outcome], value(counts))
        for family, histogram in ((waits, counts.waits), (answers, counts.answers)):
            family.add_metric([rule], _buckets(histogram), _sum(histogram))
    yield from (attempts, waits, answers)


def _buckets(histogram: histograms.Histogram) -> list[tuple[str, int]]:
    bounds = [f"{float(f'{histograms.begin(bound):.3g}'):g}" for bound in BOUNDS]
    return list(zip([*bounds, "+Inf"], histograms.upto(histogram, BOUNDS), strict=True))


def _sum(histogram: histograms.Histogram) -> float:
    """The sum of the durations, right to a twentieth."""
    return (histograms.mean(histogram) or 0.0) * sum(histogram.values())


def _kept(using: str, names: Iterable[str]) -> dict[int, list[tuple[list[str], float]]]:
    """How many calls of each rule failed or are unknown, of those that are kept. One statement."""
    rows = tables.calls(using).filter(rule__in=names, status__in=KEPT).order_by()
    counted = {
        (status, rule): count
        for status, rule, count in rows.values_list("status", "rule").annotate(Count("pk"))
    }
    return {s: [([name], float(counted.get((s, name), 0))) for name in names] for s in KEPT}


def _left_at_providers(using: str, names: Iterable[str]) -> list[tuple[list[str], float]]:
    """Of rules whose newest answer says what is left of the provider's limit: that count. Reads an
    index entry of each rule.
    """
    now = database.clock(using)
    since = database.as_parameter(using, now - SAID_LATELY)
    newest = (
        f"SELECT id FROM (SELECT id FROM {tables.name(using, 'CallAttempt')} "
        "WHERE rule = %s AND finished_at > %s ORDER BY finished_at DESC LIMIT 1) AS newest"
    )
    ids = [pk for (pk,) in backlog.each(using, newest, [(name, since) for name in names])]
    answers = tables.attempts(using).filter(pk__in=ids).order_by("rule")
    found = []
    for rule, headers in answers.values_list("rule", "response_headers"):
        said = rate_limit_headers(headers or {}, now=now, max_hold=0.0)
        if said.remaining is not None:
            found.append(([rule], float(said.remaining)))
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
