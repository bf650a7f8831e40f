"""What came of it: callqueue's rows held against what the vendor recorded.

In: the database, the vendor's record. Out: figures per rule, and a sentence for everything that is
not as promised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from example_project.demo.calls import CHANNELS, COUNTS, RULES, expected_status, name_of


@dataclass
class Figures:
    """A row of the table. `highest` is the most the vendor saw in any window, `allowed` what it
    allows.
    """

    rule: str
    limit: str
    highest: int
    allowed: int
    calls: int = 0
    done: int = 0
    failed: int = 0
    attempts: int = 0
    refused: int = 0
    made_twice: int = 0


@dataclass
class Verdict:
    figures: list[Figures]
    problems: list[str] = field(default_factory=list)


def judge(record: Mapping[str, Any]) -> Verdict:
    """Count what the promises are about, and note each that was broken."""
    calls = read_calls()
    verdict = Verdict([_figures(rule, record, calls) for rule in RULES])
    for figures in verdict.figures:
        verdict.problems += _broken_promises(figures)
    requests = Counter((arrival["api"], arrival["name"]) for arrival in record["arrivals"])
    for call in calls:
        verdict.problems += _surprises(call, requests[call.rule, call.name])
    verdict.problems += _missing_prices()
    return verdict


@dataclass(frozen=True)
class Call:
    """A call as the database has it."""

    rule: str
    name: str
    status: str
    attempts: int


def read_calls() -> list[Call]:
    """All calls, with their attempts that went out."""
    from callqueue.models import CallAttempt, CallQueue

    attempts = Counter(CallAttempt.objects.charged().values_list("call_id", flat=True))
    return [
        Call(
            call.rule,
            name_of(call.call_data),
            CallQueue.Status(call.status).name.lower(),
            attempts[call.pk],
        )
        for call in CallQueue.objects.order_by("pk")
    ]


def highest_use(instants: Iterable[float], window: float) -> int:
    """The most arrivals in any window that long, wherever it begins."""
    ordered = sorted(instants)
    return max(
        (
            end + 1 - bisect_left(ordered, ordered[end] - window + 1e-9)
            for end in range(len(ordered))
        ),
        default=0,
    )


def instants_of(record: Mapping[str, Any], limit: str) -> list[float]:
    """When the calls arrived that count against a limit, refused ones too."""
    return [arrival["at"] for arrival in record["arrivals"] if limit in arrival["counts"]]


def _figures(rule: str, record: Mapping[str, Any], calls: list[Call]) -> Figures:
    mine = [call for call in calls if call.rule == rule]
    arrivals = [arrival for arrival in record["arrivals"] if arrival["api"] == rule]
    succeeded = Counter(arrival["name"] for arrival in arrivals if arrival["status"] == 200)
    allowed, window = record["limits"], record["window"]
    limits = {
        "prices": ("prices", ["prices"]),
        "messages": ("channel", [f"channel:{channel}" for channel in CHANNELS]),
        "uploads": ("workspace", ["workspace"]),
    }
    limit, scopes = limits[rule]
    return Figures(
        rule=rule,
        limit=f"{allowed[limit]} a second" + WORDS[limit],
        highest=max(highest_use(instants_of(record, scope), window) for scope in scopes),
        allowed=allowed[limit],
        calls=len(mine),
        done=sum(call.status == "done" for call in mine),
        failed=sum(call.status == "failed" for call in mine),
        attempts=sum(call.attempts for call in mine),
        refused=sum(arrival["status"] == 429 for arrival in arrivals),
        made_twice=sum(count - 1 for count in succeeded.values()),
    )


WORDS = {"prices": "", "channel": ",\neach channel", "workspace": ",\nwith messages"}


def _broken_promises(figures: Figures) -> list[str]:
    broken = []
    if figures.highest > figures.allowed:
        broken.append(
            f"{figures.rule}: the vendor saw {figures.highest} "
            f"in a window that allows {figures.allowed}"
        )
    if figures.refused:
        broken.append(f"{figures.rule}: the vendor answered 429 to {figures.refused} calls")
    if figures.made_twice:
        broken.append(f"{figures.rule}: {figures.made_twice} calls succeeded more than once")
    if figures.calls != COUNTS[figures.rule]:
        broken.append(
            f"{figures.rule}: {COUNTS[figures.rule]} calls were sent, and {figures.calls} are there"
        )
    return broken


def _surprises(call: Call, requests: int) -> list[str]:
    """A call that ended otherwise than it had to, or whose requests are not its attempts."""
    found = []
    if call.status != (expected := expected_status(call.name)):
        found.append(f"{call.name} is {call.status}, not {expected}")
    if requests != call.attempts:
        found.append(
            f"{call.name}: {call.attempts} attempts are recorded, and {requests} requests arrived"
        )
    return found


def _missing_prices() -> list[str]:
    """The callbacks must have come, too."""
    from example_project.shop.models import Product

    products = [product.sku for product in Product.objects.filter(price__isnull=True)]
    missing = [sku for sku in products if expected_status(sku) == "done"]
    return (
        [f"no price was kept for {len(missing)} products, such as {missing[0]}"] if missing else []
    )
