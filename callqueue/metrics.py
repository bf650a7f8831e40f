"""Metrics for Prometheus: a collector that reads the database when it is scraped, and a view that
answers a scrape. Nothing is counted here, so a restart loses nothing. Counters are the sums since
ever, some seconds behind. Needs the extra `metrics`. Names rules, limits; no key, call or secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError
from django.db.models import Count
from django.http import HttpRequest, HttpResponse

from callqueue import states, tables
from callqueue.history import sums
from callqueue.history.sums import Sums
from callqueue.look import Look, RuleLook, alive, look
from callqueue.look.limits import LimitLook

Value = float | None  # None: there is none, and no sample

OF_RULES: Mapping[str, tuple[str, Callable[[RuleLook], Value]]] = {
    "waiting_calls": ("Calls that wait, due or not", lambda r: r.waits.calls),
    "in_flight_calls": ("Calls released and not answered", lambda r: r.flight.count),
    "oldest_due_seconds": ("How long the oldest due call has been", lambda r: r.oldest_due_s or 0),
    "drain_seconds": ("Until all that is due is answered, by estimate", lambda r: r.drain_s()),
    "answered_per_second": ("Attempts, over the last minute", lambda r: r.pace.per_second),
    "held": ("1 while the whole rule is held", lambda r: r.hold is not None),
}
OF_LIMITS: Mapping[str, tuple[str, Callable[[LimitLook], int]]] = {
    "limit_capacity": ("What it allows", lambda limit: limit.budget.limit.capacity),
    "limit_used": ("Used now; per key: by the key that uses most", lambda limit: limit.used),
    "limit_free": ("What of the limit is free now", lambda limit: limit.free),
}
OUTCOMES: Mapping[str, Callable[[Sums], int]] = {
    "succeeded": lambda counts: counts.done,
    "failed": lambda counts: counts.failed - counts.lost,
    "throttled": lambda counts: counts.throttled,
    "lost": lambda counts: counts.lost,
}
TIMES: Mapping[str, tuple[str, Callable[[Sums], Sequence[int]]]] = {
    "wait_seconds": ("From due to sent, of attempts", lambda counts: counts.waits),
    "answer_seconds": ("From sent to answered, of attempts", lambda counts: counts.answers),
}
KEPT = {"failed_calls": states.FAILED, "unknown_calls": states.UNKNOWN}


class CallQueueCollector:
    """A Prometheus collector. `callqueue_up` is 0, all else missing, while the database is away."""

    def __init__(self, using: str = "default") -> None:
        self.using = using
        _prometheus_client()  # says at once what is not installed

    def describe(self) -> Iterable[Any]:
        """Nothing: registering must not read the database."""
        return []

    def collect(self) -> Iterator[Any]:
        try:
            found = list(_metric_families(self.using, look(self.using)))
        except (DatabaseError, InterfaceError):
            found = []
        yield _gauge("up", "Whether callqueue's database answers", {(): bool(found)})
        yield from found


def register(registry: Any = None, using: str = "default") -> CallQueueCollector:
    """Add the collector to a registry, by default the one that prometheus_client exports."""
    collector = CallQueueCollector(using)
    (registry or _prometheus_client().REGISTRY).register(collector)
    return collector


def view(request: HttpRequest) -> HttpResponse:
    """A scrape's answer with callqueue's metrics alone, for a URL of yours: `path("metrics",
    callqueue.metrics.view)`. Whoever may reach the URL reads it.
    """
    client = _prometheus_client()
    registry = client.CollectorRegistry()
    registry.register(CallQueueCollector())
    return HttpResponse(client.generate_latest(registry), content_type=client.CONTENT_TYPE_LATEST)


def _metric_families(using: str, seen: Look) -> Iterator[Any]:
    for name, (text, of_rule) in OF_RULES.items():
        yield _gauge(name, text, {(rule.name,): of_rule(rule) for rule in seen.rules}, "rule")
    limits: dict[tuple[str, ...], LimitLook] = {
        (rule.name, limit.name, limit.budget.limit.per): limit
        for rule in seen.rules
        for limit in rule.limits
    }
    for name, (text, of_limit) in OF_LIMITS.items():
        values = {labels: of_limit(limit) for labels, limit in limits.items()}
        yield _gauge(name, text, values, "rule", "limit", "per")
    names = [rule.name for rule in seen.rules]
    yield from _counter_families(sums.read_since_ever(using, names) if seen.summed_until else {})
    kept = _count_kept_calls(using, names)
    for name, status in KEPT.items():
        text = "Calls that ended so and wait for a decision"
        yield _gauge(name, text, {(rule,): kept.get((rule, status), 0) for rule in names}, "rule")
    text = "Since the last sign of life of any dispenser"
    silent = alive.silence_s(seen.signs, seen.wall_time)
    yield _gauge("dispenser_silent_seconds", text, {(): silent})


def _counter_families(by_rule: Mapping[str, Sums]) -> Iterator[Any]:
    client = _prometheus_client()
    text = "Attempts that may have reached the provider"
    family = client.core.CounterMetricFamily(
        "callqueue_attempts_total", text, labels=["rule", "outcome"]
    )
    for rule, counts in by_rule.items():
        for outcome, value in OUTCOMES.items():
            family.add_metric([rule, outcome], value(counts))
    yield family
    bounds = [*(f"{bound:g}" for bound in sums.BOUNDS), "+Inf"]
    middles = [(low + high) / 2 for low, high in pairwise([0, *sums.BOUNDS, sums.BOUNDS[-1]])]
    for name, (text, buckets) in TIMES.items():
        text += "; the sum takes each as the middle of its bucket"
        family = client.core.HistogramMetricFamily(f"callqueue_{name}", text, labels=["rule"])
        for rule, counts in by_rule.items():
            many = buckets(counts)
            seconds = sum(count * middle for count, middle in zip(many, middles, strict=True))
            family.add_metric([rule], list(zip(bounds, accumulate(many), strict=True)), seconds)
        yield family


def _count_kept_calls(using: str, names: Iterable[str]) -> dict[tuple[str, int], int]:
    rows = tables.calls(using).filter(rule__in=names, status__in=KEPT.values()).order_by()
    counted = rows.values_list("rule", "status").annotate(Count("pk"))
    return {(rule, status): count for rule, status, count in counted}


def _gauge(name: str, text: str, values: Mapping[tuple[str, ...], Value], *labels: str) -> Any:
    family = _prometheus_client().core.GaugeMetricFamily(f"callqueue_{name}", text, labels=labels)
    for label_values, value in values.items():
        if value is not None:
            family.add_metric(label_values, float(value))
    return family


def _prometheus_client() -> Any:
    try:
        import prometheus_client.core
    except ImportError:
        raise ImproperlyConfigured(
            'callqueue.metrics needs prometheus_client: pip install "django-callqueue[metrics]"'
        ) from None
    return prometheus_client
